"""torchrun's side of a host: its address, its network interface, and its daemon."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from lib.daemons import Worker
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters

from acsgd.comm import addresses
from acsgd.comm.addresses import default_is_loopback, find_address, find_interface, parse_endpoints, split_address
from acsgd.elastic.host import rendezvous
from acsgd.failures.report import record_error
from acsgd.launch import Launch, forbid_restart
from acsgd.mesh.mesh import publish
from tests.lib.ports import free_addresses, free_port


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What the daemon gives to workers is removed after the test."""
    for name in ("ACSGD_DAEMON", "GLOO_SOCKET_IFNAME", "ACSGD_MESH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return monkeypatch


def handler(endpoint: str, **conf: str) -> rendezvous.AcsgdRendezvous:
    return rendezvous.AcsgdRendezvous(RendezvousParameters("acsgd", endpoint, "run", 1, 4, **conf))


def test_endpoints() -> None:
    assert parse_endpoints("a, b:1,a") == ("a:29400", "b:1")
    assert parse_endpoints("fd00::1,[FD00:0::1],[fd00::2]:1") == ("[fd00::1]:29400", "[fd00::2]:1")
    assert parse_endpoints("fe80::1%eth0, [fe80::1%eth1]:1") == ("[fe80::1%eth0]:29400", "[fe80::1%eth1]:1")
    for wrong in ("", "a,,b", "a:0", "a:65536", "a:x", ":1", "[a", "[]:1", "fd00::1::1:1"):
        with pytest.raises(ValueError, match="is not host:port"):
            parse_endpoints(wrong)


def test_the_interface_is_that_of_the_hosts_address() -> None:
    assert find_interface("127.0.0.1", ["127.0.0.1:1"]) == "lo"
    assert find_interface("localhost", ["192.0.2.1:1"]) == "lo"


@pytest.mark.parametrize("own", ["127.0.1.1", "::1", "198.51.100.9", None])
@pytest.mark.parametrize(("route", "anywhere"), [("10.0.0.7", "10.9.9.9"), ("fd00::7", "10.9.9.9")])
def test_a_name_that_resolves_to_a_loopback_address_or_to_none_of_the_host_is_not_taken(
    own: str | None, route: str, anywhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the own name of a host on Debian, 127.0.1.1, or in a cloud, where a router has the address.

    The store may be on this host, under its name.
    """
    interfaces = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.9.9.9"], "eth1": ["10.0.0.7", "fd00::7"]}
    found = {name: [SimpleNamespace(address=each) for each in listed] for name, listed in interfaces.items()}
    routes = {
        "hostA:1": [own] if own in ("127.0.1.1", "::1") else [],
        "hostB:1": [route],
        addresses.ANYWHERE[0]: [anywhere],
    }
    monkeypatch.setattr(addresses, "resolve", lambda host, port: [(socket.AF_INET, (own, port))] if own else [])
    monkeypatch.setattr(addresses, "_addresses_towards", lambda endpoint: iter(routes.get(endpoint, [])))
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: found)
    assert default_is_loopback()
    assert find_interface("hostA", ["hostB:1"]) == "eth1"
    assert find_interface("hostA", ["hostA:1"]) == "eth0"


def test_of_several_addresses_of_a_name_that_of_this_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, ("198.51.100.9", 0)), (socket.AF_INET, ("10.0.0.7", 0))]
    monkeypatch.setattr(addresses, "resolve", lambda host, port: found)
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: {"eth1": [SimpleNamespace(address="10.0.0.7")]})
    assert find_interface("hostA", []) == "eth1"
    assert not default_is_loopback()


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".b"])
def test_what_can_be_no_name_of_a_host_is_a_host_without_addresses(host: str) -> None:
    with pytest.raises(OSError, match="no name of a host"):
        addresses.resolve(host, 1)


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


def test_a_host_of_ipv6_is_its_endpoint_and_its_daemon_answers(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    port = free_port("::1")
    endpoints = parse_endpoints(f"[::1]:{port}")
    assert find_address(endpoints, None) == f"[::1]:{port}"
    host = handler(endpoints[0])
    try:
        host.next_rendezvous()
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        with socket.create_connection(("::1", port)) as connection:
            assert connection.recv(6) == b"acsgd "
        assert find_address(endpoints, None).startswith("[::1]:"), "that of a second host on this machine"
        Worker(Path(os.environ["ACSGD_DAEMON"]), tmp_path / "run").close()
    finally:
        host.shutdown()


def test_a_host_removes_the_directories_of_hosts_that_were_killed(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not that of a host that runs, nor a young one, whose host may be about to lock it."""
    environment.setattr(rendezvous.tempfile, "tempdir", str(tmp_path))
    names = ["acsgd-host-killed", "acsgd-host-running", "acsgd-host-young", "acsgd-other"]
    killed, running, young, other = (tmp_path / name for name in names)
    for path in (killed, running, young, other):
        path.mkdir()
        (path / "0").touch()
    for path in (killed, running, other):
        os.utime(path, (0, 0))
    descriptor = os.open(running, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    host = handler(free_addresses(1)[0])
    try:
        host.next_rendezvous()
        (own,) = set(tmp_path.glob("acsgd-host-*")) - {killed, running, young}
        assert not killed.exists()
        assert all((path / "0").exists() for path in (running, young, other))
        os.utime(own, (0, 0))
        with pytest.raises(BlockingIOError):
            rendezvous._lock_directory(own)
    finally:
        host.shutdown()
        os.close(descriptor)


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


def test_torchrun_ends_with_the_error_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first error of all, after the exit codes of workers that torchrun has not ended itself."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    rendezvous.rendezvous_handler()
    record_error("another rank has failed", Launch(error_file=str(tmp_path / "0")), is_cause=False)
    record_error("no such file", Launch(error_file=str(tmp_path / "2")))
    codes = {0: 2, 1: -signal.SIGTERM, 2: 2, 3: -signal.SIGKILL}
    failures = {rank: ProcessFailure(rank, 100 + rank, code, str(tmp_path / str(rank))) for rank, code in codes.items()}
    show(ChildFailedError("acsgd", failures))
    assert (
        capsys.readouterr().err == "\ntorchrun: exit code 2 of rank 0, 2; -9 of rank 3\nrank 2: error: no such file\n"
    )


@pytest.mark.parametrize("content", [None, "a text", {"message": "a text", "extraInfo": {"timestamp": "7"}}])
def test_torchrun_reports_other_programs_as_without_this_package(
    content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    rendezvous.rendezvous_handler()
    if content:
        (tmp_path / "0").write_text(json.dumps({"message": content}))
    show(ChildFailedError("other", {0: ProcessFailure(0, 100, 1, str(tmp_path / "0"))}))
    assert "Root Cause (first observed failure)" in capsys.readouterr().err
    show(ValueError("wrong"))
    assert capsys.readouterr().err.endswith("ValueError: wrong\n")


def test_torchrun_of_an_elastic_run_ends_after_a_signal_with_one_sentence(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host, stop = handler(free_addresses(1)[0]), SignalException("", signal.SIGTERM)
    show(stop)
    assert capsys.readouterr().err.endswith("SignalException\n")  # as of other programs
    try:
        host.next_rendezvous()
        capsys.readouterr()
        with pytest.raises(SystemExit, match="143"):
            show(stop)
        assert "acsgd daemon" not in {thread.name for thread in threading.enumerate()}, "what it starts then would fail"
    finally:
        host.shutdown()
    assert capsys.readouterr().err == "\ntorchrun: SIGTERM: this host has left run run\n"


def show(error: Exception) -> None:
    """Report an error as Python does that ends with it."""
    sys.excepthook(type(error), error, None)


def test_in_a_mesh_workers_get_the_virtual_address_and_gloo_no_interface_of_a_network(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("ACSGD_SECRET", "a secret of these hosts alone")
    environment.setenv("GLOO_SOCKET_IFNAME", "eth7")
    endpoint = free_addresses(1)[0]
    host = handler(endpoint, mesh="true")
    try:
        host.next_rendezvous()
        address, socket_path = os.environ["ACSGD_MESH"].split()
        assert address.startswith("127.88.")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        publish(Path(socket_path))
        Worker(Path(os.environ["ACSGD_DAEMON"]), tmp_path / "run").close()
        with socket.create_connection(split_address(endpoint)) as connection:
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)  # where a daemon would greet
    finally:
        host.shutdown()


@pytest.mark.parametrize(
    ("endpoints", "conf", "lines"),
    [("127.0.0.1:{port},10.0.0.9:1", {}, 1), ("127.0.0.1:{port},10.0.0.9:1", {"mesh": "false"}, 0), ("{here}", {}, 0)],
    ids=["private", "chosen", "one machine"],
)
def test_on_a_private_network_there_is_no_mesh_and_one_line_says_so(
    endpoints: str,
    conf: dict[str, str],
    lines: int,
    environment: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    here = free_addresses(1)[0]
    host = handler(endpoints.format(here=here, port=split_address(here)[1]), **conf)
    try:
        host.next_rendezvous()
    finally:
        host.shutdown()
    assert "ACSGD_MESH" not in os.environ
    assert "".join(capfd.readouterr()).count("is not encrypted, since their addresses are private") == lines


def test_a_public_address_has_a_mesh_unless_it_is_refused(environment: pytest.MonkeyPatch) -> None:
    for mesh, wanted in ((None, True), ("false", False), ("true", True)):
        conf = {} if mesh is None else {"mesh": mesh}
        parameters = RendezvousParameters("acsgd", "8.8.8.8:1", "run", 1, 4, **conf)
        assert rendezvous._wants_mesh(parameters, ("8.8.8.8:1",)) == wanted


@pytest.mark.parametrize("is_announced", [False, True])
def test_the_entrance_of_a_mesh_is_open_on_all_interfaces(is_announced: bool, environment: pytest.MonkeyPatch) -> None:
    """As that of a daemon: the endpoint's name may resolve to 127.0.1.1 on the host itself."""
    environment.setenv("ACSGD_SECRET", "a secret of these hosts alone")
    port = split_address(free_addresses(1)[0])[1]
    place = {"announce": "192.0.2.1:9", "listen": f"[::]:{port}"} if is_announced else {}
    host = handler(f"127.0.1.1:{port}", mesh="true", **place)
    try:
        host.next_rendezvous()
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        host.shutdown()


@pytest.mark.parametrize(
    ("conf", "secret", "message"),
    [
        ({"mesh": "true"}, None, "a run with a mesh needs a secret"),
        ({"mesh": "true"}, "short", "has 5 bytes, and needs 16"),
        ({"announce": "hostA:1"}, None, "announce=hostA:1 is of a mesh, which is off"),
        ({"mesh": "true", "listen": "TAKEN"}, "a secret of these hosts alone", "cannot listen there"),
        ({"mesh": "true", "secret": "/no/file"}, None, "/no/file"),
        ({"mesh": "true"}, "", "ACSGD_SECRET is empty"),
        ({}, "", "ACSGD_SECRET is empty"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_sentence(
    conf: dict[str, str],
    secret: str | None,
    message: str,
    environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if secret is not None:
        environment.setenv("ACSGD_SECRET", secret)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        given = {key: taken if value == "TAKEN" else value for key, value in conf.items()}
        with pytest.raises(SystemExit, match="2"):
            handler(free_addresses(1)[0], **given).next_rendezvous()
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert message in error
