"""Daemons of several hosts in one process, with clients that speak as their workers do."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from acsgd.elastic.daemon import Daemon, DaemonOptions
from acsgd.elastic.effects import Timing
from acsgd.elastic.messages import (
    Broken,
    End,
    FromWorker,
    Hello,
    Leave,
    Run,
    Setup,
    Stop,
    Stopped,
    ToWorker,
    View,
    from_line,
    to_line,
)
from acsgd.elastic.plan import WorkerState

TIMING = Timing(heartbeat_s=0.02, silence_s=0.4, settle_s=0.01, last_call_s=0.1)
LIMIT_S = 20.0

pytestmark = pytest.mark.filterwarnings(
    "error::RuntimeWarning",
    "error::pytest.PytestUnraisableExceptionWarning",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
)


@pytest.fixture(autouse=True)
def complete_tasks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if a daemon leaves a task behind, or an exception in one: asyncio reports that when the task is collected."""
    yield
    gc.collect()
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    assert not [record.getMessage() for record in records if record.name == "asyncio"]


class Worker:
    """A client that answers a daemon as a worker does, without training."""

    def __init__(self, path: Path, run_dir: Path, options: str = "a", silence_s: float = 0.4) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._messages = SimpleQueue[ToWorker]()
        self._state = WorkerState()
        setup = Setup(1, str(run_dir), 1, None, silence_s, 5.0, {"options": options})
        self.send(Hello("0", 1, 2**30, setup, self._state))
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: FromWorker) -> None:
        self._socket.sendall(to_line(message))

    def next(self, timeout_s: float = LIMIT_S) -> Run | End:
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
                self._state = WorkerState(5, 0, progress={}, summary={})
            self._messages.put(message)


@pytest.fixture
def addresses() -> list[str]:
    """Three free addresses of this host."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]


@contextlib.contextmanager
def host(
    addresses: list[str],
    number: int,
    tmp_path: Path,
    secret: str = "s",
    min_hosts: int = 1,
    timing: Timing = TIMING,
) -> Iterator[Path]:
    """A daemon; yields the path of its socket."""
    path = tmp_path / f"socket-{number}-{time.monotonic_ns()}"
    options = DaemonOptions("run", addresses[number], tuple(addresses[:2]), secret.encode(), min_hosts, 8, timing)
    daemon = Daemon(options, path)
    daemon.start()
    try:
        yield path
    finally:
        daemon.stop()


def test_hosts_that_start_in_any_order_form_one_view(addresses: list[str], tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(host(addresses, number, tmp_path, min_hosts=3)) for number in (2, 0, 1)]
        runs = [Worker(path, tmp_path / "run") for path in paths]
        views = [worker.next_view() for worker in runs]
        assert views[0] == views[1] == views[2]
        assert len(views[0].hosts) == 3
        assert views[0].plan.from_disk
        assert views[0].plan.is_first


def test_a_host_that_joins_gets_its_state_from_another_and_nobody_else_moves(
    addresses: list[str], tmp_path: Path
) -> None:
    with host(addresses, 0, tmp_path) as first, host(addresses, 2, tmp_path) as second:
        a = Worker(first, tmp_path / "run")
        before = a.next_view()
        b = Worker(second, tmp_path / "run")
        after = b.next_view(2)
        assert a.next_view(2) == after
        plan = after.plan
        assert not plan.from_disk
        assert plan.step == 5
        assert [(copy.source, copy.target) for copy in plan.copies] == [(0, 1)]
        assert plan.ranks[0] == before.plan.ranks[0]


def test_the_end_of_a_host_forms_the_next_view_at_once(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 1, tmp_path, min_hosts=2) as second:
        with host(addresses, 0, tmp_path, min_hosts=2) as first:
            a, b = Worker(first, tmp_path / "run"), Worker(second, tmp_path / "run")
            a.next_view()
            b.next_view()
        assert b.next_view(1).plan.step == 5


def test_a_worker_that_ends_and_comes_back_joins_again(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path, min_hosts=2) as first, host(addresses, 1, tmp_path, min_hosts=2) as second:
        a, b = Worker(first, tmp_path / "run"), Worker(second, tmp_path / "run")
        a.next_view()
        b.next_view()
        b.close()
        alone = a.next_view()
        assert alone.reason == f"worker 0 of {addresses[1]} ended"
        assert len(alone.hosts) == 2  # the host is a member, without workers
        assert len(alone.plan.ranks) == 1
        b = Worker(second, tmp_path / "run")
        assert len(a.next_view().plan.ranks) == 2
        assert len(b.next_view().plan.ranks) == 2


def test_a_lost_worker_and_a_lost_host_do_not_wait_for_a_heartbeat(addresses: list[str], tmp_path: Path) -> None:
    slow = replace(TIMING, heartbeat_s=1.0)
    with host(addresses, 1, tmp_path, min_hosts=2, timing=slow) as second:
        with host(addresses, 0, tmp_path, min_hosts=2, timing=slow) as first:
            a, b = Worker(first, tmp_path / "run", silence_s=10.0), Worker(second, tmp_path / "run", silence_s=10.0)
            a.next_view()
            view = b.next_view()
            ended_at = time.monotonic()
            b.close()
            assert len(a.next_view().plan.ranks) == 1
            assert time.monotonic() - ended_at < slow.heartbeat_s / 2
            b = Worker(second, tmp_path / "run", silence_s=10.0)
            assert len(b.next_view().plan.ranks) == 2
            first_epoch = view.epoch
        b.send(Broken(first_epoch + 2, "rank 0 has ended"))
        broken_at = time.monotonic()
        assert b.next_view(1).plan.step == 5
        assert time.monotonic() - broken_at < slow.heartbeat_s / 2


def test_a_host_that_leaves_ends_its_workers_and_the_last_host_stays(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path, min_hosts=2) as first, host(addresses, 1, tmp_path, min_hosts=2) as second:
        a, b = Worker(first, tmp_path / "run"), Worker(second, tmp_path / "run")
        a.next_view()
        b.next_view()
        a.send(Leave())
        assert b.next_view(1).plan.step == 5
        assert a.next() == End(None)


def test_a_host_with_other_options_is_refused_by_name_and_the_run_continues(
    addresses: list[str], tmp_path: Path
) -> None:
    with host(addresses, 0, tmp_path) as first, host(addresses, 1, tmp_path) as second:
        a = Worker(first, tmp_path / "run")
        a.next_view()
        b = Worker(second, tmp_path / "run", options="b")
        message = b.next()
        assert isinstance(message, End)
        assert "differs from the others in options" in (message.error or "")


def test_messages_under_another_secret_have_no_effect(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path) as first, host(addresses, 2, tmp_path, secret="x") as second:
        a, b = Worker(first, tmp_path / "run"), Worker(second, tmp_path / "run")
        a.next_view()
        for worker in (a, b):
            with pytest.raises(Empty):
                worker.next(timeout_s=0.5)


def test_garbage_on_the_port_changes_nothing(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path) as first, host(addresses, 1, tmp_path) as second:
        a = Worker(first, tmp_path / "run")
        a.next_view()
        address, _, port = addresses[0].rpartition(":")
        for garbage in (b"\n", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 16, b"x" * (1 << 21)):
            with contextlib.suppress(OSError), socket.create_connection((address, int(port))) as client:
                client.sendall(garbage)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
        b = Worker(second, tmp_path / "run")
        assert len(b.next_view(2).hosts) == 2
