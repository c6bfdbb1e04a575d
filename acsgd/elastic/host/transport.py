"""Signed messages between the daemons of a run: one TCP connection to each, for the messages in that direction."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from acsgd.comm.addresses import LOOPBACK, is_virtual, split_address
from acsgd.elastic.host.files import FileRequest, FileService, PartCodes
from acsgd.elastic.membership.messages import (
    MAX_BYTES,
    PROTOCOL,
    DaemonMessage,
    Host,
    SharedFiles,
    SignatureError,
    seal,
    unseal,
)
from acsgd.io.files.fields import from_json
from acsgd.mesh.ports import is_own_connection

log = logging.getLogger(__name__)

GREETING_BYTES = 64
LONGEST_CONNECT_S = 8.0
"""Longest time for a connection in a mesh: one through a relay takes a dozen round trips, seconds."""
RETRY_S = 0.1
"""Time after which a connection is opened again that was refused by a host of a mesh which has not ended, seconds."""
REFUSED = b"refused\n"
"""Answer to a message of another run."""
OTHER_RUN = "belongs to another run: give all hosts the same --rdzv-id and the same ACSGD_SECRET"
OTHER_PROTOCOL = "speaks another version of the protocol: install the same version of acsgd on all hosts"
OTHER_PROGRAM = "is no daemon of acsgd: give another port in --rdzv-endpoint"


@dataclass
class _Outgoing:
    """A connection to another daemon."""

    writer: asyncio.StreamWriter
    name: str
    """Random text that the receiver chose."""
    is_in_view: bool
    """Whether the receiver was in a view when it was connected."""
    number: int = 0


@dataclass(frozen=True)
class Rejection:
    """Why the process at an address does not take messages of this host."""

    address: str
    problem: str
    is_in_view: bool
    """Whether that process is a host in a view."""


class Connections:
    """The connections of one daemon.

    A receiver greets each connection with the version of the protocol, whether it is in a view, and a random text,
    which is signed with every message: what was recorded on another connection is refused. No clock is involved. A
    connection with a wrong signature is closed.

    sender: returns this host; is_in_view: returns whether this host is in a view; on_message: called with each message
    and its sender; files: returns the files that members get, and the addresses of known daemons; on_refused: called
    with an address at which no process listens, and the id of the host that was expected there; on_rejected: called
    with each rejection; has_ended: returns whether the process at an address that refuses connections has ended.
    """

    def __init__(
        self,
        run: str,
        secret: bytes,
        *,
        sender: Callable[[], Host],
        is_in_view: Callable[[], bool],
        on_message: Callable[[Host, DaemonMessage], None],
        files: Callable[[], tuple[SharedFiles, Collection[str]]],
        on_refused: Callable[[str, str | None], None],
        on_rejected: Callable[[Rejection], None],
        connect_timeout_s: float,
        has_ended: Callable[[str], bool] = lambda address: True,
    ) -> None:
        self._run = run
        self._secret = secret
        self._sender = sender
        self._is_in_view = is_in_view
        self._on_message = on_message
        self._files = files
        self._file_service = FileService()
        self._on_refused = on_refused
        self._on_rejected = on_rejected
        self._connect_timeout_s = connect_timeout_s
        self._has_ended = has_ended
        self._outgoing: dict[str, _Outgoing] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._connect_s: dict[str, float] = {}
        """By address, the time for the next attempt, if the latest one in a mesh took too long: twice its time."""
        self._expected: dict[str, str | None] = {}
        self._server: asyncio.Server | None = None
        self._watching: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def listen(self, address: str) -> None:
        """Listen at host:port: there alone on the loopback interface or in a mesh, else on all interfaces."""
        host, port = split_address(address)
        interface = host if host in LOOPBACK or is_virtual(host) else None
        self._server = await asyncio.start_server(self._serve, interface, port, limit=MAX_BYTES)

    def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for outgoing in self._outgoing.values():
            outgoing.writer.close()

    async def send(self, address: str, message: DaemonMessage, host_id: str | None) -> None:
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
            if outgoing.writer.is_closing() or outgoing.writer.transport.get_write_buffer_size() > MAX_BYTES:
                return
            outgoing.number += 1
            line = seal(self._secret, self._run, self._sender(), outgoing.name, outgoing.number, message)
            with contextlib.suppress(OSError):
                outgoing.writer.write(line)

    async def _connect(self, address: str) -> _Outgoing | None:
        connect_s = self._connect_s.pop(address, self._connect_timeout_s)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(connect_s):
                reader, writer = await self._open(address)
                greeting = await reader.readline()
        except ConnectionRefusedError:
            self._on_refused(address, self._expected[address])
            return None
        except (OSError, TimeoutError, ValueError) as error:
            if writer is not None:
                writer.close()
            if isinstance(error, TimeoutError) and is_virtual(split_address(address)[0]):
                self._connect_s[address] = min(2 * connect_s, LONGEST_CONNECT_S)
            return None
        match greeting.decode(errors="replace").split():
            case ["acsgd", protocol, ("member" | "candidate") as state, name] if protocol == str(PROTOCOL):
                outgoing = self._outgoing[address] = _Outgoing(writer, name, state == "member")
            case parts:
                writer.close()
                if parts:
                    problem = OTHER_PROTOCOL if parts[0] == "acsgd" else OTHER_PROGRAM
                    self._on_rejected(Rejection(address, problem, is_in_view="member" in parts))
                return None
        self._watching.add(watch := asyncio.create_task(self._watch(address, reader)))
        watch.add_done_callback(self._watching.discard)
        return outgoing

    async def _open(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to an address. Raises ConnectionRefusedError if its process has ended, OSError, ValueError."""
        while True:
            try:
                return await asyncio.open_connection(*split_address(address))
            except ConnectionRefusedError:
                if self._has_ended(address):
                    raise
            await asyncio.sleep(RETRY_S)

    async def _watch(self, address: str, reader: asyncio.StreamReader) -> None:
        """When the other end closes a connection, find out why, and whether its process has ended."""
        answer = b""
        with contextlib.suppress(OSError, ValueError):
            while received := await reader.read(GREETING_BYTES):
                answer = received
        outgoing = self._outgoing.pop(address, None)
        if outgoing is not None and answer == REFUSED:
            self._on_rejected(Rejection(address, OTHER_RUN, outgoing.is_in_view))
        if outgoing is not None and not self._is_closed:
            outgoing.writer.close()
            async with self._connecting[address]:
                if address not in self._outgoing:
                    await self._connect(address)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, number = secrets.token_hex(16), 0
        try:
            connection = writer.get_extra_info("socket")
            here = connection.getsockname()
            if is_virtual(here[0]) and not is_own_connection(connection.getpeername(), here):
                raise ConnectionRefusedError("it is of another user")
            state = "member" if self._is_in_view() else "candidate"
            writer.write(f"acsgd {PROTOCOL} {state} {name}\n".encode())
            while line := await reader.readline():
                envelope = unseal(self._secret, line)
                if envelope.run != self._run:
                    raise SignatureError(f"it is of run {envelope.run!r:.50}")
                if envelope.connection != name or envelope.number <= number:
                    raise ValueError("it was sent before")
                number = envelope.number
                if envelope.kind == FileRequest.__name__:
                    await self._send_file(from_json(FileRequest, envelope.body), writer)
                else:
                    self._on_message(envelope.sender, envelope.message())
        except asyncio.CancelledError:
            pass  # the daemon ends
        except (OSError, TimeoutError, ValueError) as error:  # a port that is open to others gets garbage
            log.info("closed a connection from %s: %s", writer.get_extra_info("peername"), error)
            if isinstance(error, SignatureError):
                writer.write(REFUSED)
        finally:
            writer.close()

    async def _send_file(self, request: FileRequest, writer: asyncio.StreamWriter) -> None:
        """Answer a request of a member for a file. Raises OSError, TimeoutError."""
        shared, hosts = self._files()
        answer, content = await self._file_service.answer(request, shared, hosts)
        writer.write(seal(self._secret, self._run, self._sender(), request.nonce, 1, answer))
        codes = PartCodes(self._secret, request.nonce)
        await self._file_service.send(writer, answer.bytes, content, codes, shared.rate)
