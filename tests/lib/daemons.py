"""Daemons of several hosts in one process, with clients that speak as their workers do."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from acsgd.elastic.host.daemon import Daemon
from acsgd.elastic.host.joining import DaemonOptions
from acsgd.elastic.membership.effects import Timing
from acsgd.elastic.membership.messages import (
    End,
    FromWorker,
    Hello,
    Run,
    Setup,
    SharedFiles,
    Stop,
    Stopped,
    ToWorker,
    View,
    from_line,
    to_line,
)
from acsgd.elastic.membership.plan import WorkerState
from lib.patience import stretched

SILENCE_S = stretched(0.4)
TIMING = Timing(heartbeat_s=0.02, silence_s=SILENCE_S, settle_s=0.01, leave_s=0.05, last_call_s=0.1, endpoints_s=0.1)
NO_FILES = SharedFiles()


COMPLETE = pytest.mark.filterwarnings(
    "error::RuntimeWarning",
    "error::pytest.PytestUnraisableExceptionWarning",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
)
"""Fails a test in which a thread or a coroutine ends with an exception, or a coroutine never runs."""


@contextlib.contextmanager
def complete_tasks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if a daemon leaves a task behind, or an exception in one, which asyncio reports when it is collected."""
    yield
    gc.collect()
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    assert not [record.getMessage() for record in records if record.name == "asyncio"]


class Worker:
    """A client that answers a daemon as a worker does, without training."""

    def __init__(
        self,
        path: Path,
        run_dir: Path,
        silence_s: float = SILENCE_S,
        force: bool = False,
        files: SharedFiles = NO_FILES,
        **parts: str,
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._messages = SimpleQueue[ToWorker]()
        self._state = WorkerState()
        setup = Setup((((0,),),), str(run_dir), 1, None, silence_s, 5.0, force, parts, files)
        self.send(Hello("0", 1, 2**30, setup, self._state))
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: FromWorker) -> None:
        self._socket.sendall(to_line(message))

    def next(self, timeout_s: float | None = None) -> Run | End:
        """Return the next message. timeout_s: after which queue.Empty is raised; None = waits until the test ends."""
        message = self._messages.get(timeout=timeout_s)
        assert not isinstance(message, Stop)
        return message

    def next_view(self, hosts: int | None = None) -> View:
        """Return the next view, or the next one with a number of hosts."""
        while True:
            message = self.next()
            assert isinstance(message, Run), message
            if hosts in (None, len(message.view.hosts)):
                return message.view

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        for line in self._socket.makefile("rb"):
            message = from_line(line, ToWorker)
            if isinstance(message, Stop):
                with contextlib.suppress(OSError):  # the daemon has ended meanwhile
                    self.send(Stopped(self._state))
                continue
            if isinstance(message, Run):
                self._state = WorkerState(5, (0,), progress={}, summary={})
            self._messages.put(message)


@contextlib.contextmanager
def host(
    addresses: list[str],
    number: int,
    tmp_path: Path,
    secret: str = "s",
    min_hosts: int = 1,
    max_hosts: int = 8,
    timing: Timing = TIMING,
) -> Iterator[Path]:
    """A daemon; yields the path of its socket."""
    path = tmp_path / f"socket-{number}-{time.monotonic_ns()}"
    options = DaemonOptions(
        "run", addresses[number], tuple(addresses[:2]), secret.encode(), min_hosts, max_hosts, timing
    )
    daemon = Daemon(options, path)
    daemon.start()
    try:
        yield path
    finally:
        daemon.stop()
