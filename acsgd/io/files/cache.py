"""Files that one process of a host builds and all processes of the host use."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from acsgd.errors import CorruptFileError, RunError, explain
from acsgd.io.files.atomic import BuildInProgressError, build_atomically, describe_build
from acsgd.notes import print_note, report_if_slow

T = TypeVar("T")

TIMEOUT_S = 4 * 3600.0
"""Maximum time to wait for another process that builds, seconds. A process that dies releases the lock at once."""


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
        with contextlib.ExitStack() as stack:
            with report_if_slow(note, lambda: f"waiting until {_builder(path)} has built {path}", enabled=reports_wait):
                stack.enter_context(FileLock(lock_file(path)).acquire(timeout=timeout_s))
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
    except Timeout:
        raise RunError(
            f"waited {timeout_s:g} s for {_builder(path)} to build {path}; "
            "end that process if it hangs, or run again when it has finished"
        ) from None
    except OSError as error:
        raise RunError(f"the cache beside log.dir cannot be written: {explain(error)}") from None


def lock_file(path: Path) -> Path:
    """Return the lock of a path, in this host's temporary directory; one per user, since /tmp is sticky."""
    digest = hashlib.sha256(f"{os.getuid()} {path.absolute()}".encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"acsgd-{digest[:32]}.lock"


def _builder(path: Path) -> str:
    return describe_build(path) or "another process of this host"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
