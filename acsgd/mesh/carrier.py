"""How one connection of a program is carried to another host, and delivered there.

To a host that cannot be dialed, it is one that this host has requested it to dial. Where neither can dial the other,
it goes through another member, which relays the bytes of a TLS connection between the two. So the relay can neither
read nor change what they send.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from weakref import WeakSet

from acsgd.mesh.identity import HostIdentity, StrangerError, VerifiedHost
from acsgd.mesh.messages import Open
from acsgd.mesh.peers import MeshPeer
from acsgd.mesh.streams import CarriedEnd, FirstLine
from acsgd.mesh.tls import HANDSHAKE_S, Entrance, OnMember, dial, member_of, unanswered_s
from acsgd.mesh.transport import MAX_AWAITED_OF_RELAY

log = logging.getLogger(__name__)

OPEN_S, RETRY_S = 10.0, 0.2
"""Time in which a connection to another host is tried again if its link fails, and between two attempts, seconds."""
SLACK_S = 1.0
"""Time for what TCP sends again after an outage to be answered, seconds."""
OUTDATED = "the secret of the run was replaced"


class Carrier:
    """Carries connections between programs of this host and of others: one connection between the hosts for each.

    peers: the other hosts by virtual address. on_member: serves a connection of another host, after its first line.
    spawn: runs a coroutine as a task.
    """

    def __init__(
        self,
        identity: HostIdentity,
        peers: Mapping[str, MeshPeer],
        on_member: OnMember,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._identity = identity
        self._peers = peers
        self._on_member = on_member
        self._spawn = spawn
        self._numbers = itertools.count(1)
        self._awaited: dict[tuple[str, int], asyncio.Future[FirstLine]] = {}
        """Connections that other hosts were requested to dial, by the virtual address of the host."""
        self._carried: WeakSet[CarriedEnd] = WeakSet()

    def carry(self, address: str, port: int, connection: socket.socket) -> None:
        """Carry a local connection to a port of another host."""
        self._spawn(self._carry(self._peers[address], port, connection))

    async def _carry(self, peer: MeshPeer, port: int, connection: socket.socket) -> None:
        _, local = await asyncio.get_running_loop().connect_accepted_socket(CarriedEnd, connection)
        try:
            self._join(local, await self._open_in_time(peer, port))
        except (OSError, TimeoutError) as error:
            log.info("%s:%d: %s", peer.member.address, port, error)
            local.abort()
        except asyncio.CancelledError:
            local.abort()
            raise

    async def _open_in_time(self, peer: MeshPeer, port: int) -> FirstLine:
        """Open a connection to a port of another host, again if the link to it fails, as TCP does without a mesh.

        Not if the host or its port is closed. Raises OSError, TimeoutError.
        """
        until = time.monotonic() + OPEN_S
        while True:
            try:
                return await self._open(peer, f"port {port}\n")
            except (OSError, TimeoutError) as error:
                has_ended = peer.ended or port not in peer.ports.ports
                is_answer = isinstance(error, (ConnectionRefusedError, StrangerError))
                if has_ended or is_answer or time.monotonic() > until:
                    raise
                log.info("%s:%d: %s", peer.member.address, port, error)
            await asyncio.sleep(RETRY_S)

    async def deliver(self, remote: FirstLine, port: int) -> None:
        """Connect what another host carries to a port of this host. Raises OSError."""
        _, local = await asyncio.get_running_loop().create_connection(CarriedEnd, self._identity.address, port)
        self._join(local, remote)

    async def _open(self, peer: MeshPeer, line: str) -> FirstLine:
        """Open a connection to another host, and send what it is for. Raises OSError, TimeoutError."""
        if peer.is_relayed:
            connection, _ = await self.dial_through_member(peer.member.address)
        elif peer.announced is None:
            connection = await self._request(peer)
        else:
            connection, _ = await dial(self._identity, peer.announced, peer.member.address)
        connection.transport.write(line.encode())
        return connection

    async def dial_through_member(self, address: str) -> tuple[FirstLine, VerifiedHost]:
        """Connect to a host through another member that is connected to it. Raises ConnectionError if there is none."""
        for relay in list(self._peers.values()):
            if relay.announced is None or relay.lines is None or relay.member.address == address:
                continue
            try:
                outer, _ = await dial(self._identity, relay.announced, relay.member.address)
                outer.transport.write(f"relay {address}\n".encode())
                return await dial(self._identity, await self._tunnel(outer), address)
            except (OSError, TimeoutError) as error:
                log.info("%s through %s: %s", address, relay.member.address, error)
        raise ConnectionError(f"no other host relays to {address}")

    async def relay(self, connection: FirstLine, address: str) -> None:
        """Connect what another host sends to a third one. Raises OSError, TimeoutError."""
        peer = self._peers.get(address)
        if peer is None or peer.lines is None or peer.is_relayed:
            raise ConnectionRefusedError(f"{address} is not connected to this host")
        remote = await self._open(peer, "relayed\n")
        for each in (connection, remote):
            each.transport.max_awaited = MAX_AWAITED_OF_RELAY
        remote.hand_over(end := CarriedEnd())
        self._join(end, connection)

    async def accept_relayed(self, connection: FirstLine, entrance: Entrance) -> None:
        """Accept a connection of another host that a third one relays."""
        entrance.accept(await self._tunnel(connection))

    async def _request(self, peer: MeshPeer) -> FirstLine:
        """Let another host dial this one. Raises TimeoutError."""
        number = next(self._numbers)
        requested = self._awaited[peer.member.address, number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await peer.connected.wait()
                peer.send(Open(number))
                return await requested
        finally:
            del self._awaited[peer.member.address, number]

    def take_requested(self, address: str, number: int, connection: FirstLine) -> None:
        """Use a connection that a host at an address was requested to dial. Raises ValueError if it was not."""
        awaited = self._awaited.get((address, number))
        if awaited is None or awaited.done():
            raise ValueError(f"no connection {number} was requested of {address}")
        awaited.set_result(connection.next_line())

    def dial_back(self, peer: MeshPeer, number: int) -> None:
        """Dial a host that cannot dial this one, and serve what it wants."""
        if peer.announced is not None:
            self._spawn(self._dial_back(peer.announced, peer.member.address, number))

    async def _dial_back(self, announced: str, address: str, number: int) -> None:
        try:
            connection, member = await dial(self._identity, announced, address)
        except (OSError, TimeoutError) as error:
            log.info("%s: %s", announced, error)
            return
        try:
            connection.transport.write(f"requested {number}\n".encode())
            async with asyncio.timeout(HANDSHAKE_S):
                line = await connection.line
            await self._on_member(connection, member, line)
        except (OSError, TimeoutError, ValueError) as error:
            log.info("closed a connection to %s: %s", announced, error)
            connection.transport.abort()
        except asyncio.CancelledError:
            connection.transport.abort()
            raise

    async def _tunnel(self, connection: FirstLine) -> socket.socket:
        """Return a socket that sends and receives the bytes of a connection, which can be those of a TLS connection."""
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        try:
            _, local = await asyncio.get_running_loop().connect_accepted_socket(CarriedEnd, theirs)
        except asyncio.CancelledError:
            connection.transport.abort()
            raise
        self._join(local, connection)
        return ours

    def _join(self, end: CarriedEnd, connection: FirstLine) -> None:
        """Connect two ends. Raises ConnectionError if one is lost, or the secret of a host was replaced meanwhile."""
        if self._is_outdated(connection.transport):
            end.abort()
            raise ConnectionResetError(OUTDATED)
        connection.hand_over(other := CarriedEnd())
        end.join(other)
        self._carried.add(end)

    def _is_outdated(self, transport: asyncio.BaseTransport) -> bool:
        if transport.is_closing():
            return True
        is_encrypted = transport.get_extra_info("ssl_object") is not None
        return is_encrypted and self._identity.secret_of(transport) is None

    def end_outdated(self) -> None:
        """End the carried connections to hosts that have proved a secret which is not accepted any more."""
        for end in list(self._carried):
            if any(map(self._is_outdated, end.transports)):
                end.abort()

    async def end_stuck(self, address: str, outage_s: float) -> None:
        """End the carried connections of a host which is connected again, if what was sent on them does not arrive.

        A router between may have forgotten them. Of others, TCP sends again what is missing, within as long as the
        outage has lasted.
        """
        transports = [each for end in self._carried for each in end.transports if _leads_to(each, address)]
        await asyncio.sleep(outage_s + SLACK_S)
        for transport in transports:
            if unanswered_s(transport) > outage_s:
                transport.abort()

    def close(self) -> None:
        """End all carried connections."""
        for end in list(self._carried):
            end.abort()


def _leads_to(transport: asyncio.Transport, address: str) -> bool:
    """Return whether a connection is to a host, and goes through no other one."""
    encrypted = None if transport.is_closing() else transport.get_extra_info("ssl_object")
    return encrypted is not None and member_of(encrypted).address == address
