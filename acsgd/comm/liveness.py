"""Heartbeats of all ranks, in the store of the run."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable

from acsgd.comm.store import MANY_RANKS, StoreClient, StoreError, poll_pause_s
from acsgd.errors import RunError, WaitInterruptedError

FAILURES = "acsgd/failures"
"""Key of the number of ranks that reported a failure."""
FAILURE_GRACE_S = 5.0
"""Seconds that an exchange may take to complete after a rank reported a failure."""
STOP_LIMIT_S = 10.0
"""Time without a heartbeat, after a stop signal, that means a dead rank, seconds: torchrun, which also sends SIGTERM
because another rank has died, kills after 30 s."""


def heartbeat_interval_s(timeout_s: float) -> float:
    """Return the time between two heartbeats of a rank. timeout_s: run.timeout, seconds."""
    return min(0.5, timeout_s / 32)


class Heartbeat:
    """A thread that stores a new heartbeat of this rank every `interval_s` seconds until it is closed.

    It shows that the process runs, also while its main thread waits inside gloo. The first heartbeat is stored here.
    Raises StoreError.
    """

    def __init__(self, store: StoreClient, rank: int, interval_s: float) -> None:
        self._store = store
        self._rank = rank
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, *, within_s: float | None = None) -> None:
        """End the thread after its last heartbeat. within_s: maximum time to wait for it, seconds; None = no limit."""
        self._closed.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        with contextlib.suppress(StoreError, WaitInterruptedError):  # the next exchange of this rank reports it
            for number in itertools.count(1):
                if self._closed.wait(self._interval_s):
                    return
                self._beat(number)

    def _beat(self, number: int) -> None:
        self._store.set(_key(self._rank), str(number))


def wait_for_key(
    store: StoreClient,
    key: str,
    find_missing: Callable[[], list[int]],
    check: Callable[[list[int], float], None],
    *,
    interval_s: float,
    ranks: int,
    looks: bool = False,
) -> bytes | None:
    """Wait until the store has a key, and return its value; None if no rank is missing any more before it has.

    check: called every `interval_s` seconds with the missing ranks and the seconds since the start; raises an error to
    end the wait. Of N > `MANY_RANKS` ranks, each calls it N / MANY_RANKS times less often. ranks: number of ranks that
    may wait. looks: whether to call `find_missing` in each round in place of reading the key; else only before `check`.
    The number of requests does not grow with the number of ranks.
    """
    started = checked = time.monotonic()
    interval_s *= max(1.0, ranks / MANY_RANKS)
    while looks or (value := store.find(key)) is None:
        now = time.monotonic()
        is_due = now - checked >= interval_s
        if (looks or is_due) and not (missing := find_missing()):
            return None
        if is_due:
            checked = now
            check(missing, now - started)
        time.sleep(poll_pause_s(now - started, ranks))
    return value


class PeerWatch:
    """Check of whether the ranks that this rank waits for are alive.

    limit_s: time without a heartbeat after which a rank counts as dead, seconds (run.timeout). is_stopping: whether
    this process has a stop signal; then that time is at most `STOP_LIMIT_S`.
    """

    def __init__(self, store: StoreClient, limit_s: float, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._limit_s = limit_s
        self._is_stopping = is_stopping
        self._failed_at: float | None = None
        self._seen: dict[int, tuple[bytes, float]] = {}

    def check(self, ranks: list[int]) -> None:
        """Raise RunError if the heartbeats of one of `ranks` have stopped, or if any rank has reported a failure.

        Call it while waiting for `ranks`, whose groups are open: each has a heartbeat. It takes two requests, however
        many there are (see `StoreClient.get_all`). A dead rank is found by the first call that is at least `limit_s`
        after the one that has read its last heartbeat.
        """
        now = time.monotonic()
        for rank, latest in zip(ranks, self._store.get_all([*map(_key, ranks)]), strict=True):
            if rank not in self._seen or self._seen[rank][0] != latest:
                self._seen[rank] = latest, now
        limit_s, why = self._limit_s, "run.timeout"
        if self._is_stopping() and limit_s > STOP_LIMIT_S:
            limit_s, why = STOP_LIMIT_S, "after a stop signal"
        silent = [rank for rank in ranks if now - self._seen[rank][1] >= limit_s]
        if silent:
            raise RunError(f"no heartbeat of ranks {silent} for {limit_s:g} s ({why})", awaited=silent)
        if self._store.has(FAILURES):
            self._failed_at = self._failed_at or now
            if now - self._failed_at >= min(FAILURE_GRACE_S, self._limit_s):
                raise RunError(f"a rank failed, and ranks {ranks} did not answer", awaited=ranks)


def _key(rank: int) -> str:
    return f"acsgd/heartbeat/{rank}"
