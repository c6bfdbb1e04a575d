"""At most one run per directory.

From before its first write until its end, rank 0 holds a lease on the run directory and on the checkpoint directory:
a small file that names host and process, which a thread rewrites every HEARTBEAT_S seconds. A start that finds a
lease waits for its holder to end. It takes over if the holder is gone: a process of this host that no longer exists,
or a process of another host whose file has not changed for STALE_S seconds, measured by the clock of the waiting
process. Clocks of two hosts are never compared.

    .lock/0b5c...      the lease of the holder: a name that no other lease has ever had
    .lock.77e1.../     a start that is about to take the lease: a directory with its lease in it

A start takes the lease by renaming its directory to .lock, which fails unless that is absent or empty. To take over, it
first removes the file of the holder that has ended. A run holds the lease while the file of that name is in .lock. So
it finds that it was replaced, for instance while it was stopped, when it next opens the file, which it does before
every write to the directories; then it ends.

What this requires of the file system: rename is atomic, and a file that was removed cannot be opened. NFS has both,
since a client asks the server for each of them, whatever it has cached (close-to-open consistency). Listings and
missing names may be out of date; a start then waits longer. It uses neither flock nor link counts nor time stamps.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from acsgd.errors import RunError
from acsgd.notes import print_note
from acsgd.run.job import Job
from acsgd.run.processes import Process
from acsgd.topology import Groups

HEARTBEAT_S = 3.0
"""Seconds between two rewrites of a lease."""
STALE_S = 20.0
"""Seconds without a heartbeat after which a holder on another host counts as dead."""
WAIT_S = 30.0
"""Seconds that a start waits for a live holder to end. torchrun gives workers 30 s to end."""
POLL_S = 0.1


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """A run's exclusive right to write to a directory.

    option: names the directory in messages; clock, sleep: seconds, replaced in tests.
    """

    def __init__(
        self,
        directory: Path,
        option: str,
        process: Process,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.directory = directory
        self._option = option
        self._process = process
        self._clock = clock
        self._sleep = sleep
        self._lock = directory / ".lock"
        self._name = secrets.token_hex(16)
        self._is_new = False
        self._held: int | None = None
        self._beats = 0

    def acquire(self, note: Callable[[str], None]) -> None:
        """Take the lease, waiting for a live holder to end; note: called with a sentence before a wait.

        Raises RunError if the holder is still alive after WAIT_S seconds.
        """
        self._is_new = not self.directory.exists()
        started = seen_at = self._clock()
        seen: dict[str, str] | None = None
        has_noted = False
        while True:
            leases, now = self._read(), self._clock()
            has_heartbeat = seen is not None and leases != seen
            if leases != seen:
                seen, seen_at = leases, now
            holders = [_parse(text) for text in leases.values()]
            alive = [holder.is_alive() if holder else None for holder in holders]
            is_free = all(each is False or (each is None and now - seen_at >= STALE_S) for each in alive)
            if is_free and self._take(leases):
                return
            if now - started >= WAIT_S and (not leases or any(alive) or has_heartbeat):
                raise RunError(self._in_use(holders, now - seen_at))
            if not (is_free or has_noted):
                note(f"{self._in_use(holders, now - seen_at)}. Waiting up to {WAIT_S:.0f} s for it to end")
                has_noted = True
            self._sleep(POLL_S)

    def renew(self) -> None:
        """Write a heartbeat. Raises RunError if another run has taken over.

        If the directory was removed, it and the lease are created again.
        """
        if not (self._write_heartbeat() or (self._was_removed() and self._take([]))):
            raise RunError(self._taken_over())

    def release(self) -> None:
        """Remove the lease if it is still held, and the directory if `acquire` created it and it is empty."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
        (self._lock / self._name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another run has taken it
            self._lock.rmdir()
        if self._is_new and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _take(self, ended: Iterable[str]) -> bool:
        """Remove leases whose holders have ended, and take their place. Return False if another start was faster."""
        for name in ended:
            (self._lock / name).unlink(missing_ok=True)
        new = self.directory / f".lock.{self._name}"
        try:
            new.mkdir(parents=True, exist_ok=True)
            (new / self._name).write_text(self._record())
            new.rename(self._lock)
        except FileNotFoundError:
            pass  # the holder removed its directory as it ended, or another start removed this one as a leftover
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if not self._write_heartbeat():
            return False
        self._hold_directory()
        for leftover in self.directory.glob(".lock.*"):  # of starts that were killed; others try again
            shutil.rmtree(leftover, ignore_errors=True)
        return True

    def _write_heartbeat(self) -> bool:
        """Overwrite the lease in place; return False if another run has removed it."""
        self._beats += 1
        try:
            file = os.open(self._lock / self._name, os.O_RDWR)
        except FileNotFoundError:
            return False
        with contextlib.suppress(OSError):  # a disk that fails loses no lease, unless another run takes over
            try:
                os.pwrite(file, self._record().encode(), 0)
            finally:
                os.close(file)
        return True

    def _hold_directory(self) -> None:
        """Open the directory, so that another one that replaces it has another inode."""
        if self._held is not None:
            os.close(self._held)
        self._held = os.open(self.directory, os.O_RDONLY)

    def _was_removed(self) -> bool:
        """Return whether the directory was removed, and perhaps created again, since it was opened."""
        assert self._held is not None, "the lease is not acquired"
        try:
            return not os.path.samestat(self.directory.stat(), os.fstat(self._held))
        except OSError:  # it is not there; NFS: the open one is not, either
            return True

    def _taken_over(self) -> str:
        holder = next(filter(None, map(_parse, self._read().values())), None)
        by = f"process {holder.pid} on {holder.host}" if holder else "another run"
        return (
            f"{self._option}: {self.directory} was taken over by {by}, because this run's heartbeat stopped for "
            f"{STALE_S:.0f} s or more, or its lease was removed; this run ends without further writes"
        )

    def _read(self) -> dict[str, str]:
        """Return the contents of all files in .lock, by name: one lease, or none."""
        leases = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._lock.iterdir():
                with contextlib.suppress(FileNotFoundError):  # released meanwhile
                    leases[path.name] = path.read_text(errors="replace")
        return leases

    def _record(self) -> str:
        """Return the content of the lease, which differs for each heartbeat and always has the same length."""
        return json.dumps(asdict(self._process) | {"beats": f"{self._beats:012d}"}) + "\n"

    def _in_use(self, holders: Sequence[Process | None], age_s: float) -> str:
        where = f"{self._option}: {self.directory} is in use by another run"
        holder = next(filter(None, holders), None)
        if holder is None:
            return f"{where}; end it, or use another --{self._option}"
        return (
            f"{where}: process {holder.pid} on {holder.host}, started {holder.since}, heartbeat {age_s:.0f} s ago; "
            f"end it (on {holder.host}: kill {holder.pid}), or use another --{self._option}"
        )


class RunLock:
    """All leases of a run, renewed by a thread while open. Ranks other than 0 have no leases, and all checks pass.

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
        Raises RunError on rank 0 if another run holds one of the directories.
        """
        for lease in self._leases:
            lease.acquire(print_note)
        groups.wait_for_all("acquiring the run lock", timeout_s=2 * (WAIT_S + STALE_S) + timeout_s)
        self.start()

    def start(self) -> None:
        """Start the thread that renews the leases."""
        if self._leases:
            self._thread.start()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
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


def leases_of(job: Job) -> list[Lease]:
    """Return the leases of a run, in one order for all runs, so that two runs never wait for each other.

    Ranks other than 0 have none.
    """
    if job.topology.rank != 0:
        return []
    directories = {job.checkpoints.path.resolve(): "checkpoint.dir", Path(job.config.log.dir).resolve(): "log.dir"}
    return [Lease(directory, option, Process.current()) for directory, option in sorted(directories.items())]


def _parse(text: str) -> Process | None:
    try:
        fields = json.loads(text)
        del fields["beats"]
        return Process(**fields)
    except (ValueError, TypeError, KeyError):
        return None  # not written completely
