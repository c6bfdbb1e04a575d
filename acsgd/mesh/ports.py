"""TCP sockets of this host, from /proc/net/tcp: which ports listen at an address, and whose a connection is."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
_MAPPED = f"{0:016X}FFFF0000" if sys.byteorder == "little" else f"{0:020X}FFFF"
"""What addresses of IPv4 begin with in the table of IPv6: sockets of torch's store are of both."""
_LISTENING = "0A"
READS = 5
"""Times that a table is read for a connection: one that changes meanwhile may lack lines, or have them twice."""


def listening_ports(address: str) -> set[int]:
    """Return the ports at which processes of this user listen at an IPv4 address."""
    return {
        int(local.partition(":")[2], 16)
        for local, _, state, user in _sockets(_hex(address))
        if state == _LISTENING and user == os.getuid() and local.startswith(_hex(address))
    }


def is_own_connection(source: tuple[str, int], target: tuple[str, int]) -> bool:
    """Return whether the process that has connected to an address of this host belongs to this user."""
    ends = tuple(f"{_hex(address)}:{port:04X}" for address, port in (source, target))
    for _ in range(READS):
        if users := {user for *found, _, user in _sockets(ends[0]) if tuple(found) == ends}:
            return users == {os.getuid()}
    return False


def _sockets(part: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield the local address, remote address, state and user of the sockets whose line has a part."""
    for table in _TABLES:
        for line in table.read_text().splitlines() if table.exists() else ():
            if part in line:
                _, local, remote, state, _, _, _, user, *_ = line.split()
                yield local.removeprefix(_MAPPED), remote.removeprefix(_MAPPED), state, int(user)


def _hex(address: str) -> str:
    """Return an address as in the table: in the order of bytes of this processor."""
    return f"{int.from_bytes(ipaddress.IPv4Address(address).packed, sys.byteorder):08X}"
