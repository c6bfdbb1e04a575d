"""When the rows of a tied table and their gradients are sent: between the rank that holds the table, that of the last
stage, and a stage that looks up its rows."""

from collections.abc import Iterator
from typing import NamedTuple

from acsgd.pp.schedules.actions import Action, Op, Placement, Program

MAX_GROUPS = 256
"""Largest number of groups: there is one per micro-batch unless a global batch has more."""


class Pacing(NamedTuple):
    """How far rows are sent ahead of their use."""

    width: int
    """Micro-batches per group."""
    ahead: int
    """Groups that are sent before the owner has run its first forward: those that others need by then."""

    @classmethod
    def of(cls, micros: int, warm_up: int) -> "Pacing":
        """Return the pacing of a run. micros: of the global batch; warm_up: forwards before the first backward, >= 1.

        As many groups are sent ahead as a rank uses before its first backward, so that it fills the pipeline without
        waiting for forwards of the owner.
        """
        width = -(-micros // MAX_GROUPS)
        return cls(width, 1 + -(-(warm_up - 1) // width))

    def due(self, forwards: int) -> int:
        """Return the number of groups that are sent before the owner's next forward, of which it has run some."""
        return self.ahead + forwards // self.width


def add_rows(program: Program, pacing: Pacing, user: int = 0) -> Program:
    """Return a program with the messages of a tied table, for a simulation. user: the stage that looks up its rows.

    The rows that a micro-batch is the first to use are sent before a forward of the owner, as `pacing` says; the
    gradients of those that it is the last to use, after its backward on stage `user`.
    """
    placement = Placement(len(program), 1 + max(action.stage for actions in program for action in actions))
    owner = placement.rank_of(placement.stages - 1)
    assert placement.rank_of(user) != owner, "stages of the owner use the table itself"
    added = [list(_add_gradients(actions, user)) for actions in program]
    added[owner] = list(_add_rows(added[owner], pacing, user, last=placement.stages - 1))
    return added


def _add_rows(actions: list[Action], pacing: Pacing, user: int, *, last: int) -> Iterator[Action]:
    """Yield the actions of the owner, with its sends of rows. last: the last stage."""
    micros = sum(action.op is Op.F and action.stage == last for action in actions)
    sent = forwards = 0
    for action in actions:
        if action.op is Op.F:
            due = min(micros, pacing.width * pacing.due(forwards))
            yield from (Action(Op.SR, user, micro) for micro in range(sent, due))
            sent, forwards = due, forwards + (action.stage == last)
        yield action


def _add_gradients(actions: list[Action], user: int) -> Iterator[Action]:
    """Yield the actions of a rank, with the sends of the gradients of the rows that stage `user` looks up."""
    for action in actions:
        yield action
        if action.stage == user and action.operation.completes:
            yield Action(Op.SG, user, action.micro)
