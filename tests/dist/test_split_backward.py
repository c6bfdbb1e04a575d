"""Law of a backward in two parts, gradients of inputs and of weights: training is bit for bit that of whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import pytest
from lib.direct import descend, digest, draw_batch, gradients, make_config, session_of
from lib.models import DROPOUT
from lib.ranks import on_ranks

from acsgd.config.options import Config
from acsgd.pp import SCHEDULES, Action, Op, Program, lower, validate
from acsgd.pp.schedules.rows import RowRoute
from acsgd.pp.schedules.schedules import Interleaved
from acsgd.pp.schedules.simulate import Cost, simulate

TinyModel = Callable[..., Path]


@dataclass(frozen=True)
class Split:
    """The interleaved schedule with each backward in two parts, those of weights later by one."""

    chunks: ClassVar[int] = 2

    def program(self, ranks: int, micros: int) -> Program:
        return [list(_split(actions)) for actions in Interleaved().program(ranks, micros)]

    def bubble(self, ranks: int, micros: int) -> Fraction:
        raise NotImplementedError


def _split(actions: Sequence[Action]) -> Iterator[Action]:
    waiting: list[Action] = []
    for action in actions:
        if action.op is not Op.B:
            yield action
            continue
        yield action._replace(op=Op.I)
        yield from waiting
        waiting = [action._replace(op=Op.W)]
    yield from waiting


def train_on_rank(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[tuple[list[float], str]]:
    """Return the losses of two steps and a hash of the weights and gradients after them, for each config."""
    trained = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULES, "split", Split)
        for number, config in enumerate(configs):
            with session_of(config, rank, world_size, f"{store}-{number}") as session:
                losses = []
                for step in range(2):
                    losses.append(session.pipeline.run(draw_batch(config, step, session.job.micro_ids), step).item())
                    descend(session.weights)
                    session.send_ahead()
                trained.append((losses, digest([w.param for w in session.weights] + gradients(session))))
    return trained


def test_training_in_two_parts_is_that_of_whole_backwards(tiny_model: TinyModel, tmp_path: Path) -> None:
    """With recomputation, dropout, masks per sample, copies and rows of a tied head, and 16 bits."""
    tied, untied = tiny_model(**DROPOUT, n_layer=4), tiny_model("llama", num_hidden_layers=4)
    whole, split = (
        [
            make_config(tied, tmp_path, stages=2, schedule=schedule),
            make_config(tied, tmp_path, stages=2, schedule=schedule, tied="dense", dropout_mask="sample"),
            make_config(untied, tmp_path, stages=2, schedule=schedule, dtype="bf16", recompute="layers"),
        ]
        for schedule in ("interleaved:chunks=2", "split")
    )
    for trained in on_ranks(2, train_on_rank, tmp_path / "store", [*whole, *split]):
        assert trained[: len(whole)] == trained[len(whole) :]


@pytest.mark.parametrize("first_backward", [0, 1])
def test_programs_with_split_backwards_are_valid(first_backward: int) -> None:
    for ranks, micros in ((1, 3), (2, 2), (2, 5), (3, 4)):
        computes = Split().program(ranks, micros)
        owner, user = 2 * ranks - 1, first_backward
        routes = [RowRoute(owner, user)] if (owner - user) % ranks else []
        program = lower(computes, first_backward=first_backward, routes=routes)
        validate(program, first_backward=first_backward, routes=routes)
        whole = lower(Interleaved().program(ranks, micros), first_backward=first_backward)
        timeline = simulate(program, Cost(1, 2))
        assert timeline.busy == simulate(whole, Cost(1, 2)).busy
        assert timeline.makespan <= simulate(whole, Cost(1, 2)).makespan
