"""Throughput, latency and CPU time of the mesh between two hosts, against plain TCP; needs root:

    .venv/bin/python -m benchmarks.mesh.links [--rounds 5] [--seconds 2] [--json runs/benchmarks/mesh_links.json]

Two hosts are network namespaces (common/netlab.py). A program on one sends to a program on the other one: directly, and
through the forwarders of a mesh with the event loop of asyncio and, where it is installed, with that of uvloop. In each
round every way takes its turn on every link, in every second round in reversed order.

Mbit/s    received in --seconds, after a second in which TCP finds its rate; median over the rounds, and range
of TCP    the same relative to the direct way of the same round. 1 and 4 connections at once
CPU       of the processes of both forwarders, system calls included, per GB that a program has received. With a limit
          on the link a read returns less, so a byte costs more
ping      median time until a message of so many bytes has come back, once it has arrived as a whole, over a connection
          that is open; of PINGS in a row, or as many as fit into --seconds. Of the mesh, what it adds to the direct way
          of the same round: the goals are .15 ms for 1 KB, one packet, and .5 ms for 20 KB, several packets, none of
          which waits for an acknowledgment, which may be delayed by 40 ms and takes a round trip
load      of the machine, at the end of each round: other programs slow the forwarders, which need more CPU time
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import secrets
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from acsgd.mesh.mesh import Mesh, MeshOptions, publish
from benchmarks.common import netlab

DIRECT = "TCP"
LOOPS = ["asyncio", *(["uvloop"] if find_spec("uvloop") else [])]
STREAMS = (1, 4)
PORT = 29400
WARMUP_S = 1.0
PINGS = 200
PING_BYTES = (1_000, 20_000)
"""Of one packet and of several."""
LIMIT_S = 30.0
BLOCK = bytes(1 << 20)
SINK, ECHO = b"s", b"e"
"""First byte of a connection: what the server does with the others."""
MIN_SHARE, MIN_SHARE_WITH_DELAY, MAX_CPU_S = 0.95, 0.9, 10.0
MAX_ADDED_MS = dict(zip(PING_BYTES, (0.15, 0.5), strict=True))
"""Goals; of what the mesh adds to a ping, by its bytes."""


class Link(NamedTuple):
    """The network between the hosts."""

    name: str
    mbit: float | None
    delay_s: float

    @property
    def min_share(self) -> float:
        return MIN_SHARE_WITH_DELAY if self.delay_s else MIN_SHARE


LINKS = (
    Link("unlimited", None, 0.0),
    Link("1 Gbit/s", 1000.0, 0.0),
    Link("100 Mbit/s", 100.0, 0.0),
    Link("100 Mbit/s, 100 ms there and back", 100.0, 0.05),
)


@dataclass
class Cell:
    """One way on one link. Lists have one entry per round."""

    link: str
    way: str
    mbit: dict[int, list[float]] = field(default_factory=lambda: {streams: [] for streams in STREAMS})
    """By number of connections."""
    cpu_s_per_gb: list[float] = field(default_factory=list)
    """Of all connections."""
    ping_ms: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in PING_BYTES})
    """By number of bytes."""


def be_forwarder(namespace: str, host: int, loop: str, directory: str, secret: bytes, pipe: Connection) -> None:
    """Run a forwarder; return its CPU time for each request, until the pipe is closed."""
    netlab.enter(namespace)
    logging.basicConfig(level=logging.INFO, format=f"{loop} {host}: %(message)s")
    if loop != "uvloop":
        sys.modules["uvloop"] = None  # type: ignore[assignment]
    listener = socket.create_server((netlab.address(host), PORT + LOOPS.index(loop)))
    endpoint, announced = (f"{netlab.address(each)}:{PORT + LOOPS.index(loop)}" for each in (0, host))
    options = MeshOptions("benchmark", secret, None, (endpoint,), listener, announced)
    path = Path(directory) / f"{loop}-{host}"
    mesh = Mesh(options, path, on_rejected=print, on_note=lambda _: None)
    mesh.start()
    pipe.send((mesh.address, path))
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(time.process_time())


def be_server(namespace: str, ways: Sequence[tuple[str, Path | None]], pipe: Connection) -> None:
    """Accept connections at the address of each way. Send the ports, then the bytes per second of each sink."""
    netlab.enter(namespace)
    listeners = [socket.create_server((host, 0)) for host, _ in ways]
    for _, path in ways:
        if path is not None:
            publish(path)
    pipe.send([listener.getsockname()[1] for listener in listeners])

    def accept(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            if connection.recv(1) == ECHO:
                size = int.from_bytes(receive(connection, 4))
                while data := receive(connection, size):
                    connection.sendall(data)
            else:
                pipe.send(count(connection))

    for listener in listeners:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    with contextlib.suppress(EOFError):
        pipe.recv()


def receive(connection: socket.socket, size: int) -> bytes:
    """Return the next message, of so many bytes; fewer at the end of the connection."""
    data = bytearray()
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return bytes(data)


def count(connection: socket.socket) -> tuple[int, float]:
    """Read until the end; return the number of bytes, and the rate after the warm-up, bytes per second."""
    buffer, total, counted = bytearray(1 << 20), 0, 0
    start = time.monotonic()
    last = start + WARMUP_S
    while size := connection.recv_into(buffer):
        total += size
        if (now := time.monotonic()) > start + WARMUP_S:
            counted, last = counted + size, now
    return total, counted / max(last - start - WARMUP_S, 1e-9)


def be_client(namespace: str, pipe: Connection) -> None:
    """Send or ping for each request, until the pipe is closed.

    A request is an address, the number of connections, the seconds, and the bytes of a ping; 0 = send.
    """
    netlab.enter(namespace)

    def send(address: tuple[str, int], until: float) -> None:
        with contextlib.suppress(ConnectionError), socket.create_connection(address) as connection:
            connection.sendall(SINK)
            while time.monotonic() < until:
                connection.sendall(BLOCK)

    with contextlib.suppress(EOFError):
        while True:
            address, streams, seconds, size = pipe.recv()
            if size:
                pipe.send(ping(address, size, seconds))
                continue
            until = time.monotonic() + WARMUP_S + seconds
            threads = [threading.Thread(target=send, args=(address, until)) for _ in range(streams)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pipe.send(None)


def ping(address: tuple[str, int], size: int, seconds: float) -> float:
    """Return the median time until so many bytes have come back, milliseconds; of PINGS, or as many as fit in."""
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(ECHO + size.to_bytes(4))
        times, until = list[float](), time.monotonic() + seconds
        while len(times) < PINGS and time.monotonic() < until:
            start = time.perf_counter()
            connection.sendall(bytes(size))
            receive(connection, size)
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


class Pair:
    """Two hosts that are connected directly and by meshes. Start with `running`."""

    def __init__(self, link: Link, server: Connection, client: Connection) -> None:
        self.link = link
        self._server, self._client = server, client
        self.addresses: dict[str, tuple[str, int]] = {}
        """By way."""
        self.forwarders: dict[str, list[Connection]] = {}

    def measure(self, cell: Cell, seconds: float) -> None:
        """Add a round of one way."""
        cpu_s, size = 0.0, 0
        for streams in STREAMS:
            before = self._cpu_s(cell.way)
            self._request(cell.way, streams, seconds)
            counted = [self._server.recv() for _ in range(streams) if self._server.poll(LIMIT_S)]
            if len(counted) < streams:
                raise RuntimeError(f"{cell.link}, {cell.way}: a connection has ended")
            cpu_s += self._cpu_s(cell.way) - before
            size += sum(total for total, _ in counted)
            cell.mbit[streams].append(sum(rate for _, rate in counted) * 8 / 1e6)
        cell.cpu_s_per_gb.append(cpu_s / size * 1e9)
        for size, times in cell.ping_ms.items():
            times.append(self._request(cell.way, 1, seconds, size))

    def _request(self, way: str, streams: int, seconds: float, ping_bytes: int = 0) -> Any:
        self._client.send((self.addresses[way], streams, seconds, ping_bytes))
        return self._client.recv()

    def _cpu_s(self, way: str) -> float:
        for pipe in self.forwarders.get(way, ()):
            pipe.send(None)
        return sum(pipe.recv() for pipe in self.forwarders.get(way, ()))


@contextlib.contextmanager
def running(link: Link) -> Iterator[Pair]:
    """Start the processes of two hosts."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(netlab.lab(hosts=2, delay_s=link.delay_s))
        network.limit(link.mbit)
        directory = stack.enter_context(tempfile.TemporaryDirectory())

        def start(target: Callable[..., None], *args: Any) -> Connection:
            ours, theirs = get_context("spawn").Pipe()
            process = get_context("spawn").Process(target=target, args=(*args, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            return ours

        forwarders, secret = {}, secrets.token_bytes(16)
        ways: list[tuple[str, Path | None]] = [(netlab.address(1), None)]
        for loop in LOOPS:
            pipes = [start(be_forwarder, network.namespaces[host], host, loop, directory, secret) for host in (0, 1)]
            ways.append([pipe.recv() for pipe in pipes][1])
            forwarders[loop] = pipes
        time.sleep(2.0)  # the forwarders connect
        server = start(be_server, network.namespaces[1], ways)
        pair = Pair(link, server, start(be_client, network.namespaces[0]))
        addresses = [(host, port) for (host, _), port in zip(ways, server.recv(), strict=True)]
        pair.addresses = dict(zip((DIRECT, *LOOPS), addresses, strict=True))
        pair.forwarders = forwarders
        yield pair


def measure(links: Sequence[Link], rounds: int, seconds: float, console: Console) -> tuple[list[Cell], list[float]]:
    """Return the cells, and the load after each round."""
    cells = {link: [Cell(link.name, way) for way in (DIRECT, *LOOPS)] for link in links}
    loads = []
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(running(link)) for link in links]
        for number in range(rounds):
            for pair in pairs:
                for cell in cells[pair.link][:: -1 if number % 2 else 1]:
                    pair.measure(cell, seconds)
            loads.append(os.getloadavg()[0])
            console.print(f"{number + 1} of {rounds} rounds, load {loads[-1]:.1f}", highlight=False)
    return [cell for of_link in cells.values() for cell in of_link], loads


def table(links: Sequence[Link], cells: Sequence[Cell], loads: Sequence[float]) -> Table:
    """Return a table, one way on one link per row; green = goal met."""
    shown = Table(title=f"Mesh against TCP, load {min(loads):.1f} to {max(loads):.1f}", title_justify="left")
    for name in ("link", "way"):
        shown.add_column(name, no_wrap=True)
    for streams in STREAMS:
        shown.add_column(f"Mbit/s, {streams} at once", justify="right")
        shown.add_column("of TCP", justify="right")
    for name in ("CPU s per GB", *(f"ping of {size / 1e3:g} KB, ms" for size in PING_BYTES)):
        shown.add_column(name, justify="right")
    for cell in cells:
        direct = next(each for each in cells if (each.link, each.way) == (cell.link, DIRECT))
        (link,) = (each for each in links if each.name == cell.link)
        row = []
        for streams in STREAMS:
            shares = [ours / theirs for ours, theirs in zip(cell.mbit[streams], direct.mbit[streams], strict=True)]
            row += [spread(cell.mbit[streams], ".0f")]
            row += [judged(shares, ".2f", statistics.median(shares) >= link.min_share)]
        row += [judged(cell.cpu_s_per_gb, ".1f", statistics.median(cell.cpu_s_per_gb) <= MAX_CPU_S)]
        for size, times in cell.ping_ms.items():
            added = [ours - theirs for ours, theirs in zip(times, direct.ping_ms[size], strict=True)]
            is_met = statistics.median(added) <= MAX_ADDED_MS[size]
            row.append(spread(times, ".2f") if cell is direct else judged(added, ".2f", is_met))
        if cell is direct:
            row = ["" if index in (1, 3, 4) else text for index, text in enumerate(row)]
        shown.add_row(cell.link if cell is direct else "", cell.way, *row, end_section=cell.way == LOOPS[-1])
    return shown


def spread(numbers: Sequence[float], form: str) -> str:
    """Format the median, and minimum and maximum."""
    return f"{statistics.median(numbers):{form}}\n{min(numbers):{form}} - {max(numbers):{form}}"


def judged(numbers: Sequence[float], form: str, is_met: bool) -> str:
    """Format numbers in the colour of whether they meet their goal."""
    return f"[{'green' if is_met else 'red'}]{spread(numbers, form)}[/]"


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a transfer after the warm-up")
    parser.add_argument("--links", type=int, nargs="+", default=range(len(LINKS)), help="indices in LINKS")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/mesh_links.json"), help="the samples")
    options = parser.parse_args()
    links = [LINKS[index] for index in options.links]
    try:
        netlab.check(needs_tun=any(link.delay_s for link in links))
    except RuntimeError as error:
        sys.exit(f"benchmarks/mesh/links.py: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that namespaces are removed
    console = Console(width=160)
    cells, loads = measure(links, options.rounds, options.seconds, console)
    console.print(table(links, cells, loads))
    about = {"python": platform.python_version(), "cores": os.cpu_count(), "loads": loads}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "cells": [asdict(cell) for cell in cells]}, indent=1))


if __name__ == "__main__":
    main()
