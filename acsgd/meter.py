"""Counts of bytes sent and time spent on communication."""

from __future__ import annotations

import time
from dataclasses import dataclass

from acsgd.waits import Waits, Work


@dataclass
class Meter:
    """Counts of one step, until `reset`."""

    sent_bytes: int = 0
    in_flight_s: float = 0.0
    """Time from posting a receive or a collective to its end, summed over all, seconds; of sends only the wait."""
    waited_s: float = 0.0
    """The part of `in_flight_s` in which this process was blocked, seconds."""

    def wait(self, waits: Waits, work: Work, posted_at: float) -> None:
        """Wait for an operation and count its time; posted_at: its start, a time.perf_counter()."""
        before = time.perf_counter()
        waits.wait(work)
        now = time.perf_counter()
        self.waited_s += now - before
        self.in_flight_s += now - posted_at

    def reset(self) -> None:
        """Start the counts of the next step."""
        self.sent_bytes, self.in_flight_s, self.waited_s = 0, 0.0, 0.0
