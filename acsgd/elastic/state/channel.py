"""A separate connection for the state of a rank that joins, so that it does not delay the messages of training.

Both ends have a thread. A message is its length, 8 bytes, whether it is compressed, 1 byte, and its bytes. Compression
is lossless: the first bytes of all fp32 numbers, then their second bytes, and so on, by zstd. It saves bytes of
exponents; those of mantissas are random.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Collection
from queue import SimpleQueue
from typing import NamedTuple

import torch
import zstandard

from acsgd.comm.addresses import LOOPBACK, is_virtual, listen_everywhere, resolve

_HEADER = struct.Struct("<Q?")
_TOKEN_BYTES = 16
TOKEN_TIMEOUT_S = 5.0
"""Time in which a process that connects must send the token, seconds."""
BUFFER_BYTES = 1 << 18
"""Socket buffer of the sender. More would only wait in front of a slow link."""
PART_S = 0.02
"""Time at the rate limit in which a part of a message is sent at once, seconds."""
MAX_COMPRESSED_RATE = 40e6
"""Rate below which compression saves more time than it takes, bytes per second: it saves a sixth, at 300 MB/s."""


class Address(NamedTuple):
    """Where a sender waits for its receiver."""

    host: str
    port: int
    token: str
    """Which the receiver sends first, so that no other process gets the state. Hexadecimal."""


class _End:
    """One end of a connection. Its thread ends when the connection fails, or at `close`."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.error: str | None = None
        """Why the connection has failed; None while it works."""
        self._timeout_s = timeout_s
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def close(self) -> None:
        """Cut the connection, and end the thread."""
        with self._changed:
            self._is_closed = True
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _keep(self, opened: socket.socket) -> socket.socket:
        """Let `close` cut a connection. Raises OSError if it was called."""
        with self._changed:
            if self._is_closed:
                opened.close()
                raise OSError("closed")
            self._sockets.append(opened)
        return opened

    def _transfer(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self._transfer()
        except (OSError, EOFError, zstandard.ZstdError) as error:
            with self._changed:
                if not self._is_closed:
                    self.error = f"{error}"
                self._changed.notify_all()


class StateSender(_End):
    """Sends messages to one receiver, in the background.

    host: address of this host that the receiver reaches; timeout_s: maximum time in which the receiver connects, and in
    which it takes a part of a message. Raises OSError if no port can be opened.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        super().__init__("state sender", timeout_s)
        self._rate = self._slow_rate = self._fast_bytes = math.inf
        self._messages = SimpleQueue[bytes | None]()
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = self._keep(_listen(host))
        self.address = Address(host, self._listener.getsockname()[1], self._token.hex())
        self._thread.start()

    @property
    def compresses(self) -> bool:
        """Whether a message that is sent now is compressed."""
        return self._rate < MAX_COMPRESSED_RATE

    def limit(self, rate: float, nbytes: float = math.inf, slow_rate: float = math.inf) -> None:
        """Send from now on `nbytes` at no more than `rate` bytes per second, and those after them at `slow_rate`.

        Sending goes on after `nbytes`, since the training step after which this is called again may wait for a message.
        """
        with self._changed:
            self._rate, self._slow_rate, self._fast_bytes = rate, min(rate, slow_rate), nbytes

    def send(self, message: bytes) -> None:
        """Send a message after those before it; does not wait."""
        self._messages.put(message)

    def close(self) -> None:
        super().close()
        self._messages.put(None)

    def _transfer(self) -> None:
        connection = self._accept()
        self._listener.close()
        free_at = 0.0
        while (message := self._messages.get()) is not None:
            if is_compressed := bool(message) and self.compresses:
                message = _compress(message)
            rest = memoryview(_HEADER.pack(len(message), is_compressed) + message)
            while rest:
                time.sleep(max(0.0, free_at - time.monotonic()))
                with self._changed:
                    rate = self._rate if self._fast_bytes > 0 else self._slow_rate
                    part = rest[: max(1, int(min(BUFFER_BYTES, rate * PART_S)))]
                    self._fast_bytes -= len(part)
                free_at = time.monotonic() + len(part) / rate
                connection.sendall(part)  # the timeout is that of each part
                rest = rest[len(part) :]

    def _accept(self) -> socket.socket:
        """Return the connection of the process that sends the token."""
        self._listener.settimeout(self._timeout_s)
        while True:
            connection = self._keep(self._listener.accept()[0])
            connection.settimeout(TOKEN_TIMEOUT_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            with contextlib.suppress(OSError, EOFError):
                if secrets.compare_digest(_read(connection, _TOKEN_BYTES), self._token):
                    connection.settimeout(self._timeout_s)
                    return connection
            connection.close()


class StateReceiver(_End):
    """Receives the messages of one sender, in the background.

    timeout_s: maximum time to connect, seconds; senders: pass on each message as soon as it has arrived.
    """

    def __init__(self, address: Address, timeout_s: float, senders: Collection[StateSender] = ()) -> None:
        super().__init__("state receiver", timeout_s)
        self._address = address
        self._senders = senders
        self._messages = deque[bytes]()
        self._thread.start()

    def take(self) -> bytes | None:
        """Return the next message that has arrived, None if there is none."""
        return self._messages.popleft() if self._messages else None

    def wait(self, within_s: float) -> bool:
        """Wait until a message has arrived or the connection has failed; return whether this is so."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._messages) or self.error is not None, within_s)

    def _transfer(self) -> None:
        address = self._address
        connection = self._keep(socket.create_connection((address.host, address.port), self._timeout_s))
        connection.settimeout(None)  # between two messages
        connection.sendall(bytes.fromhex(address.token))
        while True:
            length, is_compressed = _HEADER.unpack(_read(connection, _HEADER.size))
            message = _read(connection, length)
            if is_compressed:
                message = _decompress(message)
            for sender in self._senders:
                sender.send(message)
            with self._changed:
                self._messages.append(message)
                self._changed.notify_all()


def _listen(host: str) -> socket.socket:
    """Open a port: on the loopback interface if that is where the host is, else on all interfaces."""
    family, address = resolve(host, 0)[0]
    if address[0] in LOOPBACK or is_virtual(host):
        return socket.create_server(address, family=family)
    return listen_everywhere()


_WIDTH = 4
"""Bytes of an fp32 number."""


def _compress(message: bytes) -> bytes:
    """Compress a message of fp32 numbers. Any other message is only compressed less."""
    padding = -len(message) % _WIDTH
    padded = torch.frombuffer(bytearray(message + bytes(padding)), dtype=torch.uint8)
    planes = padded.view(-1, _WIDTH).t().contiguous()
    return bytes([padding]) + zstandard.ZstdCompressor(level=1).compress(planes.numpy().data)


def _decompress(compressed: bytes) -> bytes:
    """Inverse of `_compress`."""
    planes = torch.frombuffer(bytearray(zstandard.decompress(memoryview(compressed)[1:])), dtype=torch.uint8)
    message = planes.view(_WIDTH, -1).t().reshape(-1).numpy().tobytes()
    return message[: len(message) - compressed[0]]


def _read(connection: socket.socket, length: int) -> bytes:
    """Read a number of bytes. Raises EOFError if the connection ends before."""
    buffer = bytearray(length)
    view, filled = memoryview(buffer), 0
    while filled < length:
        read = connection.recv_into(view[filled:])
        if not read:
            raise EOFError("the connection was closed")
        filled += read
    return bytes(buffer)
