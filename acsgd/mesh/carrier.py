"""How one connection of a program is carried to another host, and delivered there."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from acsgd.mesh.identity import HostIdentity
from acsgd.mesh.messages import Open
from acsgd.mesh.peers import MeshPeer
from acsgd.mesh.streams import CarriedEnd, FirstLine
from acsgd.mesh.tls import HANDSHAKE_S, OnMember, dial

log = logging.getLogger(__name__)


class Carrier:
    """Carries connections between programs of this host and of others: one connection between the hosts for each.

    on_member: serves a connection of another host, after its first line. spawn: runs a coroutine as a task.
    """

    def __init__(
        self, identity: HostIdentity, on_member: OnMember, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._identity = identity
        self._on_member = on_member
        self._spawn = spawn
        self._numbers = itertools.count(1)
        self._awaited: dict[int, asyncio.Future[FirstLine]] = {}
        """Connections that other hosts were requested to dial."""

    def carry(self, peer: MeshPeer, port: int, connection: socket.socket) -> None:
        """Carry a local connection to a port of another host."""
        self._spawn(self._carry(peer, port, connection))

    async def _carry(self, peer: MeshPeer, port: int, connection: socket.socket) -> None:
        _, local = await asyncio.get_running_loop().connect_accepted_socket(CarriedEnd, connection)
        try:
            remote = await self._open(peer, f"port {port}\n")
        except (OSError, TimeoutError) as error:
            log.info("%s:%d: %s", peer.member.address, port, error)
            local.abort()
            return
        remote.hand_over(end := CarriedEnd())
        local.join(end)

    async def deliver(self, remote: FirstLine, port: int) -> None:
        """Connect what another host carries to a port of this host. Raises OSError."""
        _, local = await asyncio.get_running_loop().create_connection(CarriedEnd, self._identity.address, port)
        remote.hand_over(end := CarriedEnd())
        local.join(end)

    async def _open(self, peer: MeshPeer, line: str) -> FirstLine:
        """Open a connection to another host, and send what it is for. Raises OSError, TimeoutError."""
        if peer.announced is None:
            connection = await self._request(peer)
        else:
            connection, _ = await dial(self._identity, peer.announced, peer.member.address)
        connection.transport.write(line.encode())
        return connection

    async def _request(self, peer: MeshPeer) -> FirstLine:
        """Let another host dial this one. Raises TimeoutError."""
        number = next(self._numbers)
        self._awaited[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await peer.connected.wait()
                peer.send(Open(number))
                return await self._awaited[number]
        finally:
            del self._awaited[number]

    def take_requested(self, number: int, connection: FirstLine) -> None:
        """Use a connection that another host was requested to dial. Raises ValueError if it was not."""
        awaited = self._awaited.get(number)
        if awaited is None or awaited.done():
            raise ValueError(f"no connection {number} was requested")
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
