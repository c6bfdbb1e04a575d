"""Files that one process of a host builds and all processes of the host use."""

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

TIMEOUT_S = 4 * 3600.0
"""Maximum time to wait for another process that builds, seconds. A process that dies releases the lock at once."""


def once_per_host(path: Path, build: Callable[[Path], None], *, timeout_s: float = TIMEOUT_S) -> Path:
    """Build `path` if it does not exist, and return it. All processes of a host may call this at the same time.

    build: writes a file or directory at the path it is given, a sibling of `path` with the same suffix that is renamed
    to `path` when it is complete. If it raises, everything it wrote is removed, new parent directories included.
    Raises RunError if another process has not finished after `timeout_s` seconds.
    """
    if path.exists():
        return path
    try:
        with FileLock(_lock_file(path), timeout=timeout_s):
            if not path.exists():
                _build(path, build)
    except Timeout:
        raise RunError(
            f"waited {timeout_s:g} s for another process of this host to build {path}; "
            "end that process if it hangs, or run again when it has finished"
        ) from None
    return path


def _lock_file(path: Path) -> Path:
    """Return the lock of a path, in this host's temporary directory; one per user, since /tmp is sticky."""
    digest = hashlib.sha256(f"{os.getuid()} {path.absolute()}".encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"acsgd-{digest[:32]}.lock"


def _build(path: Path, build: Callable[[Path], None]) -> None:
    # a random name, since another host may build on the same network file system
    partial = path.with_name(f".{uuid.uuid4().hex}-{path.name}")
    with _parents_of(path):
        try:
            build(partial)
            if not path.exists():
                partial.rename(path)
        finally:
            _remove(partial)


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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
