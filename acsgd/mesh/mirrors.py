"""Ports of other hosts that are open on this one."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from functools import partial

from acsgd.mesh.ports import is_own_connection, listening_ports
from acsgd.mesh.tls import accept_each

log = logging.getLogger(__name__)


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
