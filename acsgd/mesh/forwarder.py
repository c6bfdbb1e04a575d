"""The forwarder of a host: it opens the ports of all other hosts here, and carries what connects to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from acsgd.comm.addresses import join_address
from acsgd.mesh.carrier import OUTDATED, Carrier
from acsgd.mesh.identity import HostIdentity, StrangerError, VerifiedHost
from acsgd.mesh.messages import (
    PROTOCOL,
    Acquaintance,
    Greeting,
    Misled,
    Open,
    Opened,
    Ping,
    Ports,
    Rotate,
    Rotated,
    from_line,
    to_line,
)
from acsgd.mesh.mirrors import PortExchange
from acsgd.mesh.peers import HEARD_S, PING_S, MeshPeer
from acsgd.mesh.rotation import SecretRotation
from acsgd.mesh.streams import FirstLine, Lines
from acsgd.mesh.tls import HANDSHAKE_S, OTHER_SECRET, Entrance, dial

log = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Time without a message after which the connection to a host is replaced, seconds. Carried connections stay: whether a
host counts as lost is decided by the programs, as without a mesh."""
SCAN_S = 1.0
"""Time between two looks at which ports listen; a program that opens one has it looked for at once, by `publish`."""
REDIAL_S = 0.5
CONNECT_S = 5.0
"""Time after which a host is dialed again, seconds."""
REFUSALS, REFUSED_S = 3, 0.05
"""Number of refused connections in a row after which the process of a host has ended, since one may be a forged reset,
and the time between two, seconds."""
ACQUAINT_S = 10.0
"""Interval at which connected hosts get each other's addresses again, since dialing may have failed, seconds."""
FORGET_S = 600.0
"""Time after which a host is forgotten to which there is no connection, seconds."""
EQUAL = "has the virtual address of this host, by chance: start this host again"
SHARED = "is the virtual address of another host, too, by chance: start this host again"
ASK_S = 2.0
"""Time for the answer whether a virtual address is taken, seconds."""
OTHER_PROTOCOL = "has another version of the mesh: install the same version of acsgd on all hosts"


class Forwarder:
    """Carries connections between this host and the others of a run. All methods are called in its event loop.

    announced: host:port at which other hosts dial this one; None = nowhere. daemon_port: of this host's daemon.
    dialed: addresses of hosts to connect to. on_endpoint: called with such an address and the address of the daemon
    there, once it is known. on_rejected: called with an address and why the process there cannot be of this mesh.
    on_note: called with sentences for the user. secret_file: file of the secret; None if it has none.
    """

    def __init__(
        self,
        identity: HostIdentity,
        *,
        secret_file: Path | None,
        announced: str | None,
        daemon_port: int,
        dialed: tuple[str, ...],
        on_endpoint: Callable[[str, str], None],
        on_rejected: Callable[[str, str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self.identity = identity
        self.entrance = Entrance(identity, self._serve)
        self._announced = announced
        self._daemon_port = daemon_port
        self._dialed = dialed
        self._on_endpoint = on_endpoint
        self._on_rejected = on_rejected
        self._on_note = on_note
        self._peers: dict[str, MeshPeer] = {}
        """By virtual address."""
        self._carrier = Carrier(identity, self._peers, self._serve, self._spawn)
        self.port_exchange = PortExchange(
            identity.address, daemon_port, self._peers, self._carrier.carry, on_rejected, on_note
        )
        self.rotation = SecretRotation(identity, secret_file, self._peers, self._end_outdated, on_note)
        self._meeting: set[str] = set()
        """Virtual addresses of hosts, named by others, to which a connection is being opened."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self, listener: socket.socket | None) -> None:
        """Begin. listener: accepts the connections of other hosts."""
        if listener is not None:
            self.entrance.listen(listener)
        for address in self._dialed:
            self._spawn(self._find(address))
        self._spawn(self._tick())

    def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        self.entrance.close()
        self.port_exchange.close()
        self._carrier.close()
        for peer in self._peers.values():
            if peer.lines is not None:
                peer.lines.transport.abort()

    def has_ended(self, address: str, port: int) -> bool:
        """Return whether the process that listened at a port of another host has ended. Can be called in any thread.

        A refused connection does not show that: its port may not be open here yet.
        """
        peer = self._peers.get(address)
        return peer is not None and (peer.ended or (peer.lines is not None and port not in peer.ports.ports))

    # Connections to other hosts, for messages.

    async def _find(self, address: str) -> None:
        """Connect to the host at an address of --rdzv-endpoint, and again whenever it is another one."""
        found: MeshPeer | None = None
        while True:
            if found is None or found.lines is None:
                try:
                    found = await self._connect(address, None)
                except StrangerError as error:
                    self._on_rejected(address, str(error))
                except (OSError, TimeoutError) as error:
                    log.info("%s: %s", address, error)
            await asyncio.sleep(REDIAL_S)

    async def _connect(self, address: str | None, expected: str | None) -> MeshPeer | None:
        """Dial a host and exchange greetings; return it, None if it is this host. Raises OSError, TimeoutError.

        address: None = through another member, to the expected host.
        """
        async with asyncio.timeout(CONNECT_S):
            if address is not None:
                connection, member = await dial(self.identity, address, expected)
            else:
                assert expected is not None
                connection, member = await self._carrier.dial_through_member(expected)
        if member.address == self.identity.address:
            connection.transport.abort()
            if member.key != self.identity.key:
                raise StrangerError(EQUAL)
            return None
        self.rotation.notice(connection.transport)
        try:
            connection.transport.write(b"messages\n" + to_line(self._greeting()))
            async with asyncio.timeout(HANDSHAKE_S):
                greeting = _read_greeting(await connection.line)
        except (OSError, TimeoutError, asyncio.CancelledError):
            connection.transport.abort()
            raise
        self._greeted(connection, member, greeting, is_dialer=True, dialed=address)
        return self._peers.get(member.address)

    def _greeting(self) -> Greeting:
        return Greeting(PROTOCOL, self._announced, self._daemon_port, self.port_exchange.ports)

    def _greeted(
        self,
        connection: FirstLine,
        member: VerifiedHost,
        greeting: Greeting,
        *,
        is_dialer: bool,
        dialed: str | None = None,
    ) -> None:
        """Keep a connection whose other end has sent its greeting, unless there is another one."""
        if self.identity.secret_of(connection.transport) is None:
            raise ConnectionResetError(OUTDATED)
        peer = self._peer_of(connection, member)
        if dialed is not None:
            self._on_endpoint(dialed, join_address(member.address, greeting.daemon_port))
        if peer.lines is not None and self._prefers_old(peer, connection, is_dialer=is_dialer):
            connection.transport.close()
            return
        is_new, is_relayed = not peer.connected.is_set(), connection.is_relayed
        announced = None if is_relayed else greeting.announced
        peer.announced, peer.is_dialer, peer.is_relayed, peer.ended = announced, is_dialer, is_relayed, False
        self._attach(peer, connection)
        peer.daemon_port, peer.ports = greeting.daemon_port, Ports(0, greeting.ports)
        self._introduce(peer)
        if is_new:
            place = "through another host" if is_relayed else announced or "which has no port"
            self._on_note(f"mesh: {member.address} is {member.name} ({place})")
        if announced is not None and not is_dialer:
            self._spawn(self._verify(peer, announced))

    def _peer_of(self, connection: FirstLine, member: VerifiedHost) -> MeshPeer:
        """Return the host of a connection. Raises ConnectionError if another one has its address."""
        peer = self._peers.setdefault(member.address, MeshPeer(member))
        if peer.member.key != member.key:
            if peer.lines is not None:
                connection.transport.write(to_line(Misled(member.address, SHARED)))
                connection.transport.close()
                raise ConnectionError(f"{member.address} is taken")
            peer.member = member
        return peer

    def _prefers_old(self, peer: MeshPeer, connection: FirstLine, *, is_dialer: bool) -> bool:
        """Return whether the connection that a host has is kept, and not a new one: both ends decide alike."""
        if connection.is_relayed != peer.is_relayed:
            return connection.is_relayed
        first = min(self.identity.address, peer.member.address)  # of two that dial each other, its connection is kept
        dialer = self.identity.address if is_dialer else peer.member.address
        return dialer != first and peer.is_dialer != is_dialer

    def _attach(self, peer: MeshPeer, connection: FirstLine) -> None:
        """Use a new connection for the messages of a host, in place of the one that it may have."""
        if peer.heard_at and (outage_s := time.monotonic() - peer.heard_at) > HEARD_S:
            self._spawn(self._carrier.end_stuck(peer.member.address, outage_s))
        lines = Lines(lambda line: self._receive(peer, line), lambda: self._lost(peer, lines))
        old, peer.lines, peer.heard_at = peer.lines, lines, time.monotonic()
        connection.hand_over(lines)
        if old is not None:
            old.transport.abort()
        peer.connected.set()

    def _introduce(self, peer: MeshPeer) -> None:
        """Exchange ports with a host that has been connected, and tell it and the other hosts of each other."""
        self.port_exchange.meet(peer)
        self.rotation.greet(peer)
        for other in self._peers.values():
            if other is not peer and other.lines is not None:
                peer.acquaint(other)
                if other.announced is None:  # it has to dial the newcomer
                    other.acquaint(peer)

    async def _serve(self, connection: FirstLine, member: VerifiedHost, line: str) -> None:
        """Do what another host has opened a connection for. Raises OSError, ValueError."""
        self.rotation.notice(connection.transport)
        match line.split():
            case ["messages"]:
                connection = connection.next_line()
                connection.transport.write(to_line(self._greeting()))
                async with asyncio.timeout(HANDSHAKE_S):
                    greeting = _read_greeting(await connection.line)
                self._greeted(connection, member, greeting, is_dialer=False)
            case ["check"]:
                connection.transport.close()
            case ["address"]:
                peer = self._peers.get(member.address)
                is_free = peer is None or peer.lines is None or peer.member.key == member.key
                connection.transport.write(b"free\n" if is_free else b"taken\n")
                connection.transport.close()
            case ["port", port]:
                await self._deliver(connection, int(port))
            case ["relay", address]:
                await self._carrier.relay(connection, address)
            case ["relayed"]:
                await self._carrier.accept_relayed(connection, self.entrance)
            case ["requested", number]:
                self._carrier.take_requested(member.address, int(number), connection)
            case _:
                raise ValueError(f"{line!r:.80} is unknown")

    async def _verify(self, peer: MeshPeer, announced: str) -> None:
        """Check that the address that a host announces leads there."""
        try:
            connection, _ = await dial(self.identity, announced, peer.member.address)
            connection.transport.write(b"check\n")
            connection.transport.close()
        except StrangerError as error:
            peer.send(Misled(announced, str(error)))
        except (OSError, TimeoutError) as error:
            log.info("%s, of %s: %s", announced, peer.member.address, error)
            peer.announced = None  # it is behind a router; it dials this host

    def _receive(self, peer: MeshPeer, line: bytes) -> None:
        peer.heard_at = time.monotonic()
        match from_line(line):
            case Ports() as ports:
                peer.ports = ports
                self.port_exchange.mirror(peer)
            case Opened() as opened:
                self.port_exchange.take(peer, opened)
            case Acquaintance(address, announced):
                self._meet(address, announced)
            case Open(number):
                self._carrier.dial_back(peer, number)
            case Misled(announced, problem):
                self._on_rejected(announced, problem)
            case Rotate() as request:
                self.rotation.take(peer, request)
            case Rotated() as answer:
                self.rotation.answered(peer, answer)

    def _meet(self, address: str, announced: str | None) -> None:
        """Connect to a host that another one has named, directly if it announces an address."""
        if address != self.identity.address and address not in self._meeting:
            self._meeting.add(address)
            self._spawn(self._try_to_connect(announced, address))

    async def _try_to_connect(self, announced: str | None, address: str) -> None:
        if announced is None:
            await asyncio.sleep(REDIAL_S)  # it may be able to dial this host
        peer = self._peers.get(address)
        if peer is None or peer.lines is None or (peer.is_relayed and announced is not None):
            with contextlib.suppress(OSError, TimeoutError):
                await self._connect(announced, address)
        self._meeting.discard(address)

    def _lost(self, peer: MeshPeer, lines: Lines) -> None:
        if peer.lines is lines and not self._is_closed:
            peer.lines = None
            peer.connected.clear()
            self.port_exchange.lose()
            self._spawn(self._find_again(peer))

    async def _find_again(self, peer: MeshPeer) -> None:
        """Connect to a host again whose connection has ended, or notice that its process has.

        Only refused connections show that. Until then its ports stay open here: the host may be cut off, and a program
        would take a port that refuses connections for the end of the host.
        """
        refusals = 0
        while peer.lines is None and self._peers.get(peer.member.address) is peer:
            if peer.announced is None and not peer.is_relayed:
                return  # it dials this host
            try:
                await self._connect(peer.announced, peer.member.address)
            except StrangerError as error:  # another process has its place
                refusals = REFUSALS
                if str(error) == OTHER_SECRET:
                    self._on_note(f"mesh: {peer.member.address} ({peer.member.name}) {error}")
            except ConnectionRefusedError:
                refusals += 1
            except (OSError, TimeoutError) as error:
                refusals = 0
                log.info("%s: %s", peer.announced, error)
            if refusals == REFUSALS and peer.lines is None:
                peer.ended, peer.ports = True, Ports(0, ())
                self.port_exchange.mirror(peer)
                return
            await asyncio.sleep(REFUSED_S if refusals else REDIAL_S)

    async def _tick(self) -> None:
        for count in itertools.count():
            now = time.monotonic()
            for peer in list(self._peers.values()):
                silence_s = now - peer.heard_at
                if peer.lines is not None and silence_s > SILENCE_S:
                    peer.lines.transport.abort()
                elif peer.lines is None and silence_s > FORGET_S:
                    peer.ports = Ports(0, ())
                    self.port_exchange.mirror(peer)
                    del self._peers[peer.member.address]
                peer.send(Ping())
            if count % round(ACQUAINT_S / PING_S) == 0:
                connected = [peer for peer in self._peers.values() if peer.lines is not None]
                for peer, other in itertools.permutations(connected, 2):
                    peer.acquaint(other)
            if count % round(SCAN_S / PING_S) == 0:
                self.port_exchange.scan()
                for peer in self._peers.values():
                    self.port_exchange.mirror(peer)  # what had a port here may have ended
            await asyncio.sleep(PING_S)

    def _end_outdated(self) -> None:
        """End the connections to hosts that have proved a secret which is not accepted any more."""
        for peer in self._peers.values():
            if peer.lines is not None and self.identity.secret_of(peer.lines.transport) is None:
                peer.lines.transport.abort()
        self._carrier.end_outdated()

    async def _deliver(self, connection: FirstLine, port: int) -> None:
        """Connect what another host carries to a port of this host. Raises OSError."""
        if port not in self.port_exchange.ports:
            self.port_exchange.scan()
        if port not in self.port_exchange.ports:
            raise ConnectionRefusedError(f"nothing listens at port {port}")
        try:
            await self._carrier.deliver(connection, port)
        except OSError:
            self.port_exchange.scan()
            raise

    # Tasks.

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("mesh: %s", error, exc_info=error)


async def is_taken(identity: HostIdentity, endpoints: Iterable[str]) -> bool:
    """Return whether another host has drawn the same of the 65,536 virtual addresses, as far as endpoints know."""

    async def is_taken_at(endpoint: str) -> bool:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                connection, member = await dial(identity, endpoint)
                with contextlib.closing(connection.transport):
                    connection.transport.write(b"address\n")
                    return member.address == identity.address or await connection.line == "taken"
        return False

    return any(await asyncio.gather(*map(is_taken_at, endpoints)))


def _read_greeting(line: str) -> Greeting:
    """Return the greeting of another host. Raises StrangerError for that of another version."""
    with contextlib.suppress(ValueError):
        greeting = from_line(line.encode())
        if isinstance(greeting, Greeting) and greeting.protocol == PROTOCOL:
            return greeting
    raise StrangerError(OTHER_PROTOCOL)
