"""Protocols of asyncio for what one connection carries: a first line, messages, or the bytes of another connection."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from acsgd.mesh.transport import READ_BUFFER, TlsTransport

MAX_LINE = 1 << 16
"""Maximum size of a message, bytes."""
BUFFER_BYTES = 1 << 18
"""Number of bytes that wait for the slower side of a carried connection."""
RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which closing a socket resets its connection."""


class FirstLine(asyncio.Protocol):
    """Reads the first line, which says what a connection is for. Then the connection is given another protocol."""

    transport: TlsTransport
    is_connected = False
    """Whether the handshake is complete, and `transport` is set."""

    @property
    def is_relayed(self) -> bool:
        """Whether the connection goes through another host: it has one end of a pair of sockets, see `Carrier`."""
        return bool(self.transport.get_extra_info("socket").family == socket.AF_UNIX)

    def __init__(self) -> None:
        self.line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._data = b""

    def connection_made(self, transport: TlsTransport) -> None:  # type: ignore[override]
        self.transport, self.is_connected = transport, True

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\n")
        if end >= 0 or len(self._data) > MAX_LINE:
            self.transport.pause_reading()
            if not self.line.done():
                self.line.set_result(self._data[: max(0, end)].decode(errors="replace"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.line.done():
            self.line.set_exception(ConnectionResetError("closed"))
            self.line.exception()  # nobody may wait for it

    def hand_over(self, protocol: FirstLine | Lines | CarriedEnd) -> None:
        """Give the connection, and what came after the first line, to another protocol."""
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if rest := self._data.partition(b"\n")[2]:
            protocol.data_received(rest)

    def next_line(self) -> FirstLine:
        """Let another one read the next line of the connection."""
        following = FirstLine()
        self.hand_over(following)
        if not following.line.done():
            following.transport.resume_reading()
        return following


class Lines(asyncio.Protocol):
    """Messages, one a line. on_line: called with each; on_lost: called once, at the end.

    A connection with a line that is too long, or for which `on_line` raises ValueError, is closed.
    """

    def __init__(self, on_line: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_lost = on_lost
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        *lines, self._data = (self._data + data).split(b"\n")
        try:
            for line in lines:
                self._on_line(line)
            if len(self._data) > MAX_LINE:
                raise ValueError("a message without an end")
        except ValueError:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()


class CarriedEnd(asyncio.BufferedProtocol):
    """One end of a carried connection: writes what it reads to the other end, no faster than that one takes it.

    One of the two is encrypted. It gets its bytes by `data_received`, and the other one those of a program in a buffer.
    """

    def __init__(self) -> None:
        self._other: CarriedEnd | None = None
        self._transport: asyncio.Transport | None = None
        self._early = b""
        self._is_aborted = self._is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.set_write_buffer_limits(BUFFER_BYTES)
        transport.pause_reading()

    def join(self, other: CarriedEnd) -> None:
        """Connect two ends, both of which are connected."""
        for one, two in ((self, other), (other, self)):
            one._other = two
            two.write(one._early)
            one._early = b""
        for one, two in ((self, other), (other, self)):
            if one._is_lost:
                two.close()
            else:
                one.set_reading(enabled=True)

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER.view

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(READ_BUFFER.view[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        if self._other is None:
            self._early += data  # what was under way when reading was paused
            self.set_reading(enabled=False)  # again: uvloop begins to read after `connection_made`, which had paused it
        else:
            self._other.write(data)

    def write(self, data: bytes | memoryview) -> None:
        if data and self._transport is not None and not self._is_lost:
            self._transport.write(data)

    @property
    def transports(self) -> list[asyncio.Transport]:
        """The connections of both ends."""
        return [end._transport for end in (self, self._other) if end is not None and end._transport is not None]

    def set_reading(self, *, enabled: bool) -> None:
        if self._transport is not None and not self._is_lost and not self._transport.is_closing():
            (self._transport.resume_reading if enabled else self._transport.pause_reading)()

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.set_reading(enabled=False)

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.set_reading(enabled=True)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self._other is not None:
            self._other.abort() if error or self._is_aborted else self._other.close()

    def close(self) -> None:
        """Close the connection once what was written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close both ends at once. A program gets a reset, since it would take a mere end for that of the data."""
        if self._transport is None or self._is_lost:
            return
        self._is_aborted = True
        if not isinstance(self._transport, TlsTransport):
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._transport.abort()
