"""Law: the first steps and evaluations are sent without loss, whatever the codec of the boundary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, make_config

from acsgd.codecs.base import wire_bytes
from acsgd.codecs.identity import Identity
from acsgd.config.options import Config
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.report import PP_FORWARD_BYTES
from acsgd.run.setup.build import build_session
from acsgd.train import train_step

STEPS, EXACT_STEPS = 5, 3
NARROW = "none:dtype=bf16"


def steps_and_evaluations(
    rank: int, world_size: int, store: Path, configs: Sequence[Config]
) -> list[list[tuple[float, float, int]]]:
    """Return, per config and step, its loss, the evaluation loss before it on its own batch, and the bytes sent on."""
    torch.set_num_threads(1)
    runs = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size))
        file_store = dist.FileStore(f"{store}-{number}", world_size)
        with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
            session, progress, run = build_session(job, open_weight_source(job), groups), Progress(), []
            for batch in batches_of(job):
                evaluated = session.evaluate([batch], progress.step)["eval_loss"]
                result = train_step(session, batch, progress)
                progress = result.progress
                run.append((result.loss, evaluated, int(result.summary[PP_FORWARD_BYTES])))
        runs.append(run)
    return runs


def test_the_first_steps_and_evaluations_travel_exactly(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    plain = make_config(tiny_model(n_layer=2), tmp_path, steps=STEPS, stages=2, micro=2)
    warm = _with(plain, forward=NARROW, backward=NARROW, exact_steps=EXACT_STEPS)
    narrow = _with(plain, forward=NARROW, backward=NARROW, exact_steps=EXACT_STEPS, exact_eval=False)
    exact, warmed, narrowed = on_ranks(2, steps_and_evaluations, tmp_path / "store", [plain, warm, narrow])[0]
    assert [loss for loss, *_ in warmed[:EXACT_STEPS]] == [loss for loss, *_ in exact[:EXACT_STEPS]]
    assert all(one[0] != other[0] for one, other in zip(warmed[EXACT_STEPS:], exact[EXACT_STEPS:], strict=True))
    # the weights are those of the exact run until the first step on the narrow wire has changed them
    assert [loss for _, loss, _ in warmed[: EXACT_STEPS + 1]] == [loss for _, loss, _ in exact[: EXACT_STEPS + 1]]
    assert all(one[1] != other[1] for one, other in zip(narrowed, exact, strict=True))
    assert [nbytes for *_, nbytes in warmed] == [_sent(plain, step < EXACT_STEPS) for step in range(STEPS)]


def _with(config: Config, **pp: object) -> Config:
    return dataclasses.replace(config, pp=dataclasses.replace(config.pp, **pp))  # type: ignore[arg-type]


def _sent(config: Config, exact: bool) -> int:
    """Return the bytes that cross the boundary in one step: 32 numbers per token, and a header per micro-batch."""
    codec = Identity() if exact else Identity("bf16")
    wire = codec.wire((config.pp.micro, config.data.sequence, 32))
    return config.data.batch // config.pp.micro * (HEADER_BYTES + wire_bytes(wire))
