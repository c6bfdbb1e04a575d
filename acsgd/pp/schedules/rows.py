"""When the rows of a tied table and their gradients are sent: between a stage of the rank that holds the table and one
that looks up its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from acsgd.pp.schedules.actions import ROW_GRADIENTS, ROWS, Action, Op, Placement, Program

MAX_GROUPS = 256
"""Largest number of groups: there is one per micro-batch unless a global batch has more."""


class RowRoute(NamedTuple):
    """The two stages between which rows of tables, and their gradients, travel."""

    owner: int
    """First stage that uses them on the rank that holds the tables."""
    user: int
    """First stage that looks them up on the rank that gets the rows. Those after it use the same ones."""


def group_width(micros: int) -> int:
    """Return the number of micro-batches per group: rows of a group travel together. micros: of the global batch."""
    return -(-micros // MAX_GROUPS)


class Pacing(NamedTuple):
    """How far rows are sent ahead of their use."""

    width: int
    """Micro-batches per group."""
    ahead: int
    """Groups that are sent before the owner has run its first forward: those that others need by then."""

    @classmethod
    def of(cls, width: int, program: Program) -> Pacing:
        """Return the pacing of a program in training.

        As many groups are sent ahead as a rank uses before its first backward, so that it fills the pipeline without
        waiting for forwards of the owner.
        """
        return cls(width, 1 + -(-(_warm_up(program) - 1) // width))

    def due(self, forwards: int) -> int:
        """Return the number of micro-batches whose rows are sent before the owner's next forward, after some others."""
        return self.width * (self.ahead + forwards // self.width)


class UseOrder(NamedTuple):
    """When a stage uses the rows of each micro-batch."""

    first: tuple[int, ...]
    """Micro-batches in the order of their forwards."""
    last: tuple[int, ...]
    """Micro-batches in the order in which they are completed."""

    @classmethod
    def of(cls, actions: Sequence[Action], stage: int) -> UseOrder:
        """Return the order of a stage. actions: of its rank."""
        own = [action for action in actions if action.stage == stage and action.is_compute]
        return cls(
            tuple(action.micro for action in own if action.operation.phase == "forward"),
            tuple(action.micro for action in own if action.operation.completes),
        )


def add_rows(program: Program, routes: Sequence[RowRoute], pacing: Pacing) -> Program:
    """Return a lowered program with the messages of tables, and with the reductions of these.

    The rows that a micro-batch is the first to use are sent before a forward of the owner, as `pacing` says, and their
    receive is posted no later. They are sent after the receives that are posted before this forward, whose notices
    would wait behind them. The gradients of those that it is the last to use are sent once it is completed; their
    receives are posted first of all.
    """
    if not routes:
        return program
    placement = Placement.of(program)
    program = list(program)
    for route in routes:
        owner, user = placement.rank_of(route.owner), placement.rank_of(route.user)
        assert owner != user, "stages of the owner use the table itself"
        order = UseOrder.of(program[user], route.user)
        program[user] = list(_add_to_user(program[user], route, order, pacing))
        program[owner] = list(_add_to_owner(program[owner], route, order, pacing))
    for stage in sorted({route.owner for route in routes}):
        of_rank = program[placement.rank_of(stage)]
        if Action(Op.R, stage) in of_rank:
            of_rank.append(Action(Op.RT, stage))
    return program


def _warm_up(program: Program) -> int:
    """Return the largest number of forwards that a rank runs before its first backward."""
    phases = [[action.operation.phase for action in actions if action.is_compute] for actions in program]
    return max(each.index("backward") if "backward" in each else len(each) for each in phases)


def _add_to_user(actions: list[Action], route: RowRoute, order: UseOrder, pacing: Pacing) -> Iterator[Action]:
    posted, forwards = pacing.due(0), 0
    yield from (Action(ROWS.receive, route.user, micro, route.owner) for micro in order.first[:posted])
    for action in actions:
        if action.stage == route.user and action.operation.phase == "forward":
            due, forwards = pacing.due(forwards + pacing.width), forwards + 1
            yield from (Action(ROWS.receive, route.user, micro, route.owner) for micro in order.first[posted:due])
            posted = due
        yield action
        if action.stage == route.user and action.operation.completes:
            yield Action(ROW_GRADIENTS.send, route.user, action.micro, route.owner)


def _add_to_owner(actions: list[Action], route: RowRoute, order: UseOrder, pacing: Pacing) -> Iterator[Action]:
    sent = forwards = 0
    last = max(action.stage for action in actions)
    yield from (Action(ROW_GRADIENTS.receive, route.owner, micro, route.user) for micro in order.last)
    for action in actions:
        if action.operation.phase == "forward":
            due = pacing.due(forwards)
            yield from (Action(ROWS.send, route.owner, micro, route.user) for micro in order.first[sent:due])
            sent, forwards = due, forwards + (action.stage == last)
        yield action
