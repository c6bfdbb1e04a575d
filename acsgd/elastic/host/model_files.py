"""Files of the base model that a host lacks: it gets them from the hosts of its view, when they are first read."""

from __future__ import annotations

import contextlib
import fcntl
import math
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from acsgd.comm.waits import Waits
from acsgd.elastic.host.files import MODEL, RemoteFiles, check_room, check_taken, receive
from acsgd.errors import RefusedError, RunError, explain
from acsgd.io.files.atomic import fsync_directory
from acsgd.notes import print_note
from acsgd.shards.manifest import StoredFile

ATTEMPTS = 10
"""Number of times in a row that all hosts are tried without a byte received."""
RETRY_S = 2.0
"""Time between two attempts, seconds."""


class ModelFiles:
    """Gets files of a model from the daemons of a view. May be used by several threads and ranks of a host.

    addresses: of the daemons; run, secret: with which they sign; waits: of this rank in the view.
    """

    def __init__(self, addresses: Sequence[str], run: str, secret: bytes, waits: Waits) -> None:
        self._addresses = addresses
        self._run, self._secret = run, secret
        self._waits = waits

    def get(self, path: Path, file: StoredFile) -> None:
        """Let a file be at a path, verified.

        Raises RefusedError if no host has it, or there is no room for it; RunError if it could not be received;
        WaitInterruptedError.
        """
        failures: list[Exception] = []

        def run() -> None:
            try:
                self._get(path, file)
            except Exception as failure:
                failures.append(failure)

        # a thread that is left behind by an interrupt completes the file for the next view
        thread = threading.Thread(target=run, name=f"get {file.file}", daemon=True)
        thread.start()
        self._waits.poll(lambda within_s: _has_ended(thread, within_s), math.inf)
        for failure in failures:
            raise failure

    def _get(self, path: Path, file: StoredFile) -> None:
        check_taken(file.file)
        partial = path.with_name(f".{path.name}.partial")
        with _locked(partial):
            if path.exists():  # another rank of this host has got it
                partial.unlink(missing_ok=True)
                return
            size, attempts = partial.stat().st_size, 0
            try:
                check_room(path.parent, file.bytes - size)
            except ValueError as error:
                raise RefusedError(str(error)) from None
            while problems := self._try_all(path.parent, partial, file):
                attempts = attempts + 1 if _size(partial) <= size else 0
                size = _size(partial)
                if attempts == ATTEMPTS:
                    raise RunError(f"{path} could not be received from a host of the run: {'; '.join(problems)}")
                time.sleep(RETRY_S)
            partial.replace(path)
            fsync_directory(path.parent)

    def _try_all(self, directory: Path, partial: Path, file: StoredFile) -> list[str]:
        """Complete a file from the first host that can send it; return why none could, empty = complete.

        Raises RefusedError if all hosts answer and none holds it.
        """
        problems = []
        with contextlib.ExitStack() as stack:
            for address in self._addresses:
                try:
                    remote = RemoteFiles(address, self._run, self._secret)
                    stack.callback(remote.close)
                    if (holder := _holder(remote, file)) is not None:
                        receive(remote, holder[0], file, partial, lambda size: None, name=holder[1])
                        print_note(f"{directory / file.file}: {file.bytes / 1e6:.1f} MB from {address}, verified")
                        return []
                except (OSError, ValueError) as error:
                    problems.append(f"{address}: {explain(error) or error}")
        if not problems:
            raise RefusedError(
                f"{directory} lacks {file.file}, and no host of the run holds it: start a host that has the whole "
                "model, or copy the model to this host"
            )
        return problems


def _holder(remote: RemoteFiles, file: StoredFile) -> tuple[str, str] | None:
    """Return the directory and the name of a file with the same content on a host; None if it has none.

    Files of checkpoints count: they hold the frozen parameters of layers. Raises OSError, ValueError.
    """
    directories = {**remote.list().directories}
    with contextlib.suppress(ValueError):  # it has no model
        directories = {MODEL: remote.held(MODEL), **directories}
    for directory, held in directories.items():
        for each in held.files:
            if (each.checksum, each.bytes) == (file.checksum, file.bytes):
                return directory, each.file
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created if it is missing."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_ended(thread: threading.Thread, within_s: float) -> bool:
    thread.join(min(within_s, threading.TIMEOUT_MAX))
    return not thread.is_alive()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
