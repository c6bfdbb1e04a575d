"""Laws of the connections between daemons."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import closing
from typing import Any

import pytest
from lib.patience import stretched

from acsgd.comm.addresses import listen
from acsgd.elastic.host import transport
from acsgd.elastic.host.transport import Connections
from acsgd.elastic.membership.messages import PROTOCOL, Decided, Host, SharedFiles, View
from acsgd.elastic.membership.plan import Plan
from tests.lib.ports import free_addresses

ME = Host("127.0.0.1:1", "me")
TIMEOUT_S = stretched(30.0)


def test_messages_on_a_connection_that_has_broken_are_dropped_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """As many as a host may have to send at once, when it continues after it was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        has_broken = threading.Event()
        threading.Thread(target=_greet_and_break, args=(server, has_broken), daemon=True).start()
        asyncio.run(_send_many(f"127.0.0.1:{server.getsockname()[1]}", has_broken))
    assert not caplog.records


def _greet_and_break(server: socket.socket, has_broken: threading.Event) -> None:
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as lines:
        connection.sendall(f"acsgd {PROTOCOL} member name\n".encode())
        lines.readline()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
    has_broken.set()


async def _send_many(address: str, has_broken: threading.Event) -> None:
    with closing(_connections()) as connections:
        message = Decided(View(1, (ME,), Plan(stages=1)))
        await connections.send(address, message, None)
        assert has_broken.wait(TIMEOUT_S)
        for _ in range(20):  # before the event loop can notice
            await connections.send(address, message, None)


def test_a_host_whose_port_refuses_connections_has_ended_once_that_is_known() -> None:
    """In a mesh, a port may not be open here yet."""
    (address,) = free_addresses(1)
    refused, known = list[tuple[str | None, ...]](), iter([False, False, True])

    def on_refused(*found: str | None) -> None:
        refused.append(found)

    async def send() -> None:
        with closing(_connections(on_refused=on_refused, has_ended=lambda address: next(known))) as connections:
            await connections.send(address, Decided(View(1, (ME,), Plan(stages=1))), "id")

    asyncio.run(send())
    assert refused == [(address, "id")]
    assert not list(known)


@pytest.mark.parametrize("is_own", [True, False])
def test_in_a_mesh_other_users_of_the_host_get_no_byte(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are signed with the id of the run alone."""
    if not is_own:
        monkeypatch.setattr(transport, "is_own_connection", lambda source, target: False)

    async def greeting() -> bytes:
        with closing(_connections()) as connections:
            with listen("127.88.1.1") as free:
                host, port = free.getsockname()
            await connections.listen(f"{host}:{port}")
            reader, writer = await asyncio.open_connection(host, port)
            with closing(writer):
                return await reader.readline()

    assert bool(asyncio.run(greeting())) is is_own


@pytest.mark.parametrize(("host", "grows"), [("127.88.1.1", True), ("127.0.0.1", False)])
def test_a_connection_in_a_mesh_that_takes_too_long_is_given_more_time(host: str, grows: bool) -> None:
    """It may go through a relay. Without a mesh, a host that does not answer is dialed again as soon."""
    times = list[float | None]()

    async def send() -> None:
        with closing(_connections(connect_timeout_s=0.001)) as connections, listen(host) as silent:
            address = f"{host}:{silent.getsockname()[1]}"
            for _ in range(2):
                await connections.send(address, Decided(View(1, (ME,), Plan(stages=1))), "id")
                times.append(connections._connect_s.get(address))

    asyncio.run(send())
    assert times == ([0.002, 0.004] if grows else [None, None])


def _connections(**given: Any) -> Connections:
    options = {"on_refused": lambda address, host_id: None, "connect_timeout_s": TIMEOUT_S, **given}
    return Connections(
        "run",
        b"secret",
        sender=lambda: ME,
        is_in_view=lambda: True,
        on_message=lambda sender, message: None,
        files=lambda: (SharedFiles(), ()),
        on_rejected=lambda rejection: None,
        **options,
    )
