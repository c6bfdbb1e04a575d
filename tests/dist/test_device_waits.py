"""Law: the host waits for the device once per step, and for each message that it sends through gloo.

Neither micro-batches, layers nor buckets add a wait. The device is a stand-in, whose losses equal those of the CPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.cache import with_shared_cache
from lib.forks import save_model
from lib.ordered import ordered_transport
from lib.ranks import on_ranks
from lib.stand_in import on_stand_in
from lib.training import TIMEOUT, batches_of, losses_of_rank, plain_config

from acsgd.config.options import Config, ReplicaConfig
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.optim.offload import MAX_IN_FLIGHT
from acsgd.pp import SCHEDULES
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.train import train_step

ONCE = Counter({"copy to the host": 1})
HEADERS = Counter({"copy to the host": 1})
"""The read of loss and gradient norm at the end of a step."""


class Observed(NamedTuple):
    """What one rank observes of a run."""

    losses: list[float]
    waits: list[Counter[str]]
    """By step."""
    buffers: list[int]
    """Host buffers allocated so far, by step."""
    on_device: set[str]
    """Which of masters, their gradients and the optimizer's state are on the device after the last step."""


def config_of(tmp_path: Path, *, blocks: int = 2, micro: int = 1, dp: str = "", **pp: object) -> Config:
    model = tmp_path.parent / f"untied-{blocks}" / "model"  # a device tensor cannot be a table of rows of another rank
    if not model.exists():
        save_model(model, blocks=blocks, tied=False)
    config = plain_config(model, tmp_path, steps=3, micro=micro, **pp)
    data = dataclasses.replace(config.data, sequence=16)
    replicas = ReplicaConfig(mode=dp) if dp else config.dp
    return with_shared_cache(dataclasses.replace(config, data=data, dp=replicas))


def observe(rank: int, world_size: int, store: Path, configs: Sequence[Config], *transports: str) -> list[Observed]:
    """Train each run on the stand-in. transports: "ordered" or none."""
    torch.set_num_threads(1)
    observed = []
    with on_stand_in() as streams:
        for number, config in enumerate(configs):
            job, file_store = prepare(config, Launch(rank, rank, world_size)), dist.FileStore(f"{store}-{number}")
            found, progress = Observed([], [], [], set()), Progress()
            with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
                if transports:
                    groups = groups.with_transport(ordered_transport(rank), streams.device, lambda axis, ranks: True)
                session = build_session(job, open_weight_source(job), groups)
                for batch in batches_of(job):
                    streams.waits.clear()
                    result = train_step(session, batch, progress)
                    progress = result.progress
                    found.losses.append(result.loss)
                    found.waits.append(Counter(streams.waits))
                    found.buffers.append(streams.buffers)
                found.on_device.update(_on_device(session))
                session.close()
            observed.append(found)
    return observed


def _on_device(session: Session) -> Iterator[str]:
    """Yield the kinds of state of a session that are on the device, and "host parameter" for a parameter that is not"""
    for weight in session.owned.of(session.weights):
        state = {name: by_key[weight.key] for name, by_key in session.optimizer.state_of([weight]).items()}
        found = {"master": weight.master, "gradient": weight.master.grad, **state}
        assert found["gradient"] is not None
        yield from (name for name, x in found.items() if x is not None and x.device.type != "cpu")
        if weight.param.device.type == "cpu":
            yield "host parameter"


SHAPES = [(2, 3), pytest.param((4, 1), marks=pytest.mark.soak)]
"""Blocks, and sequences of a micro-batch, of which the number of waits does not depend."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_of_one_stage_waits_once(shape: tuple[int, int], tmp_path: Path) -> None:
    configs = [config_of(tmp_path, blocks=shape[0], micro=shape[1])]
    (by_config,) = on_ranks(1, observe, tmp_path / "store", configs)
    expected = on_ranks(1, losses_of_rank, tmp_path / "cpu", configs)[0]
    for observed, losses in zip(by_config, expected, strict=True):
        assert observed.losses == losses
        assert all(waits == ONCE for waits in observed.waits[1:]), observed.waits


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.soak), "bf16"])
def test_offloaded_state_is_on_the_host_and_a_backward_waits_for_some_of_its_gradients(
    dtype: Any, tmp_path: Path
) -> None:
    """Once for each MAX_IN_FLIGHT of them, and at its end. Updated weights are copied to the device without a wait."""
    plain = config_of(tmp_path, blocks=4, micro=1)
    plain = dataclasses.replace(plain, model=dataclasses.replace(plain.model, dtype=dtype))
    offloading = dataclasses.replace(plain, optim=dataclasses.replace(plain.optim, offload="cpu"))
    ((without, offloaded),) = on_ranks(1, observe, tmp_path / "store", [plain, offloading])
    micros, weights = plain.data.batch // plain.pp.micro, 4 * 12 + 5
    assert offloaded.losses == without.losses
    assert without.on_device >= {"master", "gradient", "exp_avg", "exp_avg_sq"}
    assert not offloaded.on_device
    for waits in offloaded.waits[1:]:
        assert waits - ONCE <= Counter({"event": micros * (1 + weights // MAX_IN_FLIGHT)}), waits
    assert offloaded.buffers[-1] == offloaded.buffers[-2], "buffers are allocated once"


@pytest.mark.parametrize(
    ("codec", "of_message"),
    [
        ("none", {"event": 1}),
        pytest.param(
            "fixpoint:bits=4",
            {"event": 1, "_local_scalar_dense": 1},  # whether all numbers are finite
            marks=pytest.mark.soak,
        ),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_stages_wait_for_each_message(
    shape: tuple[int, int], codec: str, of_message: dict[str, int], tmp_path: Path
) -> None:
    blocks, micro = shape
    configs = [config_of(tmp_path, blocks=blocks, micro=micro, stages=2, forward=codec, backward=codec)]
    by_rank = on_ranks(2, observe, tmp_path / "store", configs)
    expected = on_ranks(2, losses_of_rank, tmp_path / "cpu", configs)[0]
    for by_config in by_rank:
        for config, observed, losses in zip(configs, by_config, expected, strict=True):
            assert observed.losses == losses
            messages = Counter({what: n * config.data.batch // config.pp.micro for what, n in of_message.items()})
            assert all(waits == ONCE + messages for waits in observed.waits[1:]), observed.waits
            assert observed.buffers[-1] == observed.buffers[-2], "buffers are allocated once"


@pytest.mark.parametrize(
    "rows",
    [
        [("1f1b", 2, 1)],
        [("1f1b", 4, 2)] + [(schedule, 2, 1) for schedule in (*SCHEDULES, "1f1b:lead=2") if schedule != "1f1b"],
    ],
    ids=["1f1b", "others"],
)
def test_stages_over_an_ordered_transport_wait_once(rows: Sequence[tuple[str, int, int]], tmp_path: Path) -> None:
    """And once for the headers of all messages, which are then compared. Losses are those of the CPU over gloo.

    rows: schedule, layers per stage, and size of the micro-batches.
    """
    configs = [config_of(tmp_path, blocks=2 * n, micro=micro, stages=2, schedule=name) for name, n, micro in rows]
    by_rank = on_ranks(2, observe, tmp_path / "store", configs, "ordered")
    expected = on_ranks(2, losses_of_rank, tmp_path / "cpu", configs)[0]
    for by_config in by_rank:
        for row, observed, losses in zip(rows, by_config, expected, strict=True):
            assert observed.losses == losses, row
            assert all(waits == ONCE + HEADERS for waits in observed.waits[1:]), (row, observed.waits)
