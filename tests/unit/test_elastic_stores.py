"""The store of a view: a worker finds out at once that its host has ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from lib.patience import NO_LIMIT_S

from acsgd.comm.waits import DIRECT, InterruptibleWaits
from acsgd.elastic import view_resources as stores
from acsgd.elastic.view_resources import connect_store, open_store
from acsgd.errors import RunError, WaitInterruptedError
from tests.lib.ports import free_port


@pytest.fixture
def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call that waits for its time limit hang."""
    monkeypatch.setattr(stores, "STORE_TIMEOUT_S", NO_LIMIT_S)


@pytest.mark.usefixtures("_no_limit")
def test_the_store_of_a_process_that_has_ended_is_not_waited_for() -> None:
    port = free_port()
    with pytest.raises(RunError, match=f"127.0.0.1:{port}") as caught:
        connect_store("127.0.0.1", port, DIRECT)
    assert caught.value.awaited == (0,), "the run continues in another view"


def test_a_store_that_listens_is_connected_unless_another_view_follows() -> None:
    store, waits = open_store(), InterruptibleWaits()
    client = connect_store("127.0.0.1", store.port, waits)
    store.set("key", "value")
    assert client.get("key") == b"value"
    waits.interrupt("another view follows")
    with pytest.raises(WaitInterruptedError):
        connect_store("127.0.0.1", store.port, waits)


def test_a_store_is_found_at_any_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store, closed = open_store(), free_port()
    both = [(socket.AF_INET, ("127.0.0.1", port)) for port in (closed, store.port)]
    monkeypatch.setattr(stores, "resolve", lambda host, port: both)
    assert connect_store("localhost", store.port, DIRECT).port == store.port


@pytest.mark.usefixtures("_no_limit")
def test_a_store_that_stops_answering_is_not_waited_for_once_another_view_follows() -> None:
    waits = InterruptibleWaits()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Timer(0.2, waits.interrupt, ["another view follows"]).start()
        with pytest.raises(WaitInterruptedError):
            connect_store("127.0.0.1", server.getsockname()[1], waits)


SILENT = """
import socket
from acsgd.comm.process_groups import VirtualHost
from acsgd.elastic.view_resources import open_store
with socket.socket(type=socket.SOCK_DGRAM) as name_server:
    name_server.bind(("127.0.0.9", 53))
    store = open_store(VirtualHost("127.88.0.1", set))
    print("asked" if name_server.recv(1) else "")
"""


@pytest.mark.soak
def test_a_store_opens_although_no_name_server_answers(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.9")
    own = f"ip link set lo up && mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
    if subprocess.run(["unshare", "--net", "--mount", "sh", "-c", own], capture_output=True).returncode:
        pytest.skip("no network namespaces, or /etc/resolv.conf cannot be replaced there")
    command = ["unshare", "--net", "--mount", "sh", "-c", f'{own} && exec "$0" -c "$1"', sys.executable, SILENT]
    assert "asked" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
