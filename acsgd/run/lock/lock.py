"""At most one run per directory: leases on the run directory and the checkpoint directory, held until the run ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from acsgd.errors import ReportedError, RunError
from acsgd.failures.processes import ProcessIdentity
from acsgd.groups import Groups
from acsgd.io.checkpoint.copies import SHARED, Disks
from acsgd.notes import print_note
from acsgd.run.lock.lease import STALE_S, WAIT_S, Lease
from acsgd.run.plan.job import Job

HEARTBEAT_S = 3.0
"""Seconds between two rewrites of a lease."""


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class RunLock:
    """All leases of a rank, renewed by a thread while open. A rank without leases passes all checks.

    clock: seconds, also while the host sleeps.
    """

    def __init__(self, leases: Sequence[Lease], *, clock: Callable[[], float] = _boottime) -> None:
        self._leases = leases
        self._clock = clock
        self._verified_at = clock()
        self._renewing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._lost: RunError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether another run has taken over."""
        return self._lost is not None

    def check(self) -> None:
        """Raise RunError if the last heartbeat found that another run has taken over.

        Reads a file only if that heartbeat is old, as when the process was stopped for a while.
        """
        if self._lost is not None:
            raise self._lost
        if self._clock() - self._verified_at >= STALE_S / 2:
            self.verify()

    def verify(self) -> None:
        """Raise RunError if another run has taken over by now. May be called by any thread."""
        with self._renewing:
            if self._lost is not None:
                raise self._lost
            started = self._clock()  # the process may be stopped between the last check of a file and the next line
            try:
                for lease in self._leases:
                    lease.renew()
            except RunError as error:
                self._lost = error
                raise
            self._verified_at = started

    def acquire(self, groups: Groups, timeout_s: float) -> None:
        """Acquire all leases, and start the thread that renews them.

        A collective: every rank must call it, before it reads a checkpoint. timeout_s: of a communication.
        Raises RunError on a rank if another run holds one of its directories.
        """
        for lease in self._leases:
            lease.watch()
        for lease in self._leases:
            lease.acquire(print_note)
        groups.wait_for_all("acquiring the run lock", timeout_s=2 * (WAIT_S + STALE_S) + timeout_s)
        self.start()

    def take_over(self) -> None:
        """Take all leases from the rank 0 of the view before, in an elastic run."""
        for lease in self._leases:
            lease.take_over()
        self.start()

    def start(self) -> None:
        """Start the thread that renews the leases."""
        if self._leases:
            self._thread.start()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, ReportedError):  # the report has released it, in a limited time
            self.release()

    def release(self) -> None:
        """Release all leases. May be called at any time by any thread; a lease that is not held is left alone."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for lease in reversed(self._leases):
            with contextlib.suppress(OSError):
                lease.release()

    def _beat(self) -> None:
        while not (self._closed.wait(HEARTBEAT_S) or self.is_lost):
            with contextlib.suppress(RunError, OSError):
                self.verify()


def leases_of(job: Job, log: Disks = SHARED, checkpoints: Disks = SHARED) -> list[Lease]:
    """Return the leases of a rank, in one order for all runs, so that two runs never wait for each other.

    log, checkpoints: which ranks see the same run directory, and the same directory of checkpoints; the first of them
    has the lease.
    """
    places = (
        (job.paths.checkpoints.path, "checkpoint.dir", checkpoints),
        (Path(job.config.log.dir), "log.dir", log),
    )
    directories = {path.resolve(): option for path, option, disks in places if disks.is_leader(job.topology.rank)}
    return [Lease(directory, option, ProcessIdentity.current()) for directory, option in sorted(directories.items())]
