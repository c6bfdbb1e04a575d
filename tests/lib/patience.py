"""Time limits in seconds of a quiet machine. A test must fail because something hangs, never because others compute.

A limit is stretched by how much slower this machine is at the moment than a quiet one: by the time that a reference
piece of work takes, and by the number of processes that compete for each core. While a test waits, this is measured
again and again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

WORK_S = 0.004
"""Time that `_work` takes on a quiet core of a usual machine, seconds."""
AGE_S = 1.0
"""Time after which the slowdown is measured again, seconds."""
TEST_S = 300.0
"""Limit for a whole test: twice what the longest takes on two quiet cores."""
NO_LIMIT_S = 24 * 3600.0
"""For a time limit of the code under test in which nothing hangs: the limit of the test is shorter."""

_measured: tuple[float, float] = (-AGE_S, 1.0)
"""Time of the last measurement, and its result."""


def slowdown() -> float:
    """Return how much longer than on a quiet machine a piece of work takes at present, at least 1."""
    global _measured
    if time.monotonic() - _measured[0] >= AGE_S:
        began, computed = time.monotonic(), time.thread_time()
        _work()
        waited, computed = time.monotonic() - began, time.thread_time() - computed
        # a process that mostly sleeps is served first, so its own wait says little about that of busy ones
        competing = os.getloadavg()[0] / (os.cpu_count() or 1)
        _measured = time.monotonic(), max(1.0, waited / WORK_S, computed / WORK_S * competing)
    return _measured[1]


def stretched(seconds: float) -> float:
    """Return a time limit for a wait that begins now."""
    return seconds * slowdown()


class Patience:
    """A time limit for a loop, stretched by the slowdown at each moment of it."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        now = time.monotonic()
        self._left_s -= (now - self._at) / slowdown()
        self._at = now
        return self._left_s <= 0


def wait_until(
    condition: Callable[[], object],
    limit_s: float = 60.0,
    *,
    poll_s: float = 0.01,
    describe: Callable[[], object] = lambda: "",
) -> None:
    """Wait until a condition is true. Raises AssertionError, with the description, once the limit has passed."""
    patience = Patience(limit_s)
    while not condition():
        assert not patience.is_over, f"not within {limit_s:g} s of a quiet machine: {describe()}"
        time.sleep(poll_s)


def _work() -> int:
    total = 0
    for number in range(100_000):
        total += number
    return total
