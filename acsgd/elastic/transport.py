"""Signed messages between the daemons of a run: one TCP connection to each, for the messages in that direction."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from acsgd.elastic.messages import MAX_BYTES, Host, Message, seal, unseal

log = logging.getLogger(__name__)

GREETING_BYTES = 64


@dataclass
class _Outgoing:
    """A connection to another daemon."""

    writer: asyncio.StreamWriter
    name: str
    """Random text that the receiver chose."""
    number: int = 0


class Connections:
    """The connections of one daemon.

    A receiver greets each connection with a random text, which is signed with every message: what was recorded on
    another connection is refused. A connection with a wrong signature is closed without an answer.

    sender: returns this host; on_message: called with each message and its sender; on_refused: called with an address
    at which no process listens, and the id of the host that was expected there.
    """

    def __init__(
        self,
        run: str,
        secret: bytes,
        *,
        sender: Callable[[], Host],
        on_message: Callable[[Host, Message], None],
        on_refused: Callable[[str, str | None], None],
        connect_timeout_s: float,
    ) -> None:
        self._run = run
        self._secret = secret
        self._sender = sender
        self._on_message = on_message
        self._on_refused = on_refused
        self._connect_timeout_s = connect_timeout_s
        self._outgoing: dict[str, _Outgoing] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._expected: dict[str, str | None] = {}
        self._server: asyncio.Server | None = None
        self._watching: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def listen(self, address: str) -> None:
        """Listen at host:port: on the loopback interface if that is where the host is, else on all interfaces."""
        host, _, port = address.rpartition(":")
        interface = host if host in ("localhost", "127.0.0.1", "::1") else None
        self._server = await asyncio.start_server(self._serve, interface, int(port), limit=MAX_BYTES)

    def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for outgoing in self._outgoing.values():
            outgoing.writer.close()

    async def send(self, address: str, message: Message, host_id: str | None) -> None:
        """Send a message, without waiting for it to arrive. It is dropped if the host cannot be reached.

        host_id: of the host that is expected at the address, for `on_refused`.
        """
        self._expected[address] = host_id
        lock = self._connecting.setdefault(address, asyncio.Lock())
        if lock.locked() and address not in self._outgoing:
            return  # the host does not answer at present; the protocol repeats what matters
        async with lock:
            outgoing = self._outgoing.get(address) or await self._connect(address)
            if outgoing is None:
                return
            if outgoing.writer.transport.get_write_buffer_size() > MAX_BYTES:
                return
            outgoing.number += 1
            line = seal(self._secret, self._run, self._sender(), outgoing.name, outgoing.number, message)
            with contextlib.suppress(OSError):
                outgoing.writer.write(line)

    async def _connect(self, address: str) -> _Outgoing | None:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                reader, writer = await asyncio.open_connection(host, int(port))
                greeting = await reader.readline()
        except ConnectionRefusedError:
            self._on_refused(address, self._expected[address])
            return None
        except (OSError, TimeoutError, ValueError):
            return None
        if not greeting or len(greeting) > GREETING_BYTES:
            writer.close()
            return None
        outgoing = self._outgoing[address] = _Outgoing(writer, greeting.decode(errors="replace").strip())
        self._watching.add(watch := asyncio.create_task(self._watch(address, reader)))
        watch.add_done_callback(self._watching.discard)
        return outgoing

    async def _watch(self, address: str, reader: asyncio.StreamReader) -> None:
        """When the other end closes a connection, find out whether its process has ended."""
        with contextlib.suppress(OSError, ValueError):
            while await reader.read(GREETING_BYTES):
                pass
        outgoing = self._outgoing.pop(address, None)
        if outgoing is not None and not self._is_closed:
            outgoing.writer.close()
            async with self._connecting[address]:
                if address not in self._outgoing:
                    await self._connect(address)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, number = secrets.token_hex(16), 0
        try:
            writer.write(f"{name}\n".encode())
            while line := await reader.readline():
                envelope = unseal(self._secret, line)
                if envelope.run != self._run:
                    raise ValueError(f"it is of run {envelope.run!r:.50}")
                if envelope.connection != name or envelope.number <= number:
                    raise ValueError("it was sent before")
                number = envelope.number
                self._on_message(envelope.sender, envelope.message())
        except asyncio.CancelledError:
            pass  # the daemon ends
        except (OSError, ValueError) as error:  # a port that is open to others gets garbage
            log.info("closed a connection from %s: %s", writer.get_extra_info("peername"), error)
        finally:
            writer.close()
