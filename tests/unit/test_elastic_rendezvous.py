"""torchrun's side of a host: its address, its network interface, and its daemon."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from lib.daemons import Worker, free_addresses
from torch.distributed.elastic.rendezvous import RendezvousParameters

from acsgd.elastic.host import addresses, rendezvous
from acsgd.elastic.host.addresses import find_address, find_interface, parse_endpoints
from acsgd.launch import forbid_restart


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What the daemon gives to workers is removed after the test."""
    for name in ("ACSGD_DAEMON", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def handler(endpoint: str) -> rendezvous.AcsgdRendezvous:
    return rendezvous.AcsgdRendezvous(RendezvousParameters("acsgd", endpoint, "run", 1, 4))


def test_endpoints() -> None:
    assert parse_endpoints("a, b:1,a") == ("a:29400", "b:1")
    for wrong in ("", "a,,b", "a:0", "a:65536", "a:x", ":1"):
        with pytest.raises(ValueError, match="is not host:port"):
            parse_endpoints(wrong)


def test_the_interface_is_that_of_the_hosts_address() -> None:
    assert find_interface("127.0.0.1:1", ("127.0.0.1:1",)) == "lo"
    assert find_interface("localhost:1", ("localhost:1", "192.0.2.1:1")) == "lo"
    assert find_interface("no-host.invalid:1", ("no-host.invalid:1",)) is None


def test_a_name_that_resolves_to_a_loopback_address_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the own name of a host on Debian, 127.0.1.1."""
    routes = {"hostB:1": "10.0.0.7", addresses.ANYWHERE: "10.9.9.9"}
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.1.1")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    monkeypatch.setattr(addresses, "_address_of", {"lo": "127.0.0.1", "eth0": "10.9.9.9", "eth1": "10.0.0.7"}.get)
    monkeypatch.setattr(addresses, "address_towards", lambda endpoints: routes[endpoints[0]])
    assert find_interface("hostA:1", ("hostA:1", "hostB:1")) == "eth1"
    assert find_interface("hostA:1", ("hostA:1",)) == "eth0"


def test_workers_get_the_interface_unless_the_user_has_set_one(environment: pytest.MonkeyPatch) -> None:
    for given, expected in ((None, "lo"), ("eth7", "eth7")):
        if given:
            environment.setenv("GLOO_SOCKET_IFNAME", given)
        host = handler(free_addresses(1)[0])
        try:
            host.next_rendezvous()
            assert os.environ["GLOO_SOCKET_IFNAME"] == expected
        finally:
            host.shutdown()
            environment.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_a_port_that_is_taken_meanwhile_is_left_to_the_other(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between the look at a port and its use, another torchrun of this machine may take it."""
    endpoint = free_addresses(1)[0]
    with contextlib.ExitStack() as stack:
        tried = []

        def find_then_lose(endpoints: tuple[str, ...], local_address: str | None) -> str:
            address = find_address(endpoints, local_address)
            if not tried:
                host, _, port = address.rpartition(":")
                stack.enter_context(socket.create_server((host, int(port))))
            tried.append(address)
            return address

        environment.setattr(rendezvous, "find_address", find_then_lose)
        host = handler(endpoint)
        try:
            host.next_rendezvous()
            assert tried[0] == endpoint
            assert len(tried) == 2
            assert tried[1] != endpoint
            assert tried[1].startswith("127.0.0.1:")
            Worker(Path(os.environ["ACSGD_DAEMON"]), tmp_path / "run").close()  # the daemon answers
        finally:
            host.shutdown()


def test_no_endpoint_that_can_be_reached_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        handler("no-host.invalid:1").next_rendezvous()
    assert capsys.readouterr().err.startswith(
        "\nerror: no endpoint of --rdzv-endpoint can be reached (no-host.invalid:1"
    )


def test_torchrun_ends_instead_of_starting_workers_again_that_would_fail_again(environment: pytest.MonkeyPatch) -> None:
    host = handler(free_addresses(1)[0])
    try:
        host.next_rendezvous()
        host.next_rendezvous()  # workers that crashed are started again
        forbid_restart()
        with pytest.raises(SystemExit, match="2"):
            host.next_rendezvous()
    finally:
        host.shutdown()
