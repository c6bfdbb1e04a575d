"""TCP sockets of this host: which ports listen at an address, and whose a connection is.

Linux answers that by a socket of its own kind, sock_diag. Where it does not, as in some containers, the tables in
/proc/net are read, which takes milliseconds: the kernel looks through all places of its hash table.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
_MAPPED = f"{0:016X}FFFF0000" if sys.byteorder == "little" else f"{0:020X}FFFF"
"""What addresses of IPv4 begin with in the table of IPv6: sockets of torch's store are of both."""
_LISTENING = "0A"
READS = 5
"""Times that a table is read for a connection: one that changes meanwhile may lack lines, or have them twice."""

SOCK_DIAG, BY_FAMILY = 4, 20
"""Protocol of netlink, and type of its request."""
REQUEST, DUMP = 0x1, 0x300
"""Flags: of any request, and of one for all sockets."""
ERROR, DONE = 2, 3
"""Types of answers."""
_HEADER, _QUERY, _ENDS, _REST = struct.Struct("=IHHII"), struct.Struct("=BBBxI"), struct.Struct(">HH16s16s"), "=III"
"""Message: size, type, flags; request: family, protocol, state bits; ports and addresses; interface and cookie."""
_USER = struct.Struct("=I")
_MAPPED_BYTES = bytes(10) + b"\xff\xff"
_ENDS_AT, _USER_AT = 4, 64
"""Where ports and addresses, and the user, are in an answer."""
ANSWER_S = 1.0
"""Time for an answer, seconds."""


class _Socket(NamedTuple):
    ends: tuple[int, int, bytes, bytes]
    """Local and remote port, local and remote address; those of IPv4 as of sockets of IPv4."""
    user: int

    @classmethod
    def of(cls, fields: bytes) -> _Socket:
        """Read an answer of the kernel."""
        *ports, here, there = _ENDS.unpack_from(fields, _ENDS_AT)
        addresses = (each[12:] + bytes(12) if each.startswith(_MAPPED_BYTES) else each for each in (here, there))
        return cls((*ports, *addresses), *_USER.unpack_from(fields, _USER_AT))


def listening_ports(address: str) -> set[int]:
    """Return the ports at which processes of this user listen at an IPv4 address."""
    found = [_diagnosed(family, bytes(36), DUMP) for family in (socket.AF_INET, socket.AF_INET6)]
    if None not in found:
        sockets = [each for some in found for each in some or ()]
        return {each.ends[0] for each in sockets if each.ends[2] == _packed(address) and each.user == os.getuid()}
    return {
        int(local.partition(":")[2], 16)
        for local, _, state, user in _sockets(_hex(address))
        if state == _LISTENING and user == os.getuid() and local.startswith(_hex(address))
    }


def is_own_connection(source: tuple[str, int], target: tuple[str, int]) -> bool:
    """Return whether the process that has connected to an address of this host belongs to this user."""
    wanted = (source[1], target[1], _packed(source[0]), _packed(target[0]))
    for found in _diagnosed(socket.AF_INET, _ENDS.pack(*wanted), 0) or ():
        if found.ends == wanted:  # else it is a socket that listens
            return found.user == os.getuid()
    ends = tuple(f"{_hex(address)}:{port:04X}" for address, port in (source, target))
    for _ in range(READS):
        if users := {user for *found, _, user in _sockets(ends[0]) if tuple(found) == ends}:
            return users == {os.getuid()}
    return False


def _diagnosed(family: int, ends: bytes, flags: int) -> list[_Socket] | None:
    """Return the sockets with some ends, or with DUMP those that listen; None if the system does not say."""
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 1 << int(_LISTENING, 16) if flags else 0)
    body = query + ends + struct.pack(_REST, 0, 0xFFFFFFFF, 0xFFFFFFFF)
    found: list[_Socket] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as asked:
        asked.settimeout(ANSWER_S)
        asked.send(_HEADER.pack(_HEADER.size + len(body), BY_FAMILY, REQUEST | flags, 0, 0) + body)
        while answer := asked.recv(1 << 16):
            while answer:
                size, kind, *_ = _HEADER.unpack_from(answer)
                if kind in (ERROR, DONE):
                    return found if kind == DONE else None
                fields = answer[_HEADER.size : size]
                found.append(_Socket.of(fields))
                if not flags:
                    return found
                answer = answer[(size + 3) & ~3 :]
    return None


def _packed(address: str) -> bytes:
    """Return an IPv4 address as in answers of the kernel."""
    return ipaddress.IPv4Address(address).packed + bytes(12)


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
