"""Law, on a GPU: a step waits for the device once, whatever the numbers of micro-batches and layers.

tests/dist/test_device_waits.py has the same law on a stand-in, and messages between stages.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.cache import shared_model
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, plain_config

from acsgd import codecs
from acsgd.codecs.base import holds_nan
from acsgd.config.options import Config, RunConfig
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session
from acsgd.train import train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def count(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[list[list[str]]]:
    """Return what waited for the device in each step of each run: file and line."""
    waits: list[list[list[str]]] = []
    for number, config in enumerate(configs):
        job, file_store = prepare(config, Launch(rank, rank, world_size)), dist.FileStore(f"{store}-{number}")
        waits.append([])
        with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
            session, progress = build_session(job, open_weight_source(job), groups), Progress()
            for batch in batches_of(job):
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    progress = train_step(session, batch, progress).progress
                    torch.cuda.set_sync_debug_mode("default")
                waits[-1].append([f"{w.filename}:{w.lineno}" for w in found if "synchronizing" in str(w.message)])
            session.close()
    return waits


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_waits_once(stages: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < stages:
        pytest.skip(f"needs {stages} GPUs")
    configs = []
    for blocks, micro in ((2, 3), (2, 1), (4, 1)):
        config = plain_config(shared_model(tmp_path, blocks=blocks), tmp_path, micro=micro, stages=stages)
        data = dataclasses.replace(config.data, sequence=16)
        configs.append(dataclasses.replace(config, data=data, run=RunConfig(device="cuda")))
    for by_config in on_ranks(stages, count, tmp_path / "store", configs):
        for waits in by_config:
            after_the_first = waits[1:]  # the first steps allocate buffers and look up the head
            assert all(len(step) == len(by_config[0][-1]) for step in after_the_first), by_config
            assert stages > 1 or all(len(step) == 1 for step in after_the_first), by_config


@pytest.mark.parametrize(
    "spec", ["fixpoint:bits=4", "fixpoint:bits=2,scale=l2,centroids=true", "lloyd:bits=4", "hadamard:bits=4,low=4"]
)
def test_a_codec_marks_what_is_not_finite_without_a_wait(spec: str) -> None:
    codec, finite = codecs.parse(spec), torch.randn(64, 128, device="cuda")
    infinite = finite.clone()
    infinite[3, 5] = torch.inf
    tensors = finite, infinite, infinite - infinite
    codec.encode(finite)  # compiles kernels, and copies tables to the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        marks = [holds_nan(codec.encode(x)) for x in tensors]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [bool(mark) for mark in marks] == [False, True, True]
