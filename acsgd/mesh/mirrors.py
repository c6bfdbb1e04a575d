"""Ports of other hosts that are open on this one, and those of this host that others open."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from acsgd.comm.addresses import join_address
from acsgd.mesh.messages import Opened, Ports
from acsgd.mesh.peers import PING_S, MeshPeer
from acsgd.mesh.ports import is_own_connection, listening_ports
from acsgd.mesh.tls import accept_each

log = logging.getLogger(__name__)

OPENED_S = 2.0
"""Time in which other hosts open a new port, seconds."""
TAKEN = "cannot be opened on {}, where another program listens at that port: end that program, or start this host again"


class PortExchange:
    """Opens the ports of all other hosts here, and lets them open those of this host.

    address: virtual one of this host; daemon_port: of its daemon; peers: the other hosts by virtual address.
    on_connection: see `Mirrors`; on_rejected, on_note: see `Forwarder`.
    """

    def __init__(
        self,
        address: str,
        daemon_port: int,
        peers: Mapping[str, MeshPeer],
        on_connection: Callable[[str, int, socket.socket], None],
        on_rejected: Callable[[str, str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._address = address
        self._daemon_port = daemon_port
        self._peers = peers
        self._on_rejected = on_rejected
        self._on_note = on_note
        self._mirrors = Mirrors(on_connection)
        self._numbers = itertools.count(1)
        self._message = Ports(0, ())
        """The latest one to all hosts."""
        self._changed = asyncio.Event()
        """Set whenever a host has opened ports, or is lost."""

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports at which processes of this host listen, when last looked for."""
        return self._message.ports

    def scan(self) -> None:
        """Look for the ports at which processes of this host listen, and send them if they have changed."""
        ports = tuple(sorted(listening_ports(self._address)))
        if ports != self.ports:
            self._message = Ports(next(self._numbers), ports)
            for peer in self._peers.values():
                peer.send(self._message)

    async def publish(self) -> set[int]:
        """Look for new ports now; return once all hosts have opened them, at the latest after OPENED_S.

        Hosts that are silent are not awaited. Returns the ports that another program has taken on any host.
        """
        self.scan()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPENED_S):
                number = self._message.number
                while any(peer.opened.number < number for peer in self._peers.values() if peer.is_heard()):
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), PING_S)
        return {port for peer in self._peers.values() if peer.lines is not None for port in peer.opened.taken}

    def meet(self, peer: MeshPeer) -> None:
        """Open the ports of a host that has been connected, and send it those of this host."""
        self.mirror(peer)
        peer.send(self._message)  # they may have changed since the greeting

    def mirror(self, peer: MeshPeer) -> None:
        """Listen at exactly the ports of another host, at its address, and send it an `Opened`."""
        address = peer.member.address
        taken = self._mirrors.set_ports(address, peer.ports.ports)
        for port, problem in taken.items():
            if port not in peer.taken_here:
                self._on_note(f"mesh: port {port} of {address} cannot be opened here: {problem}")
        if peer.daemon_port in taken:
            self._on_rejected(join_address(address, peer.daemon_port), TAKEN.format("this host"))
        peer.taken_here = tuple(taken)
        peer.send(Opened(peer.ports.number, peer.taken_here))

    def take(self, peer: MeshPeer, opened: Opened) -> None:
        """Note which ports of this host are open on another one."""
        peer.opened = opened
        self._changed.set()
        if self._daemon_port in opened.taken:
            self._on_rejected(join_address(self._address, self._daemon_port), TAKEN.format(peer.member.name))

    def lose(self) -> None:
        """Note that a host is not connected any more, so that its answer is not awaited."""
        self._changed.set()

    def close(self) -> None:
        """Close the ports of all hosts."""
        self._mirrors.close()


class Mirrors:
    """Sockets that listen here at the addresses and ports of other hosts.

    on_connection: called with such an address and port and with each connection of a process of this user to it.
    """

    def __init__(self, on_connection: Callable[[str, int, socket.socket], None]) -> None:
        self._on_connection = on_connection
        self._listeners: dict[tuple[str, int], socket.socket] = {}

    def set_ports(self, address: str, ports: Iterable[int]) -> dict[int, str]:
        """Listen at exactly these ports of another host; return those at which this fails, with the reasons."""
        wanted, failed = set(ports), {}
        present = {port for host, port in self._listeners if host == address}
        for port in present - wanted:
            self._close(address, port)
        for port in sorted(wanted - present):
            try:
                listener = open_mirror(address, port)
            except OSError as error:
                failed[port] = error.strerror or str(error)
                continue
            if listener is not None:
                self._listeners[address, port] = listener
                accept_each(listener, partial(self._accept, address, port))
        return failed

    def close(self) -> None:
        """Close all."""
        for address, port in list(self._listeners):
            self._close(address, port)

    def _close(self, address: str, port: int) -> None:
        listener = self._listeners.pop((address, port))
        asyncio.get_running_loop().remove_reader(listener)
        listener.close()

    def _accept(self, address: str, port: int, connection: socket.socket) -> None:
        try:
            is_own = is_own_connection(connection.getpeername(), connection.getsockname())
        except OSError:  # gone already
            is_own = False
        if is_own:
            self._on_connection(address, port, connection)
        else:
            connection.close()
            log.info("a process of another user has connected to %s:%d", address, port)


def open_mirror(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at the address of another host. Raises OSError.

    None if a process of this user listens there: that host, or another one that mirrors it, is on this machine.
    """
    try:
        listener = socket.create_server((address, port), backlog=256)
    except OSError:
        if port in listening_ports(address):
            return None
        raise
    listener.setblocking(False)
    return listener
