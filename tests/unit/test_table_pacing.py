"""Law: paced rows of a table never stop a schedule, in training and in evaluation."""

from __future__ import annotations

import itertools

import pytest

from acsgd.pp.schedules.actions import Action, Op, Program, forwards
from acsgd.pp.schedules.dependencies import Dependencies
from acsgd.pp.schedules.schedules import GPipe, Interleaved, OneFOneB, Schedule
from acsgd.pp.tied.groups import MAX_GROUPS, Pacing


def warm_up(program: Program) -> int:
    """Return the largest number of forwards before the first backward."""
    return max(len([*itertools.takewhile(lambda action: action.op == Op.F, actions)]) for actions in program)


def completes(program: Program, user: int, pacing: Pacing) -> bool:
    """Run a program whose stage `user` waits for rows, and whose last rank sends them; return whether it ends."""
    inputs, owner = Dependencies.of(program).inputs, program[-1]
    last = max(action.stage for action in owner)
    waiting, done = [list(actions) for actions in program], set[Action]()
    order = [action for actions in program for action in actions if action.stage == user and action.op == Op.F]
    positions = {action: position for position, action in enumerate(order)}
    sent, forwards_of_owner = pacing.ahead, 0

    def can_run(action: Action) -> bool:
        if positions.get(action, -1) // pacing.width >= sent:
            return False
        return done.issuperset(inputs(action))

    while any(waiting):
        before = len(done)
        for actions in waiting:
            while actions:
                if actions is waiting[-1] and actions[0].op == Op.F:
                    sent = max(sent, pacing.ahead + forwards_of_owner // pacing.width)
                if not can_run(actions[0]):
                    break
                done.add(action := actions.pop(0))
                forwards_of_owner += action.stage == last and action.op == Op.F
        if len(done) == before:
            return False
    return True


@pytest.mark.parametrize(
    "schedule", [GPipe(), OneFOneB(), OneFOneB(lead=3), Interleaved(), Interleaved(lead=1), Interleaved(chunks=3)]
)
def test_paced_rows_stop_no_schedule(schedule: Schedule) -> None:
    for ranks, micros, width in itertools.product((2, 3), (1, 5, 8), (1, 3)):
        program = schedule.program(ranks, micros)
        pacing = Pacing.of(width * MAX_GROUPS, warm_up(program))
        assert pacing.width == width
        for user in range(ranks * schedule.chunks - 1):
            if (user + 1) % ranks == 0:
                continue  # on the rank of the owner
            for each in (program, forwards(program)):
                assert completes(each, user, pacing), (ranks, micros, width, user)


def test_a_schedule_stops_if_no_rows_are_sent_ahead() -> None:
    assert not completes(OneFOneB().program(2, 5), 0, Pacing(1, 0))
