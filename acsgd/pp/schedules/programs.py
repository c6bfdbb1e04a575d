"""The actions of one rank in a step, for any number of micro-batches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from acsgd.pp.schedules.actions import Action, Op, Placement, Program, forwards, without_backwards
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.rows import Pacing, RowRoute, UseOrder
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
    """First stage that runs backward; see `lower`."""
    routes: tuple[RowRoute, ...] = ()
    """Routes of rows of tied tables."""
    width: int = 1
    """Micro-batches per group of rows."""

    @property
    def placement(self) -> Placement:
        """Which rank of the pipeline holds which stages."""
        return Placement.of(self.schedule.program(self.ranks, 1))

    @property
    def splits_backward(self) -> bool:
        """Whether backwards run in two parts."""
        return any(action.op is Op.I for actions in self.schedule.program(self.ranks, 1) for action in actions)

    def split_share(self, micros: int) -> float:
        """Return the fraction of this rank's backwards that run in two parts, in a step of some micro-batches."""
        if not self.splits_backward:
            return 0.0
        split = sum(action.op is Op.W for action in self.schedule.program(self.ranks, micros)[self.rank])
        return split / (micros * self.schedule.chunks)

    def actions(self, micros: int) -> StepActions:
        """Return the actions for some number of micro-batches of the replica, lowered and validated.

        Without micro-batches, they are the reductions alone.
        """
        if micros == 0:  # in the order of those of a replica with micro-batches, which ends with its first stage
            stages = self.placement.stages_of(self.rank)
            trained = [stage for stage in reversed(stages) if stage >= self.first_backward]
            tables = sorted({route.owner for route in self.routes}.intersection(stages))
            reduces = [*(Action(Op.R, stage) for stage in trained), *(Action(Op.RT, stage) for stage in tables)]
            return StepActions(tuple(reduces), ())
        return self._all(micros)[self.rank]

    def program(self, micros: int) -> Program:
        """Return the actions of all ranks in a training step of some number of micro-batches."""
        return [[*each.train] for each in self._all(micros)]

    def use_order(self, micros: int, stage: int) -> UseOrder:
        """Return in which order a stage of the pipeline uses the rows of its micro-batches in training."""
        return UseOrder.of(self._all(micros)[self.placement.rank_of(stage)].train, stage)

    def _all(self, micros: int) -> tuple[StepActions, ...]:
        """Return the actions of all ranks."""
        return _programs(self.schedule, self.ranks, micros, self.first_backward, self.routes, self.width)  # type: ignore[arg-type]  # schedules are frozen


@functools.lru_cache(maxsize=64)
def _programs(
    schedule: Schedule, ranks: int, micros: int, first_backward: int, routes: tuple[RowRoute, ...], width: int
) -> tuple[StepActions, ...]:
    """Return the actions of all ranks. Kept, since they take 0.1 ms per forward."""
    computes = schedule.program(ranks, micros)
    pacing = Pacing.of(width, without_backwards(computes, first_backward))
    program = lower(computes, first_backward=first_backward, routes=routes, pacing=pacing)
    evaluation = lower(forwards(computes), routes=routes, pacing=pacing)
    validate(program, first_backward=first_backward, routes=routes)
    validate(evaluation, forward_only=True, routes=routes)
    return tuple(StepActions(tuple(train), tuple(only)) for train, only in zip(program, evaluation, strict=True))
