"""Ports of this host for programs that must be given one before they listen.

A port that the system has chosen (port 0) and that is closed again may be chosen by the system for another connection,
before the program listens: of the processes of tests beside this one, some connect every moment. So these ports are of
a range from which the system chooses none, and each process of pytest-xdist has a part of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

FIRST, LEAST = 10_000, 2_000
"""First port of the range, and the number of ports with which it is used; else the system chooses."""
CHOSEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the system chooses by itself."""


def _candidates() -> Iterator[int]:
    """Yield ports that no other process of these tests is given; 0 where the system chooses from nearly all ports."""
    last = int(CHOSEN.read_text().split()[0]) if CHOSEN.exists() else FIRST
    if last - FIRST < LEAST:
        yield from itertools.repeat(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(FIRST + worker, last, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    begin = random.SystemRandom().randrange(len(own))  # tests of another checkout may run at the same time
    yield from itertools.cycle([*own[begin:], *own[:begin]])


_next = _candidates()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nothing listens, and that no other test is given. host: an address of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in _next:
        with contextlib.suppress(OSError), socket.create_server((host, port), family=family) as server:
            return int(server.getsockname()[1])
    raise AssertionError("candidates do not end")


def free_addresses(count: int) -> list[str]:
    """Return different free addresses of this host."""
    ports = set[int]()
    while len(ports) < count:
        ports.add(free_port())
    return [f"127.0.0.1:{port}" for port in ports]
