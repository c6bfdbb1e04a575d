"""Files that one process of a host makes and all of them use."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from acsgd.errors import RunError

PATIENCE_S = 4 * 3600.0
"""Seconds that a process waits for another to build. A builder that dies frees the lock at once."""


def once_per_host(path: Path, build: Callable[[Path], None], *, patience_s: float = PATIENCE_S) -> Path:
    """Return `path`, building it first if it is absent; all processes of a host may call it at the same time.

    build: writes a file or a directory at the path it is given, a sibling of `path` with the same suffix,
    which becomes `path` only when complete. If it raises, nothing is left behind, not even new parents.
    Raises RunError if another process still builds after `patience_s` seconds.
    """
    if path.exists():
        return path
    try:
        with FileLock(_lock_file(path), timeout=patience_s):
            if not path.exists():
                _build(path, build)
    except Timeout:
        raise RunError(
            f"waited {patience_s:g} s for another process of this host to build {path}; "
            "end that process if it hangs, or run again when it is done"
        ) from None
    return path


def _lock_file(path: Path) -> Path:
    """Return a name that one user's processes on this host share; /tmp refuses to share between users."""
    digest = hashlib.sha256(f"{os.getuid()} {path.absolute()}".encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"acsgd-{digest[:32]}.lock"


def _build(path: Path, build: Callable[[Path], None]) -> None:
    # random, since another host may build on the same network file system
    unfinished = path.with_name(f".{uuid.uuid4().hex}-{path.name}")
    with _parents_of(path):
        try:
            build(unfinished)
            if not path.exists():
                unfinished.rename(path)
        finally:
            _remove(unfinished)


@contextlib.contextmanager
def _parents_of(path: Path) -> Iterator[None]:
    """Make the parents of `path`, and remove those that were made, and are empty, if the body raises."""
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # another build put something there
            for parent in missing:
                parent.rmdir()
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
