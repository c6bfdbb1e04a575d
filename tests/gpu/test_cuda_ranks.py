"""Law: two ranks that share one GPU train as two ranks on the CPU do, with every codec, mode and kind of message.

Over gloo, through host memory, and over NCCL, which takes the two for ranks of two hosts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.models import blocks_of
from lib.ranks import on_ranks
from lib.training import RELATIVE, batches_of, make_config, train

from acsgd.codecs import CODECS
from acsgd.comm.communicators import NCCL
from acsgd.config.options import Config, ReplicaConfig, RunConfig
from acsgd.dp import MODES
from acsgd.groups import connect
from acsgd.launch import Launch, set_nccl_variables
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session
from acsgd.run.setup.inputs import open_inputs

TinyModel = Callable[..., Path]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TIMEOUT = timedelta(seconds=30)
EXACT, ROUNDED = 10 * RELATIVE, 1e-3
"""Largest relative differences of losses: of sums in another order, and where these decide how a value is quantized."""
MODE_OPTIONS = {"diloco": ":inner=2", "sparseloco": ":inner=2,chunk=16", "cocktail": ":exact_steps=1"}
ROWS: dict[str, dict[str, Any]] = {
    **{
        f"2 stages, {spec}": {"forward": spec}
        for spec in (*CODECS, "none:dtype=bf16", "fixpoint:bits=4", "delta:bits=4")
    },
    **{f"2 stages, {spec} of gradients": {"backward": spec} for spec in ("fixpoint:bits=8", "lloyd")},
    "2 stages, interleaved": {"schedule": "interleaved:chunks=2"},
    "2 stages, untied": {"family": "llama"},
    "2 stages, dense ties": {"tied": "dense"},
    "2 stages, bf16": {"dtype": "bf16", "family": "llama"},
    **{f"2 replicas, {mode}": {"mode": mode + MODE_OPTIONS.get(mode, "")} for mode in MODES},
    "2 replicas, bf16": {"mode": "allreduce", "dtype": "bf16"},
}
"""Options of the pipeline, of model.dtype and of dp.mode."""
NO_NCCL = {*(name for name, row in ROWS.items() if "delta" in row.get("forward", "")), "2 replicas, local"}
"""Rows that are refused with NCCL, or send nothing over it."""
ON_GPU = [*((name, "gloo") for name in ROWS), *((name, "nccl") for name in ROWS if name not in NO_NCCL)]


def bound_of(row: dict[str, Any]) -> float:
    """Return the largest difference of a row."""
    if row.get("dtype") == "bf16":
        return 2.0**-6
    exact = all(row.get(key, "none") == "none" for key in ("forward", "backward"))
    return (
        EXACT
        if exact and row.get("mode", "allreduce") in ("allreduce", "local", "sharded_ps", "central_ps")
        else ROUNDED
    )


def config_of(row: dict[str, Any], model: Path, run_dir: Path, device: Any) -> Config:
    """Return the run of a row on a device."""
    pipeline = {key: row[key] for key in ("forward", "backward", "schedule", "tied") if key in row}
    replicas = "mode" in row
    config = make_config(model, run_dir, stages=1 if replicas else 2, **pipeline)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype=row.get("dtype", "fp32")),
        dp=ReplicaConfig(row.get("mode", "allreduce")),
        run=RunConfig(device=device),
    )


def train_rank(
    rank: int, world_size: int, store: Path, configs: Sequence[Config], uses_nccl: bool
) -> list[list[float] | str]:
    """Train each run on this rank, whose GPU is the first; return the losses of each, or how it failed."""
    set_nccl_variables()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    os.environ.update(
        NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo"
    )  # NCCL takes no two ranks of a host on one GPU
    results: list[list[float] | str] = []
    for number, config in enumerate(configs):
        try:
            results.append(losses_of(config, Launch(rank, 0, world_size), f"{store}-{number}", uses_nccl=uses_nccl))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def losses_of(config: Config, launch: Launch, store: str, *, uses_nccl: bool) -> list[float]:
    """Train a run on this rank."""
    job = prepare(config, launch)
    inputs = open_inputs(job)
    assert inputs.weight_source is not None
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(store, launch.world_size)) as groups:
        if uses_nccl:  # the run would refuse it, since the ranks share a GPU
            groups = groups.with_transport(NCCL, job.streams.device, lambda axis, ranks: True)
        session = build_session(job, inputs.weight_source, groups, inputs.cache_plan)
        losses = train(session, batches_of(job))
        session.close()
        return losses


@pytest.fixture(scope="module")
def losses(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, selected: Callable[[str], set[Any]]
) -> dict[tuple[str, str], Any]:
    """Losses by name of a row and transport, "cpu" for those on the CPU."""
    directory, chosen = tmp_path_factory.mktemp("ranks"), selected("name_and_transport")
    names = {transport: [name for name, each in ON_GPU if (name, each) in chosen] for transport in ("gloo", "nccl")}
    names["cpu"] = sorted({*names["gloo"], *names["nccl"]})
    configs: dict[str, list[Config]] = {}
    for transport, of_transport in names.items():
        configs[transport] = []
        for index, name in enumerate(of_transport):
            family = ROWS[name].get("family", "gpt2")
            model = tiny_model(family, **blocks_of(family, 4))
            device = "cpu" if transport == "cpu" else "cuda"
            configs[transport].append(config_of(ROWS[name], model, directory / f"{transport}-{index}", device))

    def by_rank(transport: str) -> list[list[Any]]:
        args = directory / f"store-{transport}", configs[transport], transport == "nccl"
        return on_ranks(2, train_rank, *args) if configs[transport] else [[], []]

    with ThreadPoolExecutor(len(names)) as threads:  # most of the time passes until processes have started
        results = dict(zip(names, threads.map(by_rank, names), strict=True))
    return {
        (name, transport): each
        for transport, of_ranks in results.items()
        for name, each in zip(names[transport], zip(*of_ranks, strict=True), strict=True)
    }


@pytest.mark.parametrize("name_and_transport", ON_GPU, ids=", ".join)
def test_two_ranks_on_one_gpu_train_as_on_the_cpu(
    name_and_transport: tuple[str, str], losses: dict[tuple[str, str], Any]
) -> None:
    name, _ = name_and_transport
    on_cpu, on_gpu = losses[name, "cpu"], losses[name_and_transport]
    assert isinstance(on_cpu[0], list), on_cpu
    assert on_gpu[0] == on_gpu[1], "ranks differ"
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=bound_of(ROWS[name]))
