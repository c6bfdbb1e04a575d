"""The actions of one rank in a step, for any number of micro-batches."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from acsgd.pp.schedules.actions import Action, Op, Placement, forwards
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.schedules import Schedule
from acsgd.pp.schedules.validation import validate


class StepActions(NamedTuple):
    """Pipeline actions of one rank."""

    train: tuple[Action, ...]
    """In a training step."""
    evaluate: tuple[Action, ...]
    """In an evaluation of as many micro-batches."""


@dataclass(frozen=True)
class RankPrograms:
    """The programs of one rank."""

    schedule: Schedule
    ranks: int
    """Ranks of the pipeline."""
    rank: int
    first_backward: int = 0
    """First stage that runs backward, as of `lower`."""

    def actions(self, micros: int) -> StepActions:
        """Return the actions for some number of micro-batches of the replica, lowered and validated.

        Without micro-batches, they are the reductions alone.
        """
        if micros == 0:  # in the order of those of a replica with micro-batches, which ends with its first stage
            stages = Placement(self.ranks, self.ranks * self.schedule.chunks).stages_of(self.rank)
            trained = [stage for stage in reversed(stages) if stage >= self.first_backward]
            return StepActions(tuple(Action(Op.R, stage) for stage in trained), ())
        return _programs(self.schedule, self.ranks, micros, self.first_backward)[self.rank]  # type: ignore[arg-type]  # schedules are frozen

    def warm_up(self, micros: int) -> int:
        """Return the largest number of forwards that a rank of the pipeline runs before its first backward."""
        every = _programs(self.schedule, self.ranks, micros, self.first_backward)  # type: ignore[arg-type]  # as above
        computes = ([action for action in each.train if action.is_compute] for each in every)
        return max(sum(1 for _ in itertools.takewhile(lambda action: action.op == Op.F, each)) for each in computes)


@functools.lru_cache(maxsize=64)
def _programs(schedule: Schedule, ranks: int, micros: int, first_backward: int) -> tuple[StepActions, ...]:
    """Return the actions of all ranks. Kept, since they take 0.1 ms per forward."""
    computes = schedule.program(ranks, micros)
    program, evaluation = lower(computes, first_backward=first_backward), lower(forwards(computes))
    validate(program, first_backward=first_backward)
    validate(evaluation, forward_only=True)
    return tuple(StepActions(tuple(train), tuple(only)) for train, only in zip(program, evaluation, strict=True))
