"""Files and directories that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PREFIX, SUFFIX = ".acsgd-", ".partial"
"""Start and end of the name of the hidden directory of a build; a random text lies between them."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a file size limit that has no room for a file."""


def build_atomically(path: Path, build: Callable[[Path], None]) -> bool:
    """Build `path` and return True; return False, without a change, if another process has built it meanwhile.

    build: writes a file or directory at the path it is given, which has the name of `path` and is renamed to it at the
    end, when it is on disk. If it raises, everything it wrote is removed, new parent directories included. What a
    killed process left beside `path` is removed, too. A full disk is an OSError that names `path`.
    """
    with _parents_of(path), _partial_directory(path.parent) as partial:
        try:
            build(partial / path.name)
            _fsync(partial / path.name)
        except OSError as error:
            if error.errno in FULL:  # it names the hidden directory, or no file
                raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
            raise
        is_first = _rename(partial / path.name, path)
        fsync_directory(path.parent)
        return is_first


def describe_build(path: Path) -> str | None:
    """Return which process builds `path` and what it has written, None if none does."""
    for directory in path.parent.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError):  # completed or removed meanwhile
            if os.path.lexists(directory / path.name):
                written = sum(file.lstat().st_size for file in _tree(directory / path.name))
                return f"{(directory / 'lock').read_text()} ({written / 1e6:.1f} MB so far)"
    return None


def fsync_directory(directory: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tree(path: Path) -> list[Path]:
    """Return a file, or a directory after everything in it."""
    return [*path.rglob("*"), path]


def _fsync(path: Path) -> None:
    """Wait until a file, or a directory with everything in it, is on disk."""
    for part in _tree(path):
        if part.is_dir():
            fsync_directory(part)
        else:
            with part.open("rb") as file:
                os.fsync(file.fileno())


def _rename(built: Path, path: Path) -> bool:
    if os.path.lexists(path):
        return False
    try:
        built.rename(path)
    except OSError as error:  # of two directories, one gets the name
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


@contextlib.contextmanager
def _partial_directory(parent: Path) -> Iterator[Path]:
    """Create a directory for a build in `parent`, and remove it at the end, and those of processes that were killed.

    The file "lock" in it is locked while its process lives, and names it.
    """
    for leftover in parent.glob(f"{PREFIX}*{SUFFIX}"):
        _remove_if_unlocked(leftover)
    directory, lock = _locked_directory(parent)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _locked_directory(parent: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor of its lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=SUFFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            if _lock(lock) is not False and os.fstat(lock).st_nlink:
                os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return directory, lock
            os.close(lock)


def _remove_if_unlocked(directory: Path) -> None:
    if directory.is_symlink():
        return  # not of a build
    with contextlib.suppress(OSError):  # not a directory, or another process removes it
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if _lock(lock):
            shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file; return False if another process holds the lock, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def _parents_of(path: Path) -> Iterator[None]:
    """Create the parents of `path`; if the body raises, remove those that were created, if empty."""
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: another build uses it
            for parent in missing:
                parent.rmdir()
        raise
