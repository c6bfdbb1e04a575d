"""Laws of the connections between daemons."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import closing

import pytest
from lib.patience import stretched

from acsgd.elastic.host.transport import Connections
from acsgd.elastic.membership.messages import PROTOCOL, Decided, Host, View
from acsgd.elastic.membership.plan import Plan

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
    connections = Connections(
        "run",
        b"secret",
        sender=lambda: ME,
        is_in_view=lambda: True,
        on_message=lambda sender, message: None,
        on_refused=lambda address, host_id: None,
        on_rejected=lambda rejection: None,
        connect_timeout_s=TIMEOUT_S,
    )
    with closing(connections):
        message = Decided(View(1, (ME,), Plan(stages=1)))
        await connections.send(address, message, None)
        assert has_broken.wait(TIMEOUT_S)
        for _ in range(20):  # before the event loop can notice
            await connections.send(address, message, None)
