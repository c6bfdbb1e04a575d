"""TLS over a connection of asyncio, for a process that forwards what it receives.

asyncio's own TLS makes about twice as many calls per message. And where a link is limited, packets come one by one, and
each would wake the process. Here the system wakes it for the rest of a record at once, whose length is in its header,
and for what follows it: what is written at once is divided so that the length of each record says how much that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from typing import Any

HEADER_BYTES = 5
"""Size of what precedes a record of TLS; its last two bytes are the number of bytes that follow."""
RECORD_BYTES, OVERHEAD_BYTES = 1 << 14, 17
"""Maximum number of bytes in a record of TLS, and by how many it is longer once it is encrypted."""
MAX_FOLLOWING = 15
SHORT_BYTES = RECORD_BYTES - MAX_FOLLOWING
"""A record with n more bytes than these is followed by at least n times RECORD_BYTES that were written with it.

What divides its bytes otherwise would leave the receiver waiting: a change needs a higher PROTOCOL."""
MAX_AWAITED = 1 << 17
"""Number of bytes for which the system waits at most before it wakes this process."""
WINDOW_SHARE = 4
"""Beyond a record, a WINDOW_SHARE-th of the receive window is awaited at most. A window that is full before it is
read does not grow: at 100 ms and 100 Mbit/s, a connection that awaited 128 KB from the start had 10 Mbit/s."""
WINDOW = struct.Struct("=64xI")
"""Where Linux's tcp_info has it: tcpi_rcv_ssthresh."""
MAX_AWAITED_OF_RELAY = RECORD_BYTES
"""The same where they are sent on over another link, on which they would be late."""
MAX_PACKET_BYTES = 1 << 14
"""Size of packets from which on nothing is awaited, as between processes of one machine: a sender whose next packet is
larger than what is left of the window would wait, too."""
CLOSE_S = 30.0
"""Time for the other end to close a connection that this one has closed, seconds."""


class ReadBuffer(threading.local):
    """What a thread reads into, one connection after another, each of which uses it up at once.

    A protocol without a buffer gets each message in a new one of 256 KB, for which the allocator maps memory each time:
    a read of 1 KB takes 19 us, with a buffer 3.
    """

    def __init__(self) -> None:
        self.view = memoryview(bytearray(1 << 18))


READ_BUFFER = ReadBuffer()


class Records:
    """Counts the records of TLS in a stream of bytes."""

    def __init__(self) -> None:
        self.missing = 0
        """Number of bytes until the present record ends; 0 between two records, and within a header."""
        self.following = 0
        """Number of bytes that certainly follow the present or latest record."""
        self._header = b""
        """The part of a header that has come."""

    def count(self, data: bytes | memoryview) -> int:
        """Return how many records end in the next bytes of the stream."""
        data, end, ended = self._header + data if self._header else data, self.missing, 0
        while end <= len(data):
            ended += end > 0
            header = bytes(data[end : end + HEADER_BYTES])
            if len(header) < HEADER_BYTES:
                self.missing, self._header = 0, header
                return ended
            length = header[3] << 8 | header[4]
            end += HEADER_BYTES + length
            more = length - OVERHEAD_BYTES - SHORT_BYTES
            self.following = more * RECORD_BYTES if 0 < more <= MAX_FOLLOWING else 0
        self.missing, self._header = end - len(data), b""
        return ended


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """Encrypts what a protocol sends over a connection of asyncio, of which it is the protocol.

    protocol: gets the connection once the handshake is complete. It is lost with an error unless an end has closed it
    by TLS's close_notify: somebody on the path can end the connection of TCP after any byte.
    """

    def __init__(self, context: ssl.SSLContext, protocol: asyncio.BaseProtocol, *, server_side: bool) -> None:
        super().__init__()
        self._protocol: Any = protocol
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._encryption = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._records = Records()
        self.max_awaited = MAX_AWAITED
        self._packet_bytes = 0
        self._low_water = 1
        self._is_secured = self._is_closing = False
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self._error: Exception | None = None
        self._handshake_ended = asyncio.Event()

    async def handshake(self) -> None:
        """Wait until the handshake is complete. Raises ssl.SSLError, OSError."""
        await self._handshake_ended.wait()
        if self._error is not None:
            raise self._error

    # The protocol of the connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport, self._socket = transport, transport.get_extra_info("socket")
        if self._socket.family != socket.AF_UNIX:
            self._packet_bytes = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        self._continue_handshake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER.view

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closing:
            return
        data = READ_BUFFER.view[:nbytes]
        self._incoming.write(data)
        ended = self._records.count(data)
        if self._is_secured or self._continue_handshake():
            self._read(ended)
            self._await_bytes()

    def _continue_handshake(self) -> bool:
        """Return whether it is complete."""
        try:
            self._encryption.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._flush()
        self._is_secured = True
        self._handshake_ended.set()
        self._protocol.connection_made(self)
        return True

    def _read(self, records: int) -> None:
        """Hand on what is in a number of complete records."""
        parts = list[bytes]()
        try:
            for _ in range(records):
                parts.append(self._encryption.read(RECORD_BYTES))
        except ssl.SSLWantReadError:  # a record was of TLS itself
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._flush()
        is_over = bool(parts) and not parts[-1]
        if data := parts[0] if len(parts) == 1 else b"".join(parts):
            self._protocol.data_received(data)
        if is_over:
            self.close()

    def _await_bytes(self) -> None:
        """Let the system wake this process for all that certainly comes, not for each packet of it."""
        if not 0 < self._packet_bytes < MAX_PACKET_BYTES:
            return
        awaited = min(self._records.missing + self._records.following, self.max_awaited)
        if awaited > RECORD_BYTES:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, WINDOW.size)
            awaited = max(RECORD_BYTES, min(awaited, WINDOW.unpack(info)[0] // WINDOW_SHARE))
        low_water = awaited if awaited > self._packet_bytes else 1
        if low_water != self._low_water and not self.is_closing():
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._transport.abort()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        error = self._error or error
        if error is None and not self._is_closing:
            error = ConnectionResetError("closed without close_notify")
        self._is_closing = True
        if self._is_secured:
            self._protocol.connection_lost(error)
        else:
            self._error = error or ConnectionResetError("closed")
            self._handshake_ended.set()

    # The transport of the protocol.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not data or self._is_closing:
            return
        rest = memoryview(data)
        while len(rest) > SHORT_BYTES:
            more = max(0, min(MAX_FOLLOWING, (len(rest) - RECORD_BYTES) // RECORD_BYTES))
            self._encryption.write(rest[: SHORT_BYTES + more])
            rest = rest[SHORT_BYTES + more :]
        self._encryption.write(rest)
        self._transport.write(self._outgoing.read())

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._encryption if name == "ssl_object" else self._transport.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once what was written has been sent, and the other end has closed it, too.

        What comes meanwhile is dropped. A socket that is closed before it has been read resets the connection, and what
        was sent may then be lost.
        """
        if self.is_closing():
            return
        self._is_closing = True
        with contextlib.suppress(ssl.SSLError):  # which the other end has not answered
            self._encryption.unwrap()
        self._flush()
        self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)

    def abort(self) -> None:
        self._transport.abort()
