"""Files that one process of a host builds and all processes of the host use."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from acsgd.errors import RunError
from acsgd.io.atomic import build_atomically

TIMEOUT_S = 4 * 3600.0
"""Maximum time to wait for another process that builds, seconds. A process that dies releases the lock at once."""


def once_per_host(path: Path, build: Callable[[Path], None], *, timeout_s: float = TIMEOUT_S) -> Path:
    """Build `path` if it does not exist, and return it. All processes of a host may call this at the same time.

    build: as of `build_atomically`. Raises RunError if there is no room for the files, or if another process has not
    finished after `timeout_s` seconds.
    """
    if path.exists():
        return path
    try:
        with FileLock(_lock_file(path), timeout=timeout_s):
            if not path.exists():
                build_atomically(path, build)  # another host may build on the same network file system
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
