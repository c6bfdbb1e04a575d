"""Snapshots that are due because the logs of sent messages fill up."""

from __future__ import annotations

import math

from acsgd.run.control import StepSummary

GIB = 2**30


def needed_capacity(snapshot_steps: int) -> int:
    """Return how many steps must fit a log so that it has all steps since the newest complete snapshot at any time.

    snapshot_steps: number of steps during which a snapshot is sent. All ranks know of its end one step later. Then a
    log is fullest: it has the steps since this snapshot, and those between the one before and this one. The latter are
    at least one more, since a snapshot is due one step after the end of the one before is known.
    """
    return 2 * snapshot_steps + 3


class LogRoom:
    """Decides when a snapshot is due so that no log drops a step since the newest complete snapshot.

    It is when a log is half full: the other half is for the steps during which the snapshot is sent. All ranks decide
    alike, from the summaries of the steps. A log that is too small for that does not make snapshots due, since they
    would be taken all the time, and a stage could still not be replayed at any time.
    """

    def __init__(self) -> None:
        self._snapshot_steps = 1
        """Number of steps during which the last complete snapshot was sent."""
        self._pending_steps = 0
        """The same of the newest one, until now."""

    def begin(self) -> None:
        """Note that a snapshot begins."""
        self._pending_steps = 0

    def record_pending(self) -> None:
        """Note that a snapshot is in progress during a step."""
        self._pending_steps += 1

    def complete(self) -> None:
        """Note that the snapshot is complete on all ranks."""
        self._snapshot_steps = self._pending_steps

    def needs_snapshot(self, summary: StepSummary) -> bool:
        """Return whether a snapshot is due after a step. summary: of its reports."""
        if summary.log_capacity is None or self.lacks_room(summary):
            return False
        return summary.log_steps + 1 >= summary.log_capacity // 2  # the reports were sent before the step was logged

    def lacks_room(self, summary: StepSummary) -> bool:
        """Return whether a log is too small."""
        return summary.log_capacity is not None and summary.log_capacity < needed_capacity(self._snapshot_steps)

    def describe(self, summary: StepSummary, limit_bytes: int) -> str:
        """Return a sentence on logs that are too small. limit_bytes: maximum size of a log."""
        capacity, needed = summary.log_capacity, needed_capacity(self._snapshot_steps)
        assert capacity is not None
        wanted = math.ceil(1000 * limit_bytes / GIB * needed / capacity) / 1000
        return (
            f"the log of sent messages has room for {capacity:.1f} steps; so that a lost stage can be replayed at any "
            f"time, it needs room for {needed}: set elastic.replay_log={wanted:g} or more (now "
            f"{limit_bytes / GIB:.3g} GiB per process; a quarter of the available memory is the limit)"
        )
