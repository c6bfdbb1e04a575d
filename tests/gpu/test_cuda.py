"""The same training on a GPU, to be run where there is one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.processes import PRELOAD
from lib.ranks import on_ranks
from lib.training import STEPS, losses_of_rank, make_config, oracle_losses

from acsgd.config.options import Config, RunConfig
from acsgd.streams import open_streams

TinyModel = Callable[..., Path]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PRELOAD_ON_A_GPU = """
import importlib, pathlib, sys, traceback
import torch

started, exists = [], pathlib.Path.exists

def start_cuda():
    started.append("".join(traceback.format_stack(limit=8)))
    return 0

pathlib.Path.exists = lambda path: str(path) == "/dev/nvidiactl" or exists(path)
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = start_cuda
importlib.import_module(sys.argv[1])
assert not started, "a process that is forked after this cannot use CUDA: " + started[0]
"""


def on_gpu(config: Config) -> Config:
    return dataclasses.replace(config, run=RunConfig(device="cuda"))


@NEEDS_GPU
@pytest.mark.parametrize("stages", [1, 2])
def test_training_equals_the_one_process_loop_on_the_cpu(stages: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    if torch.cuda.device_count() < stages:
        pytest.skip(f"needs {stages} GPUs")
    config = make_config(tiny_model(), tmp_path, stages=stages)
    losses = on_ranks(stages, losses_of_rank, tmp_path / "store", [on_gpu(config)])[0]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(oracle_losses(config), rel=1e-4)


@NEEDS_GPU
def test_work_on_the_side_stream_comes_after_what_made_its_input() -> None:
    streams = open_streams("cuda", 0)
    x = torch.randn(4096, 4096, device=streams.device)
    host = streams.host_buffer(4096 * 4096 * 4)
    assert host.is_pinned()
    y = x @ x
    with streams.side_stream(y):
        host.view(torch.float32).view(4096, 4096).copy_(y, non_blocking=True)
        event = streams.record_event()
    event.synchronize()
    assert event.query()
    assert torch.equal(host.view(torch.float32).view(4096, 4096), y.cpu())


@pytest.mark.soak
@pytest.mark.parametrize("preload", [*PRELOAD, "tests.soak.preload"])
def test_the_servers_that_ranks_are_forked_from_start_no_cuda(preload: str) -> None:
    """As a rehearsal, where there is no GPU."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", PRELOAD_ON_A_GPU, preload], cwd=root, env=environment, check=True)
