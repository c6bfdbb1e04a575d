"""Hosts that cannot take part in a run: one sentence on that host, and the run of the others continues."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty

import pytest
from lib.daemons import COMPLETE, Worker, complete_tasks, host
from lib.patience import wait_until

from acsgd.elastic.host import daemon, transport
from acsgd.elastic.membership.messages import PROTOCOL, End, Host, HostHeartbeat, seal
from tests.lib.ports import free_addresses

pytestmark = COMPLETE


@pytest.fixture(autouse=True)
def tasks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with complete_tasks(caplog):
        yield


@pytest.fixture
def addresses() -> list[str]:
    """Three free addresses of this host."""
    return free_addresses(3)


def refusal(worker: Worker) -> str:
    """Return why the daemon ends a worker."""
    message = worker.next()
    assert isinstance(message, End)
    assert message.error
    return message.error


def assert_undisturbed(worker: Worker) -> None:
    """Check that a worker trains on in the view that it is in."""
    with pytest.raises(Empty):
        worker.next(timeout_s=0.3)


def test_a_host_is_refused_by_what_differs_and_the_run_continues(addresses: list[str], tmp_path: Path) -> None:
    run = {"optim.lr": "1", "data.batch": "8", "model": "a", "data": "b", "versions": "c", "code": "d"}
    with host(addresses, 0, tmp_path) as first, host(addresses, 1, tmp_path) as second:
        a = Worker(first, tmp_path / "run", **run)
        a.next_view()
        for differing in (("optim.lr", "data.batch"), ("model",), ("data",), ("versions",), ("code",)):
            b = Worker(second, tmp_path / "run", **run | dict.fromkeys(differing, "x"))
            text = refusal(b)
            assert text.startswith(f"run run: this host differs from the others in {' and '.join(differing)}; "), text
            b.close()
        assert_undisturbed(a)
        b = Worker(second, tmp_path / "run", **run)
        assert len(b.next_view(2).hosts) == 2


def test_a_host_whose_run_directory_has_another_history_is_refused(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path) as first:
        Worker(first, tmp_path / "other").next_view()
    with host(addresses, 0, tmp_path) as first, host(addresses, 2, tmp_path) as second:
        a = Worker(first, tmp_path / "run")
        a.next_view()
        b = Worker(second, tmp_path / "other")
        assert "differs from the others in history; its log.dir is of another run" in refusal(b)
        assert_undisturbed(a)
        b.close()
        Worker(second, tmp_path / "empty")
        assert len(a.next_view().hosts) == 2


@pytest.mark.parametrize("number", [0, 2])
def test_a_host_with_another_secret_is_refused_by_a_run(number: int, addresses: list[str], tmp_path: Path) -> None:
    """Also if it has the first endpoint."""
    with host(addresses, 1, tmp_path) as first:
        a = Worker(first, tmp_path / "run")
        a.next_view()
        with host(addresses, number, tmp_path, secret="x") as second:
            text = refusal(Worker(second, tmp_path / "run"))
            assert text == f"run run: {addresses[1]} {transport.OTHER_RUN}"
            assert_undisturbed(a)


def test_of_two_hosts_with_different_secrets_the_one_with_the_first_endpoint_starts(
    addresses: list[str], tmp_path: Path
) -> None:
    with host(addresses, 0, tmp_path) as first, host(addresses, 1, tmp_path, secret="x") as second:
        a, b = Worker(first, tmp_path / "run"), Worker(second, tmp_path / "run")
        assert transport.OTHER_RUN in refusal(b)
        assert len(a.next_view().hosts) == 1


def test_a_host_of_another_protocol_is_refused(addresses: list[str], tmp_path: Path) -> None:
    greeting = f"acsgd {PROTOCOL + 1} member {'0' * 32}\n".encode()
    with _greeting(greeting) as port, host([f"127.0.0.1:{port}", *addresses], 3, tmp_path) as second:
        text = refusal(Worker(second, tmp_path / "run"))
        assert text == f"run run: 127.0.0.1:{port} {transport.OTHER_PROTOCOL}"


def wait_for_text(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """Wait until a text is printed; return all that was."""
    printed = ""

    def is_printed() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return text in printed

    wait_until(is_printed, describe=lambda: printed)
    return printed


def test_a_host_that_waits_prints_for_what_once(
    addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon, "WAIT_S", 0.1)
    with host(addresses, 2, tmp_path) as third:
        Worker(third, tmp_path / "run")
        endpoints = ",".join(addresses[:2])
        text = f"no other host answers; start one, or check --rdzv-endpoint ({endpoints})"
        printed = wait_for_text(capsys, text)
        time.sleep(0.5)  # it could be printed again
        _, waits = (printed + capsys.readouterr().err).splitlines()  # how far it has joined, and this
        assert waits == f"run run: this host waits: {text}"
        with host(addresses, 0, tmp_path, min_hosts=3) as first:
            Worker(first, tmp_path / "run")
            text = "run run: this host waits: 2 of at least 3 hosts (--nnodes) are here; start the others\n"
            lines = wait_for_text(capsys, text).splitlines()
            time.sleep(0.5)
            lines += capsys.readouterr().err.splitlines()
    assert len(set(lines)) == len(lines)


def test_a_host_waits_for_room_in_a_run(
    addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon, "WAIT_S", 0.3)
    with host(addresses, 0, tmp_path, max_hosts=1) as first:
        a = Worker(first, tmp_path / "run")
        a.next_view()
        with host(addresses, 1, tmp_path, max_hosts=1) as second:
            Worker(second, tmp_path / "run")
            wait_for_text(capsys, "this host waits: the run trains on 1 of at most 1 hosts (--nnodes)")
            assert_undisturbed(a)


def test_another_program_at_an_endpoint_is_named(
    addresses: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _greeting(b"SSH-2.0-OpenSSH_9.2\r\n") as port, host([addresses[0], f"127.0.0.1:{port}"], 0, tmp_path) as first:
        a = Worker(first, tmp_path / "run")
        assert len(a.next_view().hosts) == 1
    assert f"run run: 127.0.0.1:{port} {transport.OTHER_PROGRAM}" in capsys.readouterr().err.splitlines()


def test_a_run_directory_that_cannot_be_written_ends_this_host_alone(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path) as first, host(addresses, 1, tmp_path) as second:
        a = Worker(first, tmp_path / "run")
        a.next_view()
        (tmp_path / "file").write_text("")
        text = refusal(Worker(second, tmp_path / "file" / "run"))
        assert text.startswith(f"the views in {tmp_path / 'file' / 'run'} cannot be used: ")
        assert_undisturbed(a)


def test_garbage_on_the_port_changes_nothing(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path) as first, host(addresses, 1, tmp_path) as second:
        a = Worker(first, tmp_path / "run")
        a.next_view()
        port = int(addresses[0].rpartition(":")[2])
        for garbage in (b"\n", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 16, b"x" * (1 << 21)):
            _exchange(port, garbage)
        assert_undisturbed(a)
        b = Worker(second, tmp_path / "run")
        assert len(b.next_view(2).hosts) == 2


def test_a_message_that_was_recorded_is_refused_whatever_the_clock(addresses: list[str], tmp_path: Path) -> None:
    """A message counts on one connection, once: neither is a matter of time."""
    me = Host("x", addresses[2])
    with host(addresses, 0, tmp_path) as first:
        a = Worker(first, tmp_path / "run")
        a.next_view()
        port = int(addresses[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client, client.makefile("rb") as lines:
            name = lines.readline().split()[-1].decode()
            line = seal(b"s", "run", me, name, 1, HostHeartbeat(0))
            client.sendall(line)
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)  # it is valid, so the connection stays open
            client.settimeout(None)
            client.sendall(line)
            assert not client.recv(1)  # the same number again
        assert len(_exchange(port, line).splitlines()) == 1  # another connection: a greeting, and its end
        assert_undisturbed(a)


def _exchange(port: int, data: bytes) -> bytes:
    """Send data on a new connection; return everything that is received."""
    received = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        while part := client.recv(1 << 16):
            received += part
    return received


@contextlib.contextmanager
def _greeting(line: bytes) -> Iterator[int]:
    """A program that greets every client with a line; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    client.sendall(line)
                    client.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
