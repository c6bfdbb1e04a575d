"""At most one run per directory.

From before its first write until its end, rank 0 holds a lease on the run directory and on the checkpoint directory:
a small file that names host and process, which a thread rewrites every HEARTBEAT_S seconds. A start that finds a
lease waits for its holder to end. It takes over if the holder is gone: a process of this host that no longer exists,
or a process of another host whose file has not changed for STALE_S seconds, measured by the clock of the waiting
process. Clocks of two hosts are never compared.

Leases are numbered: .lock-00000001, .lock-00000002, ... The highest number holds the directory. A lease is created with
O_EXCL, so of several starts one gets the next number. Nothing else is required of the file system (no flock, no
exchange of two names), so this works on NFS, unlike filelock's SoftFileLease, which cannot take over there. A client
of NFS may see an old listing, but not after a change of its own; so every decision follows a change. A holder that was
replaced while it lives (it was stopped, or cut off from the file system) finds the higher number, or that its own lease
is gone, before its next write, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
_NAME = re.compile(r"\.lock-(\d{8})")


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
        self._is_new = False
        self._number = 0
        self._held: int | None = None
        self._beats = 0

    def acquire(self, note: Callable[[str], None]) -> None:
        """Take the lease, waiting for a live holder to end; note: called with a sentence before a wait.

        Raises RunError if the holder is still alive after WAIT_S seconds.
        """
        self._is_new = not self.directory.exists()
        self.directory.mkdir(parents=True, exist_ok=True)
        started = seen_at = self._clock()
        seen: dict[int, str] | None = None
        has_noted = False
        while True:
            leases, now = self._read(), self._clock()
            has_heartbeat = seen is not None and leases != seen
            if leases != seen:
                seen, seen_at = leases, now
            holder = _parse(leases[max(leases)]) if leases else None
            alive = holder.is_alive() if holder else None
            is_stale = alive is False or (alive is None and now - seen_at >= STALE_S)
            if not leases or is_stale:
                if self._create(leases):
                    return
            elif now - started >= WAIT_S and (alive or has_heartbeat):
                raise RunError(self._in_use(holder, now - seen_at))
            elif not has_noted:
                note(f"{self._in_use(holder, now - seen_at)}. Waiting up to {WAIT_S:.0f} s for it to end")
                has_noted = True
            self._sleep(POLL_S)

    def renew(self) -> None:
        """Write a heartbeat. Raises RunError if another run has taken over.

        If the directory was removed, it and the lease are created again.
        """
        self._beats += 1
        if not (self._create_again() if self._was_removed() else self._write_heartbeat()):
            raise RunError(self._taken_over())
        self._change_directory()
        if any(number > self._number for number in self._numbers()):
            raise RunError(self._taken_over())

    def release(self) -> None:
        """Remove the lease unless it is another run's, and the directory if `acquire` created it and it is empty."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
        if self._is_own(self._read().get(self._number)):
            self._path(self._number).unlink(missing_ok=True)
        if self._is_new and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _create_again(self) -> bool:
        """Create the removed directory and the lease; return False if a start was faster."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._hold_directory()
        try:
            with self._path(self._number).open("x") as file:
                file.write(self._record())
        except FileExistsError:
            return False
        return True

    def _write_heartbeat(self) -> bool:
        """Overwrite the lease in place; return False if it is not there or another run's.

        One open file is read and then written, never a name: a lease that another run creates meanwhile is safe.
        """
        try:
            file = os.open(self._path(self._number), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            is_own = self._is_own(os.read(file, 4096).decode(errors="replace"))
            if is_own:
                with contextlib.suppress(OSError):  # a disk that fails loses no lease, unless another run takes over
                    os.pwrite(file, self._record().encode(), 0)
        finally:
            with contextlib.suppress(OSError):
                os.close(file)
        return is_own

    def _change_directory(self) -> None:
        """Create and remove a file: a client of NFS may list a directory as it was, but not after its own change."""
        changed = self.directory / f".lock-{self._number:08d}.new"
        with contextlib.suppress(OSError):
            changed.open("w").close()
            changed.unlink()

    def _is_own(self, text: str | None) -> bool:
        return text is not None and _parse(text) == self._process

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
        leases = self._read()
        holder = _parse(leases[max(leases)]) if leases else None
        by = f"process {holder.pid} on {holder.host}" if holder else "another run"
        return (
            f"{self._option}: {self.directory} was taken over by {by}, because this run's heartbeat stopped for "
            f"{STALE_S:.0f} s or more, or its lease was removed; this run ends without further writes"
        )

    def _create(self, judged: dict[int, str]) -> bool:
        """Create the lease after those `judged` to have no live holder, and remove them. Return whether it worked."""
        number = max(judged, default=0) + 1
        try:
            with self._path(number).open("x") as file:
                file.write(self._record())
        except FileExistsError:
            return False
        listed, leases = self._numbers(), self._read()  # a client may list a name and not find it yet
        if listed != {*judged, number} or any(leases.get(other) != text for other, text in judged.items()):
            # another start was faster, or the holder is alive after all
            self._path(number).unlink(missing_ok=True)
            return False
        self._number = number
        self._hold_directory()
        for other in judged:
            self._path(other).unlink(missing_ok=True)
        return True

    def _read(self) -> dict[int, str]:
        """Return the contents of all leases that can be read, by number."""
        leases = {}
        for number in self._numbers():
            with contextlib.suppress(FileNotFoundError):  # released meanwhile
                leases[number] = self._path(number).read_text(errors="replace")
        return leases

    def _numbers(self) -> set[int]:
        """List the numbers of all leases."""
        return {int(match[1]) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))}

    def _path(self, number: int) -> Path:
        return self.directory / f".lock-{number:08d}"

    def _record(self) -> str:
        """Return the content of the lease, which differs for each heartbeat and always has the same length."""
        return json.dumps(asdict(self._process) | {"beats": f"{self._beats:012d}"}) + "\n"

    def _in_use(self, holder: Process | None, age_s: float) -> str:
        where = f"{self._option}: {self.directory} is in use by another run"
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
            try:
                for lease in self._leases:
                    lease.renew()
            except RunError as error:
                self._lost = error
                raise
            self._verified_at = self._clock()

    def start(self) -> None:
        """Start the thread that renews the leases."""
        if self._leases:
            self._thread.start()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release all leases."""
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


@contextlib.contextmanager
def run_lock(job: Job, groups: Groups) -> Iterator[RunLock]:
    """Hold the leases of a job while open. A collective: every rank must enter it, before it reads a checkpoint.

    Raises RunError on rank 0 if another run holds the run directory or the checkpoint directory.
    """
    leases: list[Lease] = []
    with RunLock(leases) as lock:
        timeout_s = 2 * (WAIT_S + STALE_S) + job.config.run.timeout
        if job.topology.rank == 0:
            _acquire_all(job, leases)
        groups.wait_for_all("acquiring the run lock", timeout_s=timeout_s)
        lock.start()
        yield lock


def _acquire_all(job: Job, leases: list[Lease]) -> None:
    """Acquire the leases in one order for all runs, so that two runs never wait for each other."""
    directories = {job.checkpoints.path.resolve(): "checkpoint.dir", Path(job.config.log.dir).resolve(): "log.dir"}
    for directory, option in sorted(directories.items()):
        lease = Lease(directory, option, Process.current())
        lease.acquire(print_note)
        leases.append(lease)


def _parse(text: str) -> Process | None:
    try:
        fields = json.loads(text)
        del fields["beats"]
        return Process(**fields)
    except (ValueError, TypeError, KeyError):
        return None  # not written completely
