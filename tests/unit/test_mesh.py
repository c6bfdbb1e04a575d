"""Laws of the mesh: members reach each other's ports through one TCP port each, and nobody else does."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import itertools
import json
import os
import random
import re
import resource
import secrets
import shutil
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from lib.patience import stretched, wait_until

from acsgd.comm.addresses import is_public
from acsgd.comm.process_groups import VirtualHost
from acsgd.commands.doctor.host import mesh_rule
from acsgd.errors import ConnectError
from acsgd.mesh import carrier, forwarder, identity, mesh, mirrors, peers, ports, rotation, tls, transport
from acsgd.mesh.carrier import Carrier
from acsgd.mesh.identity import HostIdentity, StrangerError, VerifiedHost, member_of, read_secret
from acsgd.mesh.mesh import Mesh, MeshOptions, publish, run_in_loop
from acsgd.mesh.messages import Rotate, Rotated
from acsgd.mesh.streams import CarriedEnd

SECRET = secrets.token_hex(16).encode()
WAIT_S = stretched(20.0)
LIMITS = [
    *((forwarder, limit) for limit in ("SILENCE_S", "CONNECT_S")),
    (mirrors, "OPENED_S"),
    (peers, "HEARD_S"),
    (carrier, "OPEN_S"),
    *((mesh, limit) for limit in ("PUBLISH_S", "END_S")),
]
"""Limits after which a host of a busy machine would be taken for one that is cut off, or a port for one that is closed.
"""
HELD = min(3000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 1000)
"""Number of connections of strangers that are open at once."""


class Host:
    """A host of a mesh on this machine."""

    def __init__(
        self,
        directory: Path,
        endpoints: tuple[str, ...] = (),
        *,
        secret: bytes = SECRET,
        run: str = "run",
        has_port: bool = True,
        announced: str | None = None,
        secret_file: Path | None = None,
        has_file: bool = True,
    ) -> None:
        self.rejected: list[tuple[str, str]] = []
        self.notes: list[str] = []
        listener = socket.create_server(("127.0.0.1", 0)) if has_port else None
        self.port = listener.getsockname()[1] if listener else 0
        self.announced = announced or (f"127.0.0.1:{self.port}" if listener else None)
        if (file := secret_file) is None:
            file = directory / secrets.token_hex(4)
            file.touch(0o600)
            file.write_bytes(secret)
        self.secret_file = file
        options = MeshOptions(
            run, secret, file if has_file else None, endpoints or (self.announced or "",), listener, self.announced
        )
        self.socket_path = directory / secrets.token_hex(4)
        self.mesh = Mesh(
            options,
            self.socket_path,
            on_rejected=lambda address, problem: self.rejected.append((address, problem)),
            on_note=self.notes.append,
        )
        self.mesh.start()

    @property
    def address(self) -> str:
        return self.mesh.address

    def listen(self) -> socket.socket:
        server = socket.create_server((self.address, 0))
        publish(self.socket_path)
        return server

    def knows(self, other: Host) -> bool:
        return any(note.startswith(f"mesh: {other.address} is ") for note in self.notes)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    """All hosts are on this machine, where each port of a virtual address is taken by its own process. So other hosts
    open it at another address: 127.89.x.y leads through the mesh, 127.88.x.y does not."""
    open_mirror = mirrors.open_mirror
    monkeypatch.setattr(mirrors, "open_mirror", lambda address, port: open_mirror(mirror(address), port))
    for module, limit in LIMITS:
        monkeypatch.setattr(module, limit, WAIT_S / 2)  # a test may wait for the end of one of them
    with contextlib.ExitStack() as stack:

        def start_host(*args: object, **kwargs: object) -> Host:
            host = Host(tmp_path, *args, **kwargs)  # type: ignore[arg-type]
            stack.callback(host.mesh.stop)
            return host

        yield start_host


def mirror(address: str) -> str:
    return address.replace("127.88.", "127.89.")


def connect(server: socket.socket) -> socket.socket:
    """Connect through the mesh to a port of a host."""
    address, port = server.getsockname()
    return socket.create_connection((mirror(address), port), WAIT_S)


def two(start: Callable[..., Host], **kwargs: object) -> tuple[Host, Host]:
    """Start two hosts, and wait until they know each other."""
    one = start()
    other = start((one.announced,), **kwargs)
    wait_until(lambda: one.knows(other) and other.knows(one))
    return one, other


def echo(server: socket.socket) -> None:
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(ConnectionError):
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()


def exchange(server: socket.socket, data: bytes) -> bytes:
    """Send data to an echo at a port, and return what comes back."""
    with connect(server) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,), daemon=True)
        sender.start()
        received = bytearray()
        while len(received) < len(data):
            received += (part := connection.recv(1 << 16))
            assert part, "the connection has ended"
        return bytes(received)


def test_bytes_arrive_in_both_directions_and_ends_are_carried(start: Callable[..., Host]) -> None:
    for each in two(start):
        with each.listen() as server:
            echo(server)
            data = os.urandom(3_000_000)
            assert exchange(server, data) == data
            assert exchange(server, b"x") == b"x"


def test_no_packet_of_a_carried_connection_waits_until_another_one_is_acknowledged(start: Callable[..., Host]) -> None:
    """As the last one of a message does by default, for a round trip and longer."""
    hosts = two(start)
    with hosts[0].listen() as server, connect(server) as connection, server.accept()[0] as accepted:
        accepted.sendall(b"x")
        assert connection.recv(1) == b"x"
        sockets = [
            carried.get_extra_info("socket")
            for host in hosts
            for end in host.mesh.forwarder._carrier._carried
            for carried in end.transports
        ]
        assert len(sockets) == 4
        assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)


def test_a_connection_is_opened_again_if_the_link_fails_and_not_if_the_host_has_ended(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two(start)
    dial, failures = carrier.dial, list[OSError]()

    async def fail(*args: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return await dial(*args)

    monkeypatch.setattr(carrier, "dial", fail)
    monkeypatch.setattr(carrier, "RETRY_S", 0.01)
    with one.listen() as server:
        echo(server)
        failures += [ConnectionResetError("reset"), TimeoutError("cut"), OSError(errno.EHOSTUNREACH, "no route")]
        assert exchange(server, b"x") == b"x"
        failures += [ConnectionRefusedError("refused")]
        with pytest.raises(ConnectionResetError), connect(server) as connection:
            connection.recv(1)
        assert not failures
        monkeypatch.setattr(carrier, "OPEN_S", 0.0)
        failures += [ConnectionResetError("reset")]
        with pytest.raises(ConnectionResetError), connect(server) as connection:
            connection.recv(1)
    assert other.knows(one)


def test_a_host_without_a_port_is_reached_through_the_connections_that_it_opens(start: Callable[..., Host]) -> None:
    one, other = two(start, has_port=False)
    for each in (one, other):
        with each.listen() as server:
            echo(server)
            assert exchange(server, b"y" * 100_000) == b"y" * 100_000


def test_two_hosts_without_a_port_reach_each_other_through_any_member_which_sees_ciphertext(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, relays = defaultdict[object, bytearray](bytearray), list[threading.Thread]()
    receive, open_mirror = CarriedEnd.data_received, mirrors.open_mirror

    def note(end: CarriedEnd, data: bytes | memoryview) -> None:
        seen[threading.current_thread()] += data
        receive(end, data)

    def open_unless_relay(address: str, port: int) -> socket.socket | None:
        return None if threading.current_thread() in relays else open_mirror(address, port)

    def start_relay(*args: object) -> tuple[Host, bytearray]:
        host = start(*args)
        relays.append(host.mesh._thread)
        return host, seen[host.mesh._thread]

    monkeypatch.setattr(CarriedEnd, "data_received", note)
    monkeypatch.setattr(mirrors, "open_mirror", open_unless_relay)
    first, seen_by_first = start_relay()
    one, other = (start((first.announced,), has_port=False) for _ in range(2))
    wait_until(lambda: one.knows(other) and other.knows(one))
    assert [note for note in one.notes if note.endswith("(through another host)")]
    data = secrets.token_bytes(32) + bytes(100_000)
    for each in (one, other):
        with each.listen() as server:
            echo(server)
            assert exchange(server, data) == data
    assert len(seen_by_first) > 4 * len(data)
    assert data[:32] not in seen_by_first

    second, seen_by_second = start_relay((first.announced,))
    wait_until(lambda: all(second.knows(each) and each.knows(second) for each in (one, other)))
    with one.listen() as server:
        echo(server)
        with connect(server) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
            first.mesh.stop()
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
        assert exchange(server, data) == data
    assert len(seen_by_second) > 2 * len(data)
    assert data[:32] not in seen_by_second


def test_a_socket_of_ipv6_reaches_a_port_too(start: Callable[..., Host]) -> None:
    """As that of torch's store."""
    _, other = two(start)
    with other.listen() as server, socket.socket(socket.AF_INET6) as connection:
        echo(server)
        connection.settimeout(WAIT_S)
        try:
            connection.connect((f"::ffff:{mirror(other.address)}", server.getsockname()[1]))
        except OSError as error:
            pytest.skip(f"no IPv6: {error}")
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"


def test_a_host_whose_name_leads_to_another_address_is_found_there(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    places, look_up = {"home.example": "127.0.0.9"}, socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **how: look_up(places.get(host, host), *rest, **how))
    monkeypatch.setitem(sys.modules, "uvloop", None)  # which looks up names without this function
    monkeypatch.setattr(forwarder, "REDIAL_S", 0.05)
    one = start()
    other = start((f"home.example:{one.port}",))
    time.sleep(0.2)
    assert not other.knows(one), "another address is there"
    places["home.example"] = "127.0.0.1"
    wait_until(lambda: other.knows(one) and one.knows(other))


def test_hosts_find_each_other_through_any_member(start: Callable[..., Host]) -> None:
    one, other = two(start)
    third = start((other.announced,))
    wait_until(lambda: third.knows(one) and one.knows(third))


def test_a_host_without_a_port_finds_those_that_join_later(start: Callable[..., Host]) -> None:
    one, other = two(start, has_port=False)
    third = start((one.announced,))
    wait_until(lambda: third.knows(other) and other.knows(third))


def test_hosts_whose_connection_has_failed_are_told_of_each_other_again(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "ACQUAINT_S", peers.PING_S)
    monkeypatch.setattr(forwarder.Forwarder, "_find_again", nothing)
    one, other = two(start)
    third = start((one.announced,))
    wait_until(lambda: third.knows(other) and other.knows(third))
    peer = other.mesh.forwarder._peers[third.address]
    lines = peer.lines
    assert lines is not None
    other.mesh._loop.call_soon_threadsafe(lines.transport.abort)
    wait_until(lambda: peer.lines not in (None, lines))


async def nothing(*_: object) -> None:
    pass


def test_a_host_without_a_connection_is_forgotten_in_time(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two(start)
    with other.listen() as server:
        kept = server.getsockname()
        monkeypatch.setattr(forwarder, "FORGET_S", 0.0)
        monkeypatch.setattr(forwarder, "REFUSALS", 1_000_000)
        other.mesh.stop()
        wait_until(lambda: other.address not in one.mesh.forwarder._peers)
        assert is_refused(kept)
        assert not one.mesh.has_ended(f"{kept[0]}:{kept[1]}"), "it may be cut off"


def test_the_daemons_at_endpoints_are_in_the_order_of_the_endpoints(start: Callable[..., Host]) -> None:
    last, first = start(), start()
    middle = start((first.announced, "127.0.0.1:1", last.announced))
    wait_until(lambda: len(middle.mesh.daemons) == 2)
    assert middle.mesh.daemons == [f"{each.address}:{each.mesh.daemon_port}" for each in (first, last)]
    assert first.mesh.precedes("127.0.0.1:1")
    assert not middle.mesh.precedes("127.0.0.1:1")


def is_refused(address: tuple[str, int]) -> bool:
    try:
        with contextlib.suppress(ConnectionResetError):  # it is accepted, but not carried any more
            socket.create_connection((mirror(address[0]), address[1]), WAIT_S).close()
    except ConnectionRefusedError:
        return True
    return False


def test_ports_are_closed_once_a_process_or_a_host_has_ended(start: Callable[..., Host]) -> None:
    """A closed port shows the programs of another host that a process has ended."""
    one, other = two(start)
    first, second = other.listen(), other.listen()
    ended, kept = first.getsockname(), second.getsockname()
    first.close()
    publish(other.socket_path)
    assert is_refused(ended)
    assert one.mesh.has_ended(f"{ended[0]}:{ended[1]}")
    assert not one.mesh.has_ended(f"{kept[0]}:{kept[1]}")
    with second, connect(second) as connection:
        assert not is_refused(kept)
        other.mesh.stop()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        wait_until(lambda: is_refused(kept))
        assert one.mesh.has_ended(f"{kept[0]}:{kept[1]}")


@pytest.mark.parametrize("sent", [None, b"", b"messages\n"], ids=["no handshake", "no line", "no greeting"])
def test_a_host_that_stops_ends_a_connection_that_says_no_more(sent: bytes | None, start: Callable[..., Host]) -> None:
    """Else its other end would wait for as long as the process of the host lives."""
    host = start()
    with raw(host) as plain:
        plain.settimeout(WAIT_S)
        stream = plain if sent is None else tls_of(SECRET).wrap_socket(plain)
        if sent:
            stream.sendall(sent)
            assert stream.recv(1 << 16), "its greeting"
        else:
            wait_until(lambda: host.mesh.forwarder.entrance._handshakes)
        host.mesh.stop()
        with contextlib.suppress(ConnectionResetError):
            assert stream.recv(1) == b""


def test_a_host_that_stops_resets_what_it_has_not_carried_yet(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two(start)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(one.mesh.forwarder._carrier, "_open", never)
    with other.listen() as server, connect(server) as connection:
        wait_until(lambda: any("_carry" in repr(task) for task in list(one.mesh.forwarder._tasks)))
        one.mesh.stop()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_a_port_that_another_program_has_taken_on_another_host_is_reported_until_it_ends(
    start: Callable[..., Host],
) -> None:
    """Else connections to it would reach that program."""
    one, other = two(start)
    with socket.create_server(("0.0.0.0", 0), reuse_port=True) as program:
        port = program.getsockname()[1]
        server = socket.create_server((other.address, port), reuse_port=True)
        assert publish(other.socket_path) == {port}
    with server:
        wait_until(lambda: publish(other.socket_path) == set())
        echo(server)
        assert exchange(server, b"x") == b"x"
    assert [note for note in one.notes if f"port {port} of {other.address} cannot be opened" in note]


def test_a_host_the_port_of_whose_daemon_is_taken_elsewhere_is_told_so(start: Callable[..., Host]) -> None:
    one, other = two(start)
    port = other.mesh.daemon_port
    with contextlib.ExitStack() as stack:
        for host in ("0.0.0.0", other.address):
            stack.enter_context(socket.create_server((host, port), reuse_port=True))
        assert publish(other.socket_path) == {port}
        wait_until(lambda: bool(one.rejected and other.rejected))
    for each in one, other:
        ((address, problem),) = set(each.rejected)
        assert address == f"{other.address}:{port}"
        assert "another program listens" in problem


def test_a_new_port_is_chosen_in_place_of_one_that_is_taken() -> None:
    answers = iter([set(), {7}, {7, 8}, {8}])
    host, created = VirtualHost("127.88.0.1", lambda: next(answers)), iter(range(6, 10))
    assert [host.open(lambda: next(created)) for _ in range(2)] == [6, 9]
    with pytest.raises(ConnectError, match=r"port 7 of 127.88.0.1 is taken"):
        VirtualHost("127.88.0.1", lambda: {7}).publish()


# Others.


def raw(host: Host) -> socket.socket:
    return socket.create_connection(("127.0.0.1", host.port), WAIT_S)


def tls_of(secret: bytes | None, **options: object) -> ssl.SSLContext:
    """Return the context of a client with the certificate of a run with another secret, or without any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if secret is None else HostIdentity(secret, "run").client
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for name, value in options.items():
        setattr(context, name, value)
    return context


def knock(host: Host, data: bytes, context: ssl.SSLContext | None) -> bytes:
    """Send bytes, and return what comes back before the connection ends; with a context: inside of TLS."""
    with contextlib.suppress(OSError), raw(host) as connection:
        stream = connection if context is None else context.wrap_socket(connection)
        stream.sendall(data)
        return stream.recv(1 << 16)
    return b""


CLIENT_HELLO = b"\x16\x03\x01"
STRANGERS: dict[str, Callable[[], tuple[bytes, ssl.SSLContext | None]]] = {
    "bytes that are no TLS": lambda: (b"GET / HTTP/1.0\r\n\r\n", None),
    "a record without an end": lambda: (CLIENT_HELLO + b"\xff\xff" + bytes(200_000), None),
    "a handshake without an end": lambda: ((CLIENT_HELLO + b"\x40\x00\x01\xff\xff\xff" + bytes(16380)) * 20, None),
    "no certificate": lambda: (b"messages\n", tls_of(None)),
    "another secret": lambda: (b"messages\n", tls_of(secrets.token_bytes(16))),
    "an older version of TLS": lambda: (b"messages\n", tls_of(SECRET, maximum_version=ssl.TLSVersion.TLSv1_2)),
    "a line without an end": lambda: (b"x" * 200_000, tls_of(SECRET)),
    "a purpose that is unknown": lambda: (b"purpose\n", tls_of(SECRET)),
    "a port that is none of the run": lambda: (b"port 22\n", tls_of(SECRET)),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_no_byte_and_members_notice_nothing(stranger: str, start: Callable[..., Host]) -> None:
    one, other = two(start)
    with one.listen() as server:
        echo(server)
        assert exchange(server, b"before") == b"before"
        data, context = STRANGERS[stranger]()
        answer = knock(one, data, context)
        assert context is not None or answer[:1] in (b"", b"\x15"), "more than an alert of TLS"
        assert context is None or not answer
        assert exchange(server, b"after") == b"after"
    assert not one.rejected + other.rejected


def test_what_was_recorded_on_another_connection_is_of_no_use(start: Callable[..., Host]) -> None:
    one = start()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = HostIdentity(SECRET, "run").client.wrap_bio(incoming, outgoing)
    recorded = []
    with raw(one) as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                recorded.append(outgoing.read())
                connection.sendall(recorded[-1])
                incoming.write(connection.recv(1 << 16))
        client.write(b"port 22\n")
        recorded.append(outgoing.read())
        connection.sendall(recorded[-1])
    refused = entrance_of(one).refused
    with raw(one) as connection:
        connection.sendall(recorded[0])
        connection.recv(1 << 16)  # the certificate of the host, for a key that is another one
        connection.sendall(b"".join(recorded[1:]))
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1 << 16)[:1] in (b"", b"\x14", b"\x15", b"\x17")
    wait_until(lambda: entrance_of(one).refused > refused)


def test_many_that_are_slow_hold_a_bounded_number_of_connections(
    start: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that are open are served within a second, and new ones of members are accepted."""
    one, other = two(start)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    beginnings = b"", CLIENT_HELLO + b"\x40\x00\x01", CLIENT_HELLO + b"\xff\xff" + bytes(10_000)
    with contextlib.ExitStack() as stack, one.listen() as server, one.listen() as first_server:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        echo(server)
        echo(first_server)
        carried = stack.enter_context(connect(first_server))
        calm_s, before, held_s = ping_s(carried), descriptors(), list[float]()
        for count in range(HELD):
            stack.enter_context(raw(one)).sendall(beginnings[count % len(beginnings)])
            if count % 100 == 99:
                held_s.append(ping_s(carried))
        print(f"ping: {calm_s * 1e3:.2f} ms; median and maximum with {HELD}:", end=" ")
        print(f"{statistics.median(held_s) * 1e3:.2f}, {max(held_s) * 1e3:.2f} ms")
        assert statistics.median(held_s) < stretched(1.0)
        assert exchange(server, b"x" * 100_000) == b"x" * 100_000
        third = start((one.announced,))
        wait_until(lambda: third.knows(one) and third.knows(other))
        assert descriptors() - before - HELD < tls.MAX_HANDSHAKES + 40
    assert len([record for record in caplog.records if "not of members" in record.message]) <= 3


def ping_s(connection: socket.socket) -> float:
    """Return the median time until a byte comes back."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def test_without_a_descriptor_the_entrance_pauses(start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    one, calls = start(), list[float]()
    accept = socket.socket.accept

    def exhausted(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener.getsockname()[1] == one.port and len(calls) < 3:
            calls.append(time.monotonic())
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    other = start((one.announced,))
    wait_until(lambda: one.knows(other) and other.knows(one))
    assert len(calls) == 3
    assert calls[2] - calls[0] >= tls.PAUSE_S


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def entrance_of(host: Host) -> tls.Entrance:
    return host.mesh.forwarder.entrance


def test_a_host_with_another_secret_is_told_so_and_so_is_one_whose_endpoint_leads_elsewhere(
    start: Callable[..., Host],
) -> None:
    one = start()
    for other in ({"secret": secrets.token_bytes(16)}, {"run": "other"}):
        stranger = start((one.announced,), **other)
        wait_until(lambda stranger=stranger: (one.announced, tls.OTHER_SECRET) in stranger.rejected)  # type: ignore[misc]
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_in_plain, args=(server,), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        misled = start((address,))
        wait_until(lambda: (address, tls.OTHER_PROGRAM) in misled.rejected)


def answer_in_plain(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.9\r\n")


def test_a_host_whose_announced_address_leads_elsewhere_is_told_so(start: Callable[..., Host]) -> None:
    one, third = start(), start()
    misled = start((one.announced,), announced=third.announced)
    wait_until(lambda: bool(misled.rejected))
    address, problem = misled.rejected[0]
    assert address == third.announced
    assert problem == f"{third.address} is there, and {misled.address} was expected"


@pytest.mark.parametrize("equal", [(0, 1), (1, 2)], ids=["the endpoint", "one that the endpoint knows"])
def test_a_host_that_draws_the_address_of_another_one_draws_again(
    equal: tuple[int, int], start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_equal_addresses(monkeypatch, *equal)
    hosts = [endpoint := start()]
    for _ in range(equal[1]):
        hosts.append(start((endpoint.announced,)))
        wait_until(lambda: all(endpoint.knows(each) and each.knows(endpoint) for each in hosts[1:]))
    assert len({each.address for each in hosts}) == len(hosts)
    assert not any(each.rejected for each in hosts)


def test_hosts_that_draw_equal_addresses_at_the_same_moment_are_told_so(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "DRAWS", 1)
    draw_equal_addresses(monkeypatch, 1, 2, 3)
    endpoint = start()
    one = start((endpoint.announced,))
    wait_until(lambda: endpoint.knows(one))
    for place, problem in ((endpoint, forwarder.SHARED), (one, forwarder.EQUAL)):
        other = start((place.announced,))
        wait_until(lambda other=other, problem=problem: problem in [text for _, text in other.rejected])  # type: ignore[misc]
    assert not one.rejected + endpoint.rejected


def test_a_requested_connection_is_that_of_the_host_that_was_requested_to_dial() -> None:
    async def request() -> None:
        one, peer = HostIdentity(SECRET, "run"), peers.MeshPeer(VerifiedHost("127.88.1.1", "key", "host"))
        peer.connected.set()
        requester, line = Carrier(one, {}, None, None), object()  # type: ignore[arg-type]
        requested = asyncio.create_task(requester._request(peer))
        await asyncio.sleep(0)
        dialed: Any = SimpleNamespace(next_line=lambda: line)
        for address, number in (("127.88.1.2", 1), (peer.member.address, 2)):
            with pytest.raises(ValueError, match=f"^no connection {number} was requested of {address}$"):
                requester.take_requested(address, number, dialed)
        requester.take_requested(peer.member.address, 1, dialed)
        assert await requested is line

    asyncio.run(request())


def draw_equal_addresses(monkeypatch: pytest.MonkeyPatch, *equal: int) -> None:
    """Let some of the keys that are drawn from now on, given by their numbers, have one virtual address."""
    address_of, drawn = identity._address_of, list[bytes]()

    def address(key: Ed25519PublicKey) -> str:
        if (data := key.public_bytes_raw()) not in drawn:
            drawn.append(data)
        return "127.88.1.1" if drawn.index(data) in equal else address_of(key)

    monkeypatch.setattr(identity, "_address_of", address)


def test_a_certificate_is_for_the_address_of_its_key_alone() -> None:
    """Also one that was signed with the secret."""
    one, other = HostIdentity(SECRET, "run"), HostIdentity(SECRET, "run")
    assert member_of(handshake(one.client, other.server), other.address).address == other.address
    with pytest.raises(StrangerError, match="was expected"):
        member_of(handshake(one.client, other.server), one.address)
    key = Ed25519PrivateKey.generate()
    false = one._context(ssl.PROTOCOL_TLS_SERVER, key, one.sign(key.public_key(), other.address, "host"))
    with pytest.raises(StrangerError, match="does not follow from its key"):
        member_of(handshake(one.client, false))
    own = one.sign(key.public_key(), one.address, "host")
    month = datetime.timedelta(days=30)
    now = datetime.datetime.now(datetime.UTC)
    assert own.not_valid_before_utc < now - month, "a host whose clock is wrong is no stranger"
    assert own.not_valid_after_utc > now + month
    for stranger in (HostIdentity(SECRET, "another run"), HostIdentity(SECRET[:-1], "run")):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(one.client, stranger.server)
        with pytest.raises(ssl.SSLError):
            handshake(stranger.client, one.server)


def handshake(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> ssl.SSLObject:
    """Return the client's end after a handshake."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(back, there)
    server = server_context.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for each in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                each.do_handshake()
    return client


# Encryption.


@pytest.mark.parametrize("sizes", [(1, 16384, 0, 3), (16384,) * 3, (5,) * 40], ids=["mixed", "full", "small"])
def test_records_are_counted_wherever_their_bytes_are_cut(sizes: tuple[int, ...]) -> None:
    ends = [*itertools.accumulate(transport.HEADER_BYTES + size for size in sizes)]
    stream, draw = b"".join(b"\x17\x03\x03" + struct.pack(">H", size) + bytes(size) for size in sizes), random.Random(0)
    for _ in range(50):
        records, at, ended = transport.Records(), 0, 0
        while at < len(stream):
            part = stream[at : at + draw.choice((1, 3, 7, 4000, 40_000))]
            at, ended = at + len(part), ended + records.count(part)
            assert ended == sum(end <= at for end in ends)
            begin = max(end for end in (0, *ends) if end <= at)
            is_known = at - begin >= transport.HEADER_BYTES
            assert records.missing == (min(end for end in ends if end > at) - at if is_known else 0)


class Received(asyncio.Protocol):
    """Keeps what a connection receives."""

    def __init__(self) -> None:
        self.data, self.ended = bytearray(), asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self.ended.set()


async def linked(
    receiver: asyncio.Protocol, buffer_bytes: int | None = None
) -> tuple[transport.TlsTransport, transport.TlsTransport]:
    """Connect two ends, one of which has a protocol, and a buffer of that size, by packets as between hosts."""
    loop, identity = asyncio.get_running_loop(), HostIdentity(SECRET, "run")
    sender = transport.TlsTransport(identity.client, asyncio.Protocol(), server_side=False)
    end = transport.TlsTransport(identity.server, receiver, server_side=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
        if buffer_bytes is not None:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await loop.create_connection(lambda: sender, *server.getsockname())
        await loop.connect_accepted_socket(lambda: end, server.accept()[0])
    await asyncio.gather(sender.handshake(), end.handshake())
    return sender, end


def records_of(sender: transport.TlsTransport, data: bytes) -> bytes:
    """Return what a connection sends for data that are written at once, in place of sending it."""
    sent = list[bytes]()
    connection, sender._transport = sender._transport, cast(Any, SimpleNamespace(write=sent.append))
    sender.write(data)
    sender._transport = connection
    return b"".join(sent)


@pytest.mark.parametrize("size", [1, 16369, 16370, 16384, 16385, 32768, 32769, 50_000, 1 << 17, 300_000])
def test_the_length_of_a_record_promises_what_was_written_with_it_and_no_more(size: int) -> None:
    """Else the receiver would wait for bytes that do not come."""

    async def write() -> bytes:
        sender, _ = await linked(asyncio.Protocol())
        return records_of(sender, bytes(size))

    stream, records, promised = run_in_loop(write()), transport.Records(), list[int]()
    for at in range(0, len(stream), 50):
        records.count(stream[at : at + 50])
        promised.append(records.missing + records.following)
        assert promised[-1] <= len(stream) - min(len(stream), at + 50)
    assert max(promised) > min(size, transport.MAX_AWAITED) - 2 * transport.RECORD_BYTES


@pytest.mark.parametrize(("share", "most"), [(1, 4), (1 << 30, 7)], ids=["large window", "small window"])
def test_packets_of_what_was_written_at_once_wake_the_receiver_a_few_times(
    share: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the first one, for what certainly follows, and for the last record; with a small window for each record."""
    monkeypatch.setattr(transport, "WINDOW_SHARE", share)
    woken, receive = list[int](), transport.TlsTransport.buffer_updated

    def note(own: transport.TlsTransport, nbytes: int) -> None:
        woken.append(nbytes)
        receive(own, nbytes)
        assert share == 1 or own._low_water <= transport.RECORD_BYTES

    async def send_packets() -> None:
        received, data = Received(), os.urandom(60_000)
        sender, _ = await linked(received)
        stream = records_of(sender, data)
        monkeypatch.setattr(transport.TlsTransport, "buffer_updated", note)
        for at in range(0, len(stream), 1400):
            sender._transport.write(stream[at : at + 1400])
            await asyncio.sleep(0.001)
        async with asyncio.timeout(WAIT_S):
            while len(received.data) < len(data):
                await asyncio.sleep(0.001)
        assert received.data == data
        assert len(woken) <= most

    run_in_loop(send_packets())


def test_what_was_written_arrives_although_the_end_that_closes_has_not_read_all() -> None:
    async def close() -> None:
        received, data = Received(), os.urandom(30_000)
        sender, end = await linked(received, 4096)
        sender.pause_reading()
        end.write(b"x")
        end.pause_reading()
        sender.write(data)
        sender.close()
        sender.write(b"not sent any more")
        assert sender.is_closing()
        await asyncio.sleep(0.05)
        end.resume_reading()
        await asyncio.wait_for(received.ended.wait(), WAIT_S)
        assert received.data == data

    run_in_loop(close())


@pytest.mark.parametrize("cut", [None, 0, 20], ids=["closed", "cut between records", "cut in a record"])
def test_a_connection_that_is_cut_on_the_path_is_reset_for_the_program_and_has_not_ended(cut: int | None) -> None:
    async def carry() -> None:
        local, remote = CarriedEnd(), CarriedEnd()
        sender, _ = await linked(remote)
        with socket.create_server(("127.0.0.1", 0)) as server:
            reader, writer = await asyncio.open_connection(*server.getsockname())
            await asyncio.get_running_loop().connect_accepted_socket(lambda: local, server.accept()[0])
        local.join(remote)
        sender.write(b"x")
        assert await reader.readexactly(1) == b"x"
        if cut is None:
            sender.close()
            assert await reader.read() == b""
        else:
            sender._transport.write(records_of(sender, b"more")[:cut])
            sender._transport.close()
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()

    run_in_loop(asyncio.wait_for(carry(), WAIT_S))


def test_what_a_host_ends_before_all_has_arrived_is_lost_with_an_error_on_the_other_host() -> None:
    async def abort() -> None:
        local, remote, received = CarriedEnd(), CarriedEnd(), Received()
        sender, _ = await linked(remote)
        sender.set_protocol(received)
        ours, program = socket.socketpair()
        with program:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: local, ours)
            local.join(remote)
            local.abort()
            await received.ended.wait()
        assert isinstance(received.error, ConnectionResetError)

    run_in_loop(asyncio.wait_for(abort(), WAIT_S))


def test_a_program_that_sends_before_its_connection_is_carried_waits() -> None:
    """Else the forwarder would keep all that it sends."""

    async def send() -> None:
        local = CarriedEnd()
        ours, program = socket.socketpair()
        program.setblocking(False)
        with program:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: local, ours)
            for _ in range(50):
                with contextlib.suppress(BlockingIOError):
                    program.send(bytes(1 << 20))
                await asyncio.sleep(0.001)
            assert len(local._early) <= len(transport.READ_BUFFER.view)
            local.abort()

    run_in_loop(send())


# Another secret.


def test_what_a_connection_has_proved_ends_with_it_or_with_the_secret() -> None:
    one, other = (HostIdentity(SECRET, "run") for _ in range(2))

    async def connected() -> None:
        server = await asyncio.start_server(nothing, "127.0.0.1", 0, ssl=one.server)
        async with server:
            address = server.sockets[0].getsockname()
            for ends in (True, False):
                _, writer = await asyncio.open_connection(*address, ssl=other.client, server_hostname="")
                assert other.secret_of(writer.transport) == SECRET
                if ends:
                    writer.transport.close()
                    writer.transport.close()  # as by both ends of what it carries
                else:
                    other.set_secrets(secrets.token_hex(24).encode())
                assert other.secret_of(writer.transport) is None
                writer.transport.abort()

    run_in_loop(connected())


def three(start: Callable[..., Host], **kwargs: object) -> list[Host]:
    """Start three hosts, and wait until they know each other."""
    one, other = two(start)
    third = start((one.announced,), **kwargs)
    wait_until(lambda: all(third.knows(each) and each.knows(third) for each in (one, other)))
    return [one, other, third]


def new_secret(host: Host) -> bytes:
    """Return the secret in the file of a host, which is another one than at first."""
    assert not host.secret_file.stat().st_mode & 0o077
    secret = read_secret(host.secret_file)
    assert secret != SECRET
    return secret


def test_after_a_rotation_the_new_secret_alone_is_accepted(
    start: Callable[..., Host], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("DEBUG")
    hosts = three(start, has_port=False)
    with hosts[1].listen() as server, knocking(hosts[0], tls_of(SECRET)) as stranger:
        echo(server)
        old = connect(server)
        old.sendall(b"x")
        assert old.recv(1) == b"x"
        told = mesh.request(hosts[0].socket_path, "rotate", WAIT_S)
        assert all(each.address in told for each in hosts[1:])
        secret = new_secret(hosts[0])
        assert [new_secret(each) for each in hosts] == [secret] * 3
        for connection in (old, stranger):
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b"", "what was connected with the old one ends"
        wait_until(lambda: all(each.mesh.forwarder.identity.secrets == (secret,) for each in hosts))
        for each in hosts:
            with each.listen() as again:
                echo(again)
                wait_until(lambda again=again: can_exchange(again))  # type: ignore[misc]
        late = start((hosts[0].announced,))
        wait_until(lambda: (hosts[0].announced, tls.OTHER_SECRET) in late.rejected)
        assert not knock(hosts[0], b"address\n", tls_of(SECRET))
        joined = start((hosts[0].announced,), secret=secret)
        wait_until(lambda: all(joined.knows(each) for each in hosts))
    assert "while this host was away, copy its file" in tls.OTHER_SECRET
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]
    shown = [*told.splitlines(), *(record.getMessage() for record in caplog.records)]
    shown += [note for each in hosts for note in each.notes]
    assert not any(secret.decode() in text or SECRET.decode() in text for text in shown)
    assert any(f"{hosts[1].secret_file} has a new secret" in note for note in hosts[1].notes)


def can_exchange(server: socket.socket) -> bool:
    with contextlib.suppress(OSError, AssertionError):
        return exchange(server, b"x") == b"x"
    return False


@contextlib.contextmanager
def knocking(host: Host, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    """Hold a connection to a port of a host, the mesh of which carries it."""
    with host.listen() as server, raw(host) as connection, context.wrap_socket(connection) as stream:
        echo(server)
        stream.sendall(f"port {server.getsockname()[1]}\n".encode() + b"x")
        assert stream.recv(1) == b"x"
        yield stream


def test_a_host_that_was_cut_off_during_a_rotation_is_told_what_to_do(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "RETURN_S", 0.0)
    one, other = two(start)
    for each in (one, other):
        monkeypatch.setattr(each.mesh.forwarder, "_connect", refuse)
    lines = one.mesh.forwarder._peers[other.address].lines
    assert lines is not None
    one.mesh._loop.call_soon_threadsafe(lines.transport.abort)
    wait_until(lambda: not any(peer.lines for each in (one, other) for peer in each.mesh.forwarder._peers.values()))
    mesh.request(one.socket_path, "rotate", WAIT_S)
    assert read_secret(other.secret_file) == SECRET
    monkeypatch.undo()
    wait_until(lambda: any(note.endswith(tls.OTHER_SECRET) for note in other.notes))


async def refuse(*_: object) -> None:
    raise TimeoutError


def test_a_host_whose_connection_has_just_ended_takes_part_in_a_rotation_once_it_is_back(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose router has forgotten the connection."""
    monkeypatch.setattr(rotation, "RETURN_S", WAIT_S)
    one, other = two(start)
    is_cut = True
    for each in (one, other):
        connect_again = each.mesh.forwarder._connect
        late = lambda *args, again=connect_again: (refuse if is_cut else again)(*args)  # noqa: E731
        monkeypatch.setattr(each.mesh.forwarder, "_connect", late)
    peer = one.mesh.forwarder._peers[other.address]
    assert peer.lines is not None
    one.mesh._loop.call_soon_threadsafe(peer.lines.transport.abort)
    wait_until(lambda: peer.lines is None)
    told = list[str]()
    rotating = threading.Thread(target=lambda: told.append(mesh.request(one.socket_path, "rotate", 2 * WAIT_S)))
    rotating.start()
    wait_until(lambda: one.mesh.forwarder.rotation._current is not None)
    is_cut = False
    rotating.join(2 * WAIT_S)
    assert other.address in told[0]
    assert new_secret(one) == new_secret(other)


@pytest.mark.parametrize("step", ["accept", "use", "end"])
def test_when_the_initiator_of_a_rotation_ends_the_others_stay_connected_and_the_next_one_completes_it(
    step: str, start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, one, other = three(start)
    pairs = (one, other), (other, one)
    send = rotation.SecretRotation._send

    def send_to_one(own: rotation.SecretRotation, members: list[peers.MeshPeer], request: Rotate) -> None:
        """The initiator ends after it has sent a step to one of the others."""
        if own is first.mesh.forwarder.rotation and request.step == step:
            send(own, [peer for peer in members if peer.member.address == one.address], request)
            first.mesh._ended.set()
        else:
            send(own, members, request)

    monkeypatch.setattr(rotation.SecretRotation, "_send", send_to_one)
    with contextlib.suppress(OSError, ValueError):
        mesh.request(first.socket_path, "rotate", 2.0)
    wait_until(lambda: not first.mesh._thread.is_alive())  # on a busy machine, it has not sent that step yet
    with one.listen() as server, other.listen() as other_server:
        for each in (server, other_server):
            echo(each)
            wait_until(lambda each=each: can_exchange(each))  # type: ignore[misc]
        wait_until(lambda: all(each.mesh.forwarder._peers[first.address].lines is None for each in (one, other)))
        if step == "end":
            wait_until(lambda: all(len(each.mesh.forwarder.identity.secrets) == 1 for each in (one, other)))
        # a host that is not connected at this moment has no part in a rotation, and is shut out by it
        wait_until(lambda: all(linked.mesh.forwarder._peers[to.address].lines for linked, to in pairs))
        wait_until(lambda: f"{other.address})" in mesh.request(one.socket_path, "rotate", WAIT_S))
        assert new_secret(one) == new_secret(other)
        wait_until(lambda: all(len(each.mesh.forwarder.identity.secrets) == 1 for each in (one, other)))
        assert one.mesh.forwarder.identity.secrets == other.mesh.forwarder.identity.secrets == (new_secret(one),)
        for each in (server, other_server):
            wait_until(lambda each=each: can_exchange(each))  # type: ignore[misc]


def test_a_rotation_in_which_a_host_cannot_take_part_changes_nothing(
    start: Callable[..., Host], tmp_path: Path
) -> None:
    one, other = two(start, secret_file=tmp_path / "missing" / "secret")
    with pytest.raises(ValueError, match=rf"not replaced: .*\({other.address}\) cannot write .*missing.*No such file"):
        mesh.request(one.socket_path, "rotate", WAIT_S)
    wait_until(lambda: one.mesh.forwarder.identity.secrets == other.mesh.forwarder.identity.secrets == (SECRET,))
    assert read_secret(one.secret_file) == SECRET
    one, without = two(start, has_file=False)
    for each in (one, without):
        with pytest.raises(ValueError, match=re.escape(rotation.NO_FILE)):
            mesh.request(each.socket_path, "rotate", WAIT_S)


def test_steps_of_a_rotation_that_has_ended_have_no_effect_if_they_are_sent_again(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two(start)
    own, sent, answers = other.mesh.forwarder.rotation, list[Rotate](), list[object]()
    take = own.take
    monkeypatch.setattr(own, "take", lambda peer, request: sent.append(request) or take(peer, request))
    for _ in range(2):
        wait_until(lambda: other.address in mesh.request(one.socket_path, "rotate", WAIT_S))
    secret = new_secret(other)
    wait_until(lambda: all(each.mesh.forwarder.identity.secrets == (secret,) for each in (one, other)))
    first = [request for request in sent if request.rotation == sent[0].rotation]
    assert {"accept", "use", "end"} <= {request.step for request in first}
    peer = other.mesh.forwarder._peers[one.address]
    monkeypatch.setattr(peer, "send", answers.append)
    for request in first:
        other.mesh._loop.call_soon_threadsafe(take, peer, request)
    wait_until(lambda: any(isinstance(each, Rotated) and each.problem for each in answers))
    assert other.mesh.forwarder.identity.secrets == (secret,)
    assert new_secret(other) == secret


def test_of_two_rotations_at_once_none_is_done_by_halves(start: Callable[..., Host]) -> None:
    hosts = three(start)

    def rotate(host: Host) -> None:
        with contextlib.suppress(ValueError):
            mesh.request(host.socket_path, "rotate", WAIT_S)

    threads = [threading.Thread(target=rotate, args=(host,)) for host in hosts[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    wait_until(lambda: len({each.mesh.forwarder.identity.secrets for each in hosts}) == 1)
    assert len(hosts[0].mesh.forwarder.identity.secrets) == 1
    assert {read_secret(each.secret_file) for each in hosts} == {*hosts[0].mesh.forwarder.identity.secrets}


def test_the_run_is_found_by_its_name(
    start: Callable[..., Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="give the name of a run; runs with a mesh, of this user on this host: none"):
        mesh.rotate(None)
    one = start()
    (tmp_path / "acsgd-host-1").mkdir()
    (tmp_path / "acsgd-host-1" / "mesh").symlink_to(one.socket_path)
    with pytest.raises(ValueError, match=r"no run other with a mesh; .*: run"):
        mesh.rotate("other")
    assert "is on this host; any other" in mesh.rotate(None)
    new_secret(one)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_of_a_host_do_not_reach_the_ports_of_other_hosts(start: Callable[..., Host]) -> None:
    _, other = two(start)
    with other.listen() as server:
        echo(server)
        assert exchange(server, b"x") == b"x"
        address = mirror(other.address), server.getsockname()[1]
        code = f"import os, socket; os.setuid(65534); s = socket.create_connection({address}); "
        code += "s.sendall(b'x'); print(s.recv(1))"
        read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "b'x'" not in read.stdout
        squatter = subprocess.Popen([sys.executable, "-c", SQUAT.format(other.address)], stdout=subprocess.PIPE)
        with squatter:
            assert squatter.stdout is not None
            port = int(squatter.stdout.readline())
            assert port not in ports.listening_ports(other.address)
            squatter.kill()


REACHES = """
import os, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with socket.create_server(("127.88.1.2", 0)) as server:
    for rule in (None, sys.argv[1], "delete table inet acsgd"):
        if rule is not None:
            subprocess.run(["nft", rule], check=True)
        for user in (0, 65534):
            if not os.fork():
                os.setuid(user)
                with socket.socket() as connection:
                    os._exit(connection.connect_ex(server.getsockname()))
            print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(shutil.which("nft") is None, reason="nftables is not installed")
def test_other_users_reach_the_ports_of_their_own_host_unless_the_rule_of_the_doctor_forbids_it() -> None:
    command = ["unshare", "--net", sys.executable, "-S", "-c", REACHES, mesh_rule(os.getuid())]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    if read.returncode:
        pytest.skip(f"no namespace, or no nftables: {read.stderr.splitlines()[-1]}")
    assert [int(code) for code in read.stdout.split()] == [0, 0, 0, errno.ECONNREFUSED, 0, 0]


SQUAT = """
import os, socket, time
os.setuid(65534)
server = socket.create_server(("{}", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


def test_hosts_of_another_version_are_named() -> None:
    hello = {"protocol": forwarder.PROTOCOL + 1, "announced": None, "daemon_port": 1, "ports": []}
    other_records = {**hello, "protocol": 4}  # which divided what was written into full ones
    for body in (hello, other_records, {}, {**hello, "protocol": forwarder.PROTOCOL, "ports": [0]}):
        with pytest.raises(StrangerError, match="install the same version"):
            forwarder._read_greeting(json.dumps({"kind": "Greeting", "body": body}))


def test_a_secret_is_long_and_in_a_file_of_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"mode 0640.*chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == SECRET
    with pytest.raises(ValueError, match="has 5 bytes, and needs 16"):
        HostIdentity(b"short", "run")


def test_public_addresses() -> None:
    assert is_public(("10.0.0.1:1", "8.8.8.8:1"))
    assert is_public(("[2606:4700::1111]:1",))
    assert not is_public(("127.0.0.1:1", "192.168.3.4:1", "[fd00::1]:1", "100.64.0.1:1", "no-host.invalid:1"))


@pytest.mark.parametrize(
    ("timeouts", "unacknowledged", "since_acknowledged_ms", "is_ended"),
    [(0, 0, 2000, False), (0, 2, 2000, False), (3, 2, 400, False), (3, 2, 2000, True)],
    ids=["idle", "idle until data was sent", "answered again", "forgotten"],
)
def test_a_connection_that_a_router_has_forgotten_ends_once_its_host_is_back(
    timeouts: int,
    unacknowledged: int,
    since_acknowledged_ms: int,
    is_ended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one on which TCP gets answers again, that was idle, or that is to another host."""
    monkeypatch.setattr(carrier, "_leads_to", lambda transport, address: address == transport.address)
    monkeypatch.setattr(carrier, "SLACK_S", 0.0)
    aborted = list[str]()
    info = struct.pack(
        "=2xB5x4I I 7I I 11I", timeouts, *[0] * 4, unacknowledged, *[0] * 7, since_acknowledged_ms, *[0] * 11
    )
    tcp = SimpleNamespace(family=socket.AF_INET, getsockopt=lambda *_: info)

    def transport(address: str) -> Any:
        return SimpleNamespace(
            address=address,
            abort=lambda: aborted.append(address),
            is_closing=lambda: False,
            get_extra_info=lambda _: tcp,
        )

    async def end_stuck() -> None:
        ends = [CarriedEnd() for _ in range(2)]
        for end, address in zip(ends, ("127.88.1.1", "127.88.1.2"), strict=True):
            end._transport = transport(address)
        carried = Carrier(HostIdentity(SECRET, "run"), {}, None, None)  # type: ignore[arg-type]
        carried._carried.update(ends)
        await carried.end_stuck("127.88.1.1", 0.5)

    run_in_loop(end_stuck())
    assert aborted == (["127.88.1.1"] if is_ended else [])


@pytest.mark.parametrize(
    ("reads", "is_own"),
    [
        ([[0]], True),
        ([[], [0]], True),
        ([[0, 0]], True),
        ([[1]], False),
        ([[0, 1]], False),
        ([[], [1]], False),
        ([[]], False),
    ],
)
def test_a_table_that_changes_while_it_is_read_hides_no_connection_of_this_user(
    reads: list[list[int]], is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines may be missing, or there twice. reads: users of the connection, as offsets from this one, by read."""
    source, target = ("127.0.0.1", 5000), ("127.88.1.2", 6000)
    ends = [f"{ports._hex(address)}:{port:04X}" for address, port in (source, target)]
    left = [*reads]

    def sockets(_: str) -> list[tuple[str, str, str, int]]:
        users = left.pop(0) if left else []
        return [(ends[0], ends[1], "01", os.getuid() + user) for user in users]

    monkeypatch.setattr(ports, "_sockets", sockets)
    assert ports.is_own_connection(source, target) == is_own


@pytest.mark.parametrize("has_diag", [True, False])
@pytest.mark.parametrize("own", [socket.AF_INET, socket.AF_INET6])
def test_sockets_are_those_of_the_system_with_and_without_sock_diag(
    own: socket.AddressFamily, has_diag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.88.{secrets.randbelow(250)}.{1 + secrets.randbelow(250)}"
    with contextlib.ExitStack() as stack:
        server, other, client = (stack.enter_context(socket.socket(own)) for _ in range(3))
        for each in (server, other):
            each.bind((f"::ffff:{address}" if own == socket.AF_INET6 else address, 0))
        server.listen()
        port = server.getsockname()[1]
        if has_diag and ports._diagnosed(socket.AF_INET, bytes(36), ports.DUMP) is None:
            pytest.skip("this system has no sock_diag")
        if has_diag:
            monkeypatch.setattr(ports, "_sockets", lambda _: iter(()))
        else:
            monkeypatch.setattr(ports, "_diagnosed", lambda *_: None)
        assert ports.listening_ports(address) == {port}
        assert ports.listening_ports("127.88.251.1") == set()
        client.connect(server.getsockname()[:2])
        source = ("127.0.0.1", client.getsockname()[1])
        assert ports.is_own_connection(source, (address, port))
        assert not ports.is_own_connection((address, port), ("127.0.0.1", 1)), "one that listens is no connection"
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert ports.listening_ports(address) == set()
        assert not ports.is_own_connection(source, (address, port))
