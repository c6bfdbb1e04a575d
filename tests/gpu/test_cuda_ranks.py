"""Law: two ranks that share one GPU train as two ranks on the CPU do, with every codec, mode and kind of message.

Over gloo, through host memory, and over NCCL, which takes the two for ranks of two hosts.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.cache import shared_model
from lib.forks import make_config as make_run
from lib.forks import started
from lib.hooked import Run, batch, net
from lib.models import blocks_of
from lib.ordered import ordered_transport, register_ordered_transport
from lib.ranks import on_ranks
from lib.training import RELATIVE, batches_of, make_config, train

from acsgd import main
from acsgd.codecs import CODECS
from acsgd.comm.communicators import NCCL
from acsgd.config.options import CheckpointConfig, Config, ReplicaConfig, RunConfig
from acsgd.dp import MODES
from acsgd.groups import Groups, connect
from acsgd.launch import Launch, set_variables
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.run.plan import job as plan
from acsgd.run.plan.job import Job, prepare
from acsgd.run.plan.transports import Transports
from acsgd.run.setup.build import build_session
from acsgd.run.setup.inputs import open_inputs
from acsgd.streams import open_streams

TinyModel = Callable[..., Path]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [pytest.param("cuda", marks=NEEDS_GPU), pytest.param("cpu", marks=pytest.mark.soak)]
"""On the CPU a transport with the semantics of NCCL takes its place: a rehearsal, so that no time of a GPU is lost."""

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
    "2 stages, entropy-coded rows": {"tied": "rows:entropy_coding=true"},
    "2 stages, bf16": {"dtype": "bf16", "family": "llama"},
    **{f"2 replicas, {mode}": {"mode": mode + MODE_OPTIONS.get(mode, "")} for mode in MODES},
    "2 replicas, bf16": {"mode": "allreduce", "dtype": "bf16"},
}
"""Options of the pipeline, of model.dtype and of dp.mode."""
NO_NCCL = {*(name for name, row in ROWS.items() if "delta" in row.get("forward", "")), "2 replicas, local"}
"""Rows that are refused with NCCL, or send nothing over it."""
ON_GPU = [*((name, "gloo") for name in ROWS), *((name, "nccl") for name in ROWS if name not in NO_NCCL)]


def share_a_gpu(rank: int) -> None:
    """Let NCCL take two ranks of this host for ranks of two hosts: it takes no two of a host on one GPU."""
    set_variables()
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")


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
    share_a_gpu(rank)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
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


@NEEDS_GPU
@pytest.mark.parametrize("name_and_transport", ON_GPU, ids=", ".join)
def test_two_ranks_on_one_gpu_train_as_on_the_cpu(
    name_and_transport: tuple[str, str], losses: dict[tuple[str, str], Any]
) -> None:
    name, _ = name_and_transport
    on_cpu, on_gpu = losses[name, "cpu"], losses[name_and_transport]
    assert isinstance(on_cpu[0], list), on_cpu
    assert on_gpu[0] == on_gpu[1], "ranks differ"
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=bound_of(ROWS[name]))


Hooked = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]


def train_with_hook(rank: int, world_size: int, store: Path, device: str) -> dict[str, list[Hooked]]:
    """Train with hooks of DDP over gloo and over NCCL; return the weights, the state and the sent bytes."""
    share_a_gpu(rank)
    torch.set_num_threads(1)
    transport, backend = "nccl", "cpu:gloo,cuda:nccl"
    if device == "cpu":
        transport, backend = register_ordered_transport(rank), "gloo"
    file_store = dist.FileStore(str(store), world_size)
    dist.init_process_group(backend, store=file_store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    trained: dict[str, list[Hooked]] = {}
    for each in ("gloo", transport):
        trained[each] = []
        for form in ("few", "corrected", "few bits"):
            run = Run(form, net().to(device), transport=each)
            for step in range(5):
                run.optimizer.zero_grad()
                run.model(batch(rank, step).to(device)).backward()
                run.optimizer.step()
            states = run.weights(), run.state.state_dict()
            on_cpu = [{name: x.cpu() for name, x in state.items()} for state in states]
            trained[each].append((*on_cpu, run.state.meter.sent_bytes))
            del run
    dist.barrier()
    dist.destroy_process_group()
    return trained


@pytest.mark.parametrize("device", DEVICES)
def test_hooks_of_ddp_train_over_nccl_as_over_gloo(device: str, tmp_path: Path) -> None:
    """Bit for bit, and with as many bytes."""
    for trained in on_ranks(2, train_with_hook, tmp_path / "store", device):
        for (weights, saved, sent), (others, theirs, sent_over) in zip(*trained.values(), strict=True):
            assert all(torch.equal(weights[name], x) for name, x in others.items())
            assert all(torch.equal(saved[name], x) for name, x in theirs.items())
            assert sent == sent_over > 0


def end_within_a_step(rank: int, *, notice: Path, device: str) -> None:
    """Let the ranks of a run share a device and exchange its tensors over NCCL, and let rank 1 end in step 3."""
    share_a_gpu(rank)
    forward, transport = Stage.forward, ordered_transport(rank) if device == "cpu" else NCCL

    def ends(stage: Stage, micro: MicroBatch, *args: Any) -> Any:
        if rank == 1 and micro.step == 2:
            notice.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(stage, micro, *args)

    def open_transport(job: Job, groups: Groups, _: Transports) -> tuple[Groups, list[str]]:
        return groups.with_transport(transport, job.streams.device, lambda axis, ranks: True), []

    Stage.forward = ends  # type: ignore[method-assign]
    main.open_transports = open_transport
    plan.open_streams = lambda device, local_rank: open_streams(device, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_that_ends_within_an_operation_of_nccl_is_named(stages: int, device: Any, tmp_path: Path) -> None:
    """Once, by a rank that would wait for ever."""
    model, checkpoint = shared_model(tmp_path, blocks=2), CheckpointConfig()
    config = make_run(model, tmp_path / "run", processes=2, steps=100_000, checkpoint=checkpoint)
    pp, run_config = dataclasses.replace(config.pp, stages=stages, layers=None), RunConfig(device=device, timeout=30.0)
    config, notice = dataclasses.replace(config, pp=pp, run=run_config), tmp_path / "ended"
    with started(config, 2, setup=partial(end_within_a_step, notice=notice, device=device)) as run:
        run.wait_until(notice.exists)
        assert run.join(60.0, ranks=[0]) == [1], run.stderr
        (error,) = run.errors
        assert re.match(rf"error: rank 0 on {socket.gethostname()}: \w+ .+, with ranks \[1\]: ", error)
        assert "Traceback" not in run.stderr
