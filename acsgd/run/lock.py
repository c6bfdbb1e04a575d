"""At most one run per directory.

From before its first write until its end, rank 0 holds a lease on the run directory and on the checkpoint directory:
a small file that names host and process, which a thread rewrites every HEARTBEAT_S seconds. A start that finds a
lease waits for its holder to end. It takes over if the holder is gone: a process of this host that no longer exists,
or a process of another host whose file has not changed for STALE_S seconds, measured by the clock of the waiting
process. Clocks of two hosts are never compared.

Leases are numbered: .lock-00000001, .lock-00000002, ... The highest number holds the directory. A lease is created with
O_EXCL, so of several starts one gets the next number. Nothing else is required of the file system (no flock, no
exchange of two names), so this works on NFS, unlike filelock's SoftFileLease, which cannot take over there. A holder
that was replaced while it lives (it was stopped, or cut off from the file system) finds the higher number before its
next write, and ends.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from acsgd.errors import RunError
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

        If the lease was removed, with its directory or alone, both are created again.
        """
        self._beats += 1
        with contextlib.suppress(OSError):  # on a full disk the lease is still valid, unless there is a higher number
            self._write_heartbeat()
        successors = {number: text for number, text in self._read().items() if number > self._number}
        if successors:
            raise RunError(
                f"{self._taken_over(_parse(successors[max(successors)]))}, because this run's heartbeat stopped for "
                f"{STALE_S:.0f} s or more; this run ends without further writes"
            )

    def release(self) -> None:
        """Remove the lease, and the directory if `acquire` created it and it is empty."""
        self._path(self._number).unlink(missing_ok=True)
        if self._is_new and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _write_heartbeat(self) -> None:
        path = self._path(self._number)
        try:
            holder = _parse(path.read_text(errors="replace"))
        except FileNotFoundError:
            self.directory.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:  # unless a start was faster, which has the number then
                file.write(self._record())
            return
        if holder not in (None, self._process):
            raise RunError(
                f"{self._taken_over(holder)}, after the directory was removed; this run ends without further writes"
            )
        self._new(self._number).write_text(self._record())
        self._new(self._number).rename(path)

    def _taken_over(self, holder: Process | None) -> str:
        by = f"process {holder.pid} on {holder.host}" if holder else "another run"
        return f"{self._option}: {self.directory} was taken over by {by}"

    def _create(self, judged: dict[int, str]) -> bool:
        """Create the lease after those `judged` to have no live holder, and remove them. Return whether it worked."""
        number = max(judged, default=0) + 1
        try:
            with self._path(number).open("x") as file:
                file.write(self._record())
        except FileExistsError:
            return False
        others = {other: text for other, text in self._read().items() if other != number}
        if others != judged:  # another start was faster, or the holder is alive after all
            self._path(number).unlink(missing_ok=True)
            return False
        self._number = number
        for other in judged:
            self._path(other).unlink(missing_ok=True)
            self._new(other).unlink(missing_ok=True)
        return True

    def _read(self) -> dict[int, str]:
        """Return the contents of all leases, by number."""
        leases = {}
        for path in self.directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # released or renewed meanwhile
                    leases[int(match[1])] = path.read_text(errors="replace")
        return leases

    def _path(self, number: int) -> Path:
        return self.directory / f".lock-{number:08d}"

    def _new(self, number: int) -> Path:
        """Return where a heartbeat is written before it replaces the lease."""
        return self.directory / f".lock-{number:08d}.new"

    def _record(self) -> str:
        return json.dumps(asdict(self._process) | {"beats": self._beats}) + "\n"

    def _in_use(self, holder: Process | None, age_s: float) -> str:
        where = f"{self._option}: {self.directory} is in use by another run"
        if holder is None:
            return f"{where}; end it, or use another --{self._option}"
        return (
            f"{where}: process {holder.pid} on {holder.host}, started {holder.since}, heartbeat {age_s:.0f} s ago; "
            f"end it (on {holder.host}: kill {holder.pid}), or use another --{self._option}"
        )


class RunLock:
    """All leases of a run, renewed by a thread while open. Ranks other than 0 have no leases, and all checks pass."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._leases = leases
        self._renewing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._lost: RunError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether another run has taken over."""
        return self._lost is not None

    def check(self) -> None:
        """Raise RunError if the last heartbeat found that another run has taken over. Reads no file."""
        if self._lost is not None:
            raise self._lost

    def verify(self) -> None:
        """Raise RunError if another run has taken over by now. May be called by any thread."""
        with self._renewing:
            self.check()
            try:
                for lease in self._leases:
                    lease.renew()
            except RunError as error:
                self._lost = error
                raise

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
        lease.acquire(lambda text: print(text, file=sys.stderr, flush=True))
        leases.append(lease)


def _parse(text: str) -> Process | None:
    try:
        fields = json.loads(text)
        del fields["beats"]
        return Process(**fields)
    except (ValueError, TypeError, KeyError):
        return None  # not written completely
