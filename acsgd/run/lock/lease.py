"""A lease on a directory, which one run at a time can hold.

From before its first write until its end, rank 0 holds a lease on the run directory and on the checkpoint directory:
a small file that names host and process, which a thread of the run lock rewrites every few seconds. A start that finds
a lease waits for its holder to end. It takes over if the holder is gone: a process of this host that no longer exists,
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
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from acsgd.errors import RunError
from acsgd.failures.processes import ProcessIdentity
from acsgd.io.files.atomic import UNSUPPORTED

STALE_S = 20.0
"""Seconds without a heartbeat after which a holder on another host counts as dead."""
WAIT_S = 30.0
"""Seconds that a start waits for a live holder to end. torchrun gives workers 30 s to end."""
POLL_S = 0.1


class LeaseWatch:
    """The lease on a directory, as another process sees it. clock: seconds."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = directory / ".lock"
        self._clock = clock
        self._seen_at = clock()
        self._is_first = True
        self.leases: dict[str, str] = {}
        """Contents of all files in .lock, by name: one lease, or none."""
        self.has_heartbeat = False
        """Whether the holder lives, or has written the lease between the last two calls of `has_expired`."""

    @property
    def holders(self) -> list[ProcessIdentity | None]:
        """The processes that the leases name; None for one that is not written completely."""
        return [_parse(text) for text in self.leases.values()]

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat that was seen."""
        return self._clock() - self._seen_at

    def has_expired(self) -> bool:
        """Read the lease; return whether nobody holds it, or its holder has ended."""
        before, self.leases = self.leases, self.read()
        has_changed = self.leases != before
        if has_changed or self._is_first:
            self._seen_at = self._clock()
        alive = [holder.is_alive() if holder else None for holder in self.holders]
        self.has_heartbeat = any(alive) or (has_changed and not self._is_first)
        self._is_first = False
        return all(each is False or (each is None and self.age_s >= STALE_S) for each in alive)

    def read(self) -> dict[str, str]:
        """Return the contents of all files in .lock, by name."""
        leases = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._lock.iterdir():
                with contextlib.suppress(FileNotFoundError):  # released meanwhile
                    leases[path.name] = path.read_text(errors="replace")
        return leases


class Lease:
    """A run's exclusive right to write to a directory.

    option: names the directory in messages; clock, sleep: seconds, replaced in tests.
    """

    def __init__(
        self,
        directory: Path,
        option: str,
        process: ProcessIdentity,
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
        self._watch: LeaseWatch | None = None

    def watch(self) -> None:
        """Read the lease for the first time, before a wait for another one: both holders may have ended together."""
        self._watch = LeaseWatch(self.directory, clock=self._clock)
        self._watch.has_expired()

    def acquire(self, note: Callable[[str], None]) -> None:
        """Take the lease, waiting for a live holder to end; note: called with a sentence before a wait.

        Raises RunError if the holder is still alive after WAIT_S seconds.
        """
        self._is_new = not self.directory.exists()
        started = self._clock()
        watch = self._watch or LeaseWatch(self.directory, clock=self._clock)
        has_noted = False
        while True:
            is_free = watch.has_expired()
            if is_free and self._take(watch.leases):
                return
            if self._clock() - started >= WAIT_S and (not watch.leases or watch.has_heartbeat):
                raise RunError(self._in_use(watch.holders, watch.age_s))
            if not (is_free or has_noted):
                note(f"{self._in_use(watch.holders, watch.age_s)}. Waiting up to {WAIT_S:.0f} s for it to end")
                has_noted = True
            self._sleep(POLL_S)

    def take_over(self) -> None:
        """Take the lease at once, from whoever holds it: the hosts of an elastic run have agreed on the new holder."""
        self._is_new = False
        while not self._take(LeaseWatch(self.directory, clock=self._clock).read()):
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
            if error.errno in UNSUPPORTED:
                self._create()
            elif error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if not self._write_heartbeat():
            return False
        self._hold_directory()
        for leftover in self.directory.glob(".lock.*"):  # of starts that were killed; others try again
            shutil.rmtree(leftover, ignore_errors=True)
        return True

    def _create(self) -> None:
        """Take the lease where directories cannot be renamed, unless it is taken. Two starts at once both step back."""
        self._lock.mkdir(exist_ok=True)
        if not any(self._lock.iterdir()):
            (self._lock / self._name).write_text(self._record())
            if len([*self._lock.iterdir()]) > 1:
                (self._lock / self._name).unlink(missing_ok=True)

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
        leases = LeaseWatch(self.directory, clock=self._clock).read()
        holder = next(filter(None, map(_parse, leases.values())), None)
        by = f"process {holder.pid} on {holder.host}" if holder else "another run"
        return (
            f"{self._option}: {self.directory} was taken over by {by}, because this run's heartbeat stopped for "
            f"{STALE_S:.0f} s or more, or its lease was removed; this run ends without further writes"
        )

    def _record(self) -> str:
        """Return the content of the lease, which differs for each heartbeat and always has the same length."""
        return json.dumps(asdict(self._process) | {"beats": f"{self._beats:012d}"}) + "\n"

    def _in_use(self, holders: Sequence[ProcessIdentity | None], age_s: float) -> str:
        where = f"{self._option}: {self.directory} is in use by another run"
        other = f"or use another --{self._option}"
        holder = next(filter(None, holders), None)
        if holder is None:
            return f"{where}; end it, {other}"
        place, by_hand = f"on {holder.host}", f"on {holder.host}: kill {holder.pid}"
        if holder.is_in_container:
            place, by_hand = (
                f"in a container with host name {holder.host}",
                f"stop the container, or in it: kill {holder.pid}",
            )
        silent = "" if holder.is_alive() else f", it is taken over {STALE_S:.0f} s after its last heartbeat"
        return (
            f"{where}: process {holder.pid} {place}, started {holder.since}, heartbeat {age_s:.0f} s ago{silent}; "
            f"end it ({by_hand}), {other}"
        )


def _parse(text: str) -> ProcessIdentity | None:
    try:
        fields = json.loads(text)
        del fields["beats"]
        return ProcessIdentity(**fields)
    except (ValueError, TypeError, KeyError):
        return None  # not written completely
