"""What travels and how long it is waited for, counted where it happens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """A transfer under way, as torch.distributed returns it."""

    def wait(self) -> bool:
        """Block until the transfer is done. Raises RuntimeError if the peer is gone or too late."""
        ...


@dataclass
class Meter:
    """Counts of one step; `reset` starts the next."""

    sent_bytes: int = 0
    in_flight_s: float = 0.0
    """Seconds from posting a receive or a reduction to having it, summed over all; of a send, only what is waited."""
    waited_s: float = 0.0
    """Seconds of these in which this process did nothing but wait."""

    def wait(self, work: Work, posted_at: float) -> None:
        """Wait for a transfer that was posted at `posted_at`, a time.perf_counter()."""
        before = time.perf_counter()
        work.wait()
        now = time.perf_counter()
        self.waited_s += now - before
        self.in_flight_s += now - posted_at

    def reset(self) -> None:
        self.sent_bytes, self.in_flight_s, self.waited_s = 0, 0.0, 0.0
