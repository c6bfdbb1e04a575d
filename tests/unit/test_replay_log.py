"""Laws of the log from which a lost stage is replayed."""

from __future__ import annotations

import torch

from acsgd.elastic.replay_log import Position, ReplayLog
from acsgd.elastic.replay_plan import LoggedSteps
from acsgd.pp.wire.frame import Header, Kind
from acsgd.run.control import StepReport, StepSummary
from acsgd.topology import Topology

STAGES = 3
FIRST = Position(0, STAGES)
SUMMARY = StepSummary.of(torch.ones(STAGES, len(StepReport._fields), dtype=torch.float64), Topology(0, STAGES, STAGES))


def log_of(steps: int, limit_bytes: int = 1000) -> ReplayLog:
    """Return a log of some steps with two messages of 10 bytes each, the first to rank 1 and the second to rank 2."""
    log = ReplayLog()
    log.open(4, 0, FIRST, limit_bytes)
    for step in range(steps):
        send(log, step)
        log.complete(step, SUMMARY)
    return log


def send(log: ReplayLog, step: int) -> None:
    for peer in (1, 2):
        message = torch.full([10], 10 * step + peer, dtype=torch.uint8)
        log.add(peer, Header(Kind.ACTIVATION, 0, 0, step, 0, 10), message)
        message.zero_()  # buffers are used again


def test_it_has_the_messages_of_each_step_to_each_rank() -> None:
    log = log_of(3)
    assert log.report(ready=False) == LoggedSteps(4, STAGES, 0, 3)
    assert [[message.tolist() for message in log.messages_to(2, step)] for step in range(3)] == [
        [[10 * step + 2] * 10] for step in range(3)
    ]
    send(log, 3)
    assert log.report(ready=True) == LoggedSteps(4, STAGES, 0, 4)


def test_it_keeps_the_newest_steps_that_fit_the_limit() -> None:
    log = log_of(7, limit_bytes=50)
    assert log.nbytes == 40
    assert log.report(ready=False) == LoggedSteps(4, STAGES, 5, 7)
    assert log_of(7, limit_bytes=15).report(ready=False) == LoggedSteps(4, STAGES, 7, 7), "not a part of a step"


def test_its_capacity_follows_from_the_largest_step_even_if_not_one_fits() -> None:
    assert log_of(0).capacity is None
    assert (log_of(7, limit_bytes=50).capacity, log_of(7, limit_bytes=50).num_steps) == (2.5, 2)
    assert (log_of(3, limit_bytes=15).capacity, log_of(3, limit_bytes=15).num_steps) == (0.75, 0)
    log = log_of(2, limit_bytes=60)
    send(log, 2)
    send(log, 2)
    assert (log.capacity, log.num_steps) == (3.0, 1), "the step that is not complete has dropped the first one"
    log.return_to(2)
    send(log, 2)
    log.complete(2, SUMMARY)
    assert (log.capacity, log.num_steps) == (3.0, 2), "what is sent again counts once"


def test_a_complete_snapshot_drops_the_steps_before() -> None:
    log = log_of(7)
    log.drop_before(6)
    assert log.report(ready=False) == LoggedSteps(4, STAGES, 6, 7)
    assert log.nbytes == 20


def test_the_next_view_continues_the_log_unless_it_returns_or_differs() -> None:
    log = log_of(3)
    send(log, 3)  # ahead of a step that was not completed
    log.open(5, 3, FIRST, 1000, is_continued=True)
    assert log.report(ready=False) == LoggedSteps(4, STAGES, 0, 3)
    assert log.nbytes == 60
    others = (3, FIRST, False), (3, Position(0, 2), True), (3, Position(1, STAGES), True), (4, FIRST, True)
    for step, position, is_continued in others:
        log = log_of(3)
        log.open(5, step, position, 1000, is_continued=is_continued)
        assert log.report(ready=False) == LoggedSteps(5, position.stages, step, step)
        assert log.nbytes == 0


def test_a_return_to_an_earlier_step_drops_the_steps_after_it() -> None:
    log = log_of(5)
    log.return_to(2)
    assert log.report(ready=False) == LoggedSteps(4, STAGES, 0, 2)
    log.drop_before(2)
    log.return_to(1)
    assert log.report(ready=False) == LoggedSteps(4, STAGES, 1, 1)


def test_a_closed_log_keeps_nothing() -> None:
    log = log_of(5)
    log.close()
    send(log, 5)
    log.complete(5, SUMMARY)
    assert log.report(ready=True) is None
    assert log.nbytes == 0
