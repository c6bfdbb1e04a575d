"""TLS 1.3 over TCP between two members: accepting and dialing connections.

A stranger gets no byte but those of the handshake, and costs a bounded number of sockets and of log lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from acsgd.comm.addresses import split_address
from acsgd.mesh.identity import HostIdentity, StrangerError, VerifiedHost, member_of
from acsgd.mesh.streams import FirstLine
from acsgd.mesh.transport import TlsTransport

log = logging.getLogger(__name__)

HANDSHAKE_S = 20.0
"""Time for a handshake and for the first line after it, seconds. On a link that is full, packets of it are lost, and
TCP repeats each after 1, 3, 7 and 15 s."""
MAX_HANDSHAKES = 256
"""Number of connections in a handshake. A further one ends the oldest: a member needs milliseconds."""
USER_TIMEOUT_MS = 60_000
"""Time after which a connection ends whose data is not acknowledged, milliseconds."""
TCP_INFO = struct.Struct("2x B 5x 24I")
"""First fields of Linux's tcp_info: number of retransmission timeouts since the last acknowledgment, and 24 more."""
UNACKNOWLEDGED, SINCE_ACKNOWLEDGED_MS = 4, 12
"""Indices of these."""
BACKLOG = 1024
"""Number of connections that wait to be accepted. Beyond it, members wait for seconds until TCP tries again."""
PAUSE_S = 0.1
"""Time without accepting connections once no descriptor is left, seconds."""
OTHER_SECRET = (
    "has another secret, or is of another run: give all hosts the same secret and --rdzv-id; if acsgd net rotate has "
    "replaced the secret while this host was away, copy its file from another host and start this one again"
)
OTHER_PROGRAM = "is no host of acsgd with a mesh: the address leads elsewhere; check --rdzv-endpoint and announce="

OnMember = Callable[[FirstLine, VerifiedHost, str], Awaitable[None]]


class Entrance:
    """Accepts connections of members at one TCP port. on_member: takes a connection, its member and its first line."""

    def __init__(self, identity: HostIdentity, on_member: OnMember) -> None:
        self._identity = identity
        self._on_member = on_member
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        """Oldest first."""
        self._served: dict[asyncio.Task[None], FirstLine] = {}
        self._listener: socket.socket | None = None
        self.refused = 0
        """Number of connections that did not prove to be of a member."""

    def listen(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket from now on."""
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        accept_each(listener, self.accept)

    def close(self) -> None:
        """Accept no more connections, and end those that have not been handed on."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for handshake, accepted in list(self._handshakes.items()):
            handshake.cancel()
            _end(accepted)
        for task, connection in list(self._served.items()):
            task.cancel()
            connection.transport.abort()

    def accept(self, connection: socket.socket) -> None:
        """Authenticate a connection, and hand it on."""
        if len(self._handshakes) >= MAX_HANDSHAKES:
            oldest = next(iter(self._handshakes))
            _end(self._handshakes.pop(oldest))
        task = asyncio.get_running_loop().create_task(self._greet(connection))
        self._handshakes[task] = connection
        task.add_done_callback(lambda task: self._handshakes.pop(task, None))

    async def _greet(self, connection: socket.socket) -> None:
        protocol = FirstLine()
        encrypted = TlsTransport(self._identity.server, protocol, server_side=True)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: encrypted, connection)
                await encrypted.handshake()
                set_options(protocol.transport)
                member = member_of(protocol.transport.get_extra_info("ssl_object"))
                line = await protocol.line
        except (OSError, TimeoutError, ValueError) as error:
            self._count_refused(str(error) or type(error).__name__)
            if protocol.is_connected:
                protocol.transport.abort()
            else:
                _end(connection)
            return
        task = asyncio.get_running_loop().create_task(self._serve(protocol, member, line))
        self._served[task] = protocol
        task.add_done_callback(lambda task: self._served.pop(task, None))

    async def _serve(self, connection: FirstLine, member: VerifiedHost, line: str) -> None:
        try:
            await self._on_member(connection, member, line)
        except (OSError, TimeoutError, ValueError) as error:
            log.info("closed a connection of %s: %s", member.address, error)
            connection.transport.abort()

    def _count_refused(self, why: str) -> None:
        self.refused += 1
        if self.refused in (1, 100) or self.refused % 10_000 == 0:
            log.warning("%d connections were not of members of this run, the last one: %.100s", self.refused, why)


def _end(connection: socket.socket) -> None:
    """End a connection that the event loop uses, and let the loop close it.

    Closed here, its file descriptor could be given to the next connection, which the loop would take for this one.
    """
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def accept_each(listener: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
    """Call a function with each connection that a socket accepts, until the socket is closed."""
    loop = asyncio.get_running_loop()

    def resume() -> None:
        if listener.fileno() >= 0:
            loop.add_reader(listener, accept)

    def accept() -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # gone already
        except OSError:  # no descriptor is left: the connection waits, and would be reported again at once
            loop.remove_reader(listener)
            loop.call_later(PAUSE_S, resume)
            return
        connection.setblocking(False)
        # asyncio does it for a socket whose proto is IPPROTO_TCP; accepted from a listener of socket.create_server it
        # is 0. Without it, the last packet of a message of several waits until the others are acknowledged
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_connection(connection)

    resume()


async def dial(
    identity: HostIdentity, place: str | socket.socket, expected: str | None = None
) -> tuple[FirstLine, VerifiedHost]:
    """Connect to a member at host:port, or through a socket. expected: its virtual address; None = any.

    Raises StrangerError if another process answers, OSError or TimeoutError if none does.
    """
    at: dict[str, Any] = {"sock": place}
    if isinstance(place, str):
        at = dict(zip(("host", "port"), split_address(place), strict=True))
    loop, protocol = asyncio.get_running_loop(), FirstLine()
    encrypted = TlsTransport(identity.client, protocol, server_side=False)
    with contextlib.ExitStack() as stack:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                transport, _ = await loop.create_connection(lambda: encrypted, **at)
                stack.callback(transport.abort)
                await encrypted.handshake()
        except ssl.SSLCertVerificationError as error:
            raise StrangerError(OTHER_SECRET) from error
        except ssl.SSLError as error:
            raise StrangerError(OTHER_PROGRAM) from error
        set_options(transport)
        member = member_of(encrypted.get_extra_info("ssl_object"), expected)
        stack.pop_all()
    return protocol, member


def unanswered_s(transport: asyncio.Transport) -> float:
    """Return for how long nothing that was sent on a connection has been acknowledged.

    0 if nothing has been sent again without an answer, or if the system does not say. The time alone does not decide:
    it grows while a connection is idle, and what was just sent is unacknowledged for a round trip.
    """
    connection = None if transport.is_closing() else transport.get_extra_info("socket")
    if connection is None or connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return 0.0
    timeouts, *info = TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size))
    return info[SINCE_ACKNOWLEDGED_MS] / 1e3 if timeouts and info[UNACKNOWLEDGED] else 0.0


def set_options(transport: asyncio.BaseTransport) -> None:
    """Let a connection end if the other host has gone."""
    connection = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
