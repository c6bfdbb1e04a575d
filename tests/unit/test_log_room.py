"""Law: a log drops no step since the newest complete snapshot, unless it is too small for the time a snapshot takes."""

from __future__ import annotations

import pytest
import torch

from acsgd.elastic.log_room import LogRoom, needed_capacity
from acsgd.run.control import StepReport, StepSummary
from acsgd.topology import Topology

STEPS = 200
REPORT = StepReport(*[0.0] * 12)


def summary_of(capacity: float, log_steps: int) -> StepSummary:
    report = REPORT._replace(log_capacity=capacity, log_steps=log_steps)
    return StepSummary.of(torch.tensor([report], dtype=torch.float64), Topology(0, 1, 1))


def train(capacity: float, snapshot_steps: int) -> tuple[int, int]:
    """Train while each snapshot is sent during some steps.

    Returns the maximum number of logged steps once the first two snapshots are complete, and the number of snapshots.
    Until then, it is not known how long they take.
    """
    room, log_steps, largest, taken, left = LogRoom(), 0, 0, list[int](), -1
    for step in range(1, STEPS):
        summary = summary_of(capacity, log_steps)
        log_steps += 1
        largest = max(largest, log_steps) if len(taken) > 2 else 0
        if left > 0:
            room.record_pending()
        elif left == 0:
            room.complete()
            log_steps = step - taken[-1]
        elif room.needs_snapshot(summary):
            room.begin()
            taken.append(step)
            left = snapshot_steps + 1
        left -= 1
    return largest, len(taken)


@pytest.mark.parametrize("snapshot_steps", [1, 2, 7])
@pytest.mark.parametrize("more", [0, 0.5, 1, 2, 3, 20])
def test_no_step_since_the_newest_complete_snapshot_is_dropped(snapshot_steps: int, more: float) -> None:
    capacity = needed_capacity(snapshot_steps) + more
    largest, taken = train(capacity, snapshot_steps)
    assert capacity / 2 < largest <= capacity, "no more often than needed"
    assert taken > 3


@pytest.mark.parametrize("snapshot_steps", [0, 1, 2, 7])
def test_with_less_room_it_would_be_and_no_snapshot_is_due(snapshot_steps: int) -> None:
    room, summary = LogRoom(), summary_of(needed_capacity(snapshot_steps) - 0.5, log_steps=100)
    room.begin()
    for _ in range(snapshot_steps):
        room.record_pending()
    room.complete()
    assert room.lacks_room(summary)
    assert not room.needs_snapshot(summary)


def test_a_run_without_logs_needs_none() -> None:
    assert not LogRoom().needs_snapshot(summary_of(-1.0, 0))


def test_the_message_names_a_size_that_suffices() -> None:
    room, step_bytes = LogRoom(), 3 * 2**20
    limit_bytes = int(0.4 * step_bytes)
    text = room.describe(summary_of(limit_bytes / step_bytes, 0), limit_bytes)
    assert "room for 0.4 steps" in text
    wanted = float(text.partition("elastic.replay_log=")[2].split()[0])
    assert not room.lacks_room(summary_of(wanted * 2**30 / step_bytes, 0))
    assert room.lacks_room(summary_of((wanted - 0.001) * 2**30 / step_bytes, 0))
