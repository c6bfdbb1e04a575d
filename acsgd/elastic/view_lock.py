"""The lock of a run whose rank 0 changes."""

from __future__ import annotations

from acsgd.elastic.messages import View
from acsgd.run.job import Job
from acsgd.run.lock import RunLock, leases_of
from acsgd.topology import Groups


class ViewLock:
    """The run lock of one worker, which keeps the leases from view to view as long as it is rank 0."""

    def __init__(self) -> None:
        self._lock: RunLock | None = None
        self._is_holder = False
        self._epoch = 0
        """Number of the last view in which this worker had a rank, and its part of the lock."""

    def of(self, job: Job, groups: Groups, view: View, timeout_s: float) -> RunLock:
        """Return the lock for a view: with the leases on rank 0, without any on other ranks.

        All ranks call it together. After a view that this worker has missed, rank 0 takes the leases again, since
        another one may have had them. timeout_s: of a communication. Raises RunError on rank 0 of the first view if
        another run holds one of the directories.
        """
        is_holder, is_next = job.topology.rank == 0, view.epoch == self._epoch + 1
        if self._lock is None or self._is_holder != is_holder or not is_next:
            self.close()
            self._lock, self._is_holder = RunLock(leases_of(job)), is_holder
            if not view.plan.is_first:
                self._lock.take_over()
        if view.plan.is_first:
            self._lock.acquire(groups, timeout_s)
        self._epoch = view.epoch
        return self._lock

    def close(self) -> None:
        """Release the leases."""
        if self._lock is not None:
            self._lock.release()
