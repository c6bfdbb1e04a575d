"""Heartbeats of all ranks, in the store of the run."""

from __future__ import annotations

import threading
import time

from acsgd.errors import RunError
from acsgd.store import StoreClient, StoreError

FAILURES = "acsgd/failures"
"""Key of the number of ranks that reported a failure."""
ENDED = "ended"
"""Value instead of a heartbeat of a rank that has left the run."""
FAILURE_GRACE_S = 5.0
"""Seconds that an exchange may take to complete after a rank reported a failure."""


def heartbeat_interval_s(timeout_s: float) -> float:
    """Return the time between two heartbeats of a rank. timeout_s: run.timeout, seconds."""
    return min(0.5, timeout_s / 32)


def heartbeat(store: StoreClient, rank: int) -> str:
    """Return the latest heartbeat of a rank: another text each time, ENDED after the last, "" before the first."""
    key = _key(rank)
    return store.get(key) if store.has(key) else ""


class Heartbeat:
    """A thread that stores a new heartbeat of this rank every `interval_s` seconds until it is closed.

    It shows that the process runs, also while its main thread waits inside gloo.
    """

    def __init__(self, store: StoreClient, rank: int, interval_s: float) -> None:
        self._store = store
        self._rank = rank
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Store that this rank has ended, after its last heartbeat."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        try:
            while not self._closed.is_set():
                self._store.set(_key(self._rank), str(number))
                number += 1
                self._closed.wait(self._interval_s)
            self._store.set(_key(self._rank), ENDED)
        except StoreError:
            return  # the next exchange of this rank reports it


class PeerWatch:
    """Finds out that it is useless to wait any longer for other ranks.

    limit_s: time without a heartbeat after which a rank counts as dead, seconds (run.timeout).
    """

    def __init__(self, store: StoreClient, limit_s: float) -> None:
        self._store = store
        self._limit_s = limit_s
        self._looked_at = time.monotonic()
        self._failed_at: float | None = None
        self._seen: dict[int, tuple[str, float]] = {}

    def check(self, ranks: list[int]) -> None:
        """Raise RunError if one of `ranks` has no heartbeat any more, or if any rank has reported a failure.

        Call it repeatedly while waiting for `ranks`; it reads the store about as often as there are heartbeats.
        """
        now = time.monotonic()
        if now - self._looked_at < heartbeat_interval_s(self._limit_s):
            return
        self._looked_at = now
        for rank in ranks:
            latest = heartbeat(self._store, rank)
            if rank not in self._seen or self._seen[rank][0] != latest:
                self._seen[rank] = latest, now
        silent = [rank for rank in ranks if now - self._seen[rank][1] >= self._limit_s]
        if silent:
            raise RunError(f"ranks {silent} gave no sign of life for {self._limit_s:g} s (run.timeout)", awaited=silent)
        if self._store.has(FAILURES):
            self._failed_at = self._failed_at or now
            if now - self._failed_at >= min(FAILURE_GRACE_S, self._limit_s):
                raise RunError(f"a rank failed, and ranks {ranks} did not answer", awaited=ranks)


def _key(rank: int) -> str:
    return f"acsgd/heartbeat/{rank}"
