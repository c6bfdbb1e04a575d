"""Files that one process of a host builds and all processes of the host use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from acsgd.errors import CorruptFileError, RunError, explain
from acsgd.io.files.atomic import BuildInProgressError, build_atomically, describe_build
from acsgd.notes import print_note, report_if_slow

T = TypeVar("T")

TIMEOUT_S = 4 * 3600.0
"""Maximum time to wait for another process that builds, seconds. A process that dies releases the lock at once."""
POLL_S = 0.05
"""Seconds between two attempts to get a lock."""
LEFTOVER_S = 3600.0
"""Age of the file of a lock, seconds, from which it is removed if nobody holds the lock."""


def open_cached(
    path: Path,
    build: Callable[[Path], None],
    open_built: Callable[[Path], T],
    *,
    resumable: bool = False,
    note: Callable[[str], None] = print_note,
    reports_wait: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> T:
    """Build `path` if it does not exist or is corrupt, and return open_built(path).

    All processes of a host may call this at the same time: one of them builds, the others wait.
    build, resumable: see `build_atomically`. open_built: raises CorruptFileError if what was built is not valid now.
    note: called with a sentence if a corrupt path is built again and, from a thread, during a long wait unless
    `reports_wait` is False: one process of a run and host should report it.
    Raises RunError if the files cannot be written, or if another process has not finished after `timeout_s` seconds.
    """
    if os.path.lexists(path):
        with contextlib.suppress(CorruptFileError):
            return open_built(path)
    try:
        with _locked(path, note if reports_wait else None, timeout_s):
            if os.path.lexists(path):
                try:
                    return open_built(path)
                except CorruptFileError as error:
                    note(f"{error}; {path} is built again now")
                    _remove(path)
            try:
                build_atomically(path, build, resumable=resumable)
            except BuildInProgressError:  # another host builds on the same network file system; the first one wins
                build_atomically(path, build)
            return open_built(path)
    except OSError as error:
        raise RunError(f"the cache beside log.dir cannot be written: {explain(error)}") from None


@contextlib.contextmanager
def _locked(path: Path, note: Callable[[str], None] | None, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a path. note: called from a thread during a long wait. Raises RunError after `timeout_s`."""

    def waiting() -> str:
        return f"waiting until {_builder(path)} has built {path}"

    lock = HostLock(path)
    with report_if_slow(note or print_note, waiting, enabled=note is not None):
        if not lock.acquire(timeout_s):
            raise RunError(
                f"waited {timeout_s:g} s for {_builder(path)} to build {path}; "
                "end that process if it hangs, or run again when it has finished"
            )
    try:
        yield
    finally:
        lock.release()


class HostLock:
    """A lock on a path, which one process of this host and user holds at a time; it ends with the process.

    Its file exists while it is held; that of a process that was killed, until a later one acquires any lock. So whoever
    locks a file checks that it was not removed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._file = lock_file(path)
        self._descriptor: int | None = None

    def acquire(self, timeout_s: float) -> bool:
        """Wait for the lock; return False if another process holds it for `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (descriptor := _try_lock(self._file)) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        self._descriptor = descriptor
        _remove_leftovers(self._file.parent)
        return True

    def release(self) -> None:
        """Release the lock if it is held. May be called by any thread."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            _unlock(self._file, descriptor)


def lock_file(path: Path) -> Path:
    """Return the lock of a path, in this host's temporary directory; one per user, since /tmp is sticky."""
    digest = hashlib.sha256(f"{os.getuid()} {path.absolute()}".encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"acsgd-{digest[:32]}.lock"


def _try_lock(file: Path) -> int | None:
    """Return the descriptor of a file that this process has locked now; None if another one holds it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _unlock(file: Path, descriptor: int) -> None:
    """Remove a file that this process has locked, and end the lock."""
    with contextlib.suppress(OSError):  # a cleaner of temporary files has removed it
        if os.path.samestat(file.lstat(), os.fstat(descriptor)):
            file.unlink()
    os.close(descriptor)


def _remove_leftovers(directory: Path) -> None:
    """Remove the old files of locks that nobody holds: processes that were killed have left them."""
    for file in directory.glob("acsgd-*.lock"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            is_old = time.time() - file.lstat().st_mtime >= LEFTOVER_S
            if is_old and (descriptor := _try_lock(file)) is not None:
                _unlock(file, descriptor)


def _builder(path: Path) -> str:
    return describe_build(path) or "another process of this host"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
