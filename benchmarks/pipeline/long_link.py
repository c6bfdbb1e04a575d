"""Rate of messages between two hosts on a link with a long delay, and with loss; needs root:

    .venv/bin/python -m benchmarks.pipeline.long_link [--seconds 5] [--rounds 1]

Two hosts, each a network namespace (netlab.py), with 50 ms of delay each way. The hosts are stages, of which the first
sends messages of --kb to the other, --in-flight at a time; or replicas, which exchange updates of --update-mb, one
after the other. run.congestion and run.connections are as given, and all connections are new. After --warm seconds, in
which TCP adapts, what arrives in --seconds counts. All combinations take turns. On links of more than 200 Mbit/s,
packets travel, and are lost, in segments of up to 64 KB: the network of this machine cannot delay so many.

share   bytes of messages over the rate of the link; packets add 3.5 %
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from acsgd.comm.waits import Meter, Work
from acsgd.dp.peers import Peers
from acsgd.groups import Groups, connect
from acsgd.topology import Topology
from benchmarks.common import netlab
from benchmarks.pipeline.network_ranks import on_hosts, request_all

DELAY_S = 0.05
LINKS = ("400", "1000")
"""Rates, Mbit/s; after a slash the share of packets that are lost."""
PACKETS_MBIT = 200.0
"""Largest rate at which the network of this machine delays single packets."""
CONTROLS, CONNECTIONS = ("cubic", "bbr"), (1, 4, 8)
OF = ("stages", "replicas")
TIMEOUT = timedelta(seconds=300)


class Request(NamedTuple):
    """A measurement."""

    number: int
    control: str
    connections: int
    of: str
    message_bytes: int
    in_flight: int
    warm_s: float
    measured_s: float


@dataclass
class Row:
    """Results of one combination."""

    mbit: float
    loss: float
    control: str
    connections: int
    of: str
    shares: list[float] = field(default_factory=list)

    @property
    def offload(self) -> bool:
        """Whether packets travel in segments."""
        return self.mbit > PACKETS_MBIT


def be_rank(rank: int, setting: None, store: str, pipe: Connection) -> None:
    """Run one rank: a measurement for each request, until the pipe is closed. Rank 1 returns bytes per second."""
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(measure(rank, pipe.recv(), store))


def measure(rank: int, request: Request, store: str) -> float:
    """Send or receive messages until the time is over."""
    files, stages = dist.FileStore(f"{store}-{request.number}", 2), 2 if request.of == "stages" else 1
    with connect(
        Topology.of(rank, 2, stages),
        timeout=TIMEOUT,
        store=files,
        connections=request.connections,
        congestion=request.control,
    ) as groups:
        if stages == 1:
            return exchange(groups, request)
        if rank:
            return receive(groups, request)
        send(groups, request)
        return 0.0


def exchange(groups: Groups, request: Request) -> float:
    """Exchange updates until the time is over, which replica 0 says in the first byte of its last one."""
    peers, meter = Peers(groups.dp, groups.waits), Meter()
    other, message = 1 - peers.replica, torch.zeros(request.message_bytes, dtype=torch.uint8)
    begun = counted = time.perf_counter()
    received, is_last = 0, False
    while not is_last:
        message[0] = peers.replica == 0 and time.perf_counter() - begun > request.warm_s + request.measured_s
        answer = peers.exchange({other: message}, {other: len(message)}, meter)[other]
        is_last = bool((message if peers.replica == 0 else answer)[0])
        if time.perf_counter() - begun < request.warm_s:
            counted, received = time.perf_counter(), 0
        else:
            received += len(answer)
    rate = received / (time.perf_counter() - counted)
    peers.close()
    return rate


def send(groups: Groups, request: Request) -> None:
    """Send messages until the time is over; the first byte of one says that as many follow as are in flight."""
    in_flight = deque[tuple[Work, torch.Tensor]]()
    end, left = time.perf_counter() + request.warm_s + request.measured_s, request.in_flight
    while left:
        message = torch.zeros(request.message_bytes, dtype=torch.uint8)
        is_over = time.perf_counter() > end
        message[0] = is_over and left == request.in_flight
        left -= is_over
        in_flight.append((groups.pp.isend(message, 1), message))
        if len(in_flight) == request.in_flight:
            groups.waits.wait(in_flight.popleft()[0])
    for work, _ in in_flight:
        groups.waits.wait(work)


def receive(groups: Groups, request: Request) -> float:
    """Receive these messages; return the bytes per second after the time in which TCP adapts."""
    in_flight = deque[tuple[Work, torch.Tensor]]()

    def post() -> None:
        message = torch.empty(request.message_bytes, dtype=torch.uint8)
        in_flight.append((groups.pp.irecv(message, 0), message))

    for _ in range(request.in_flight):
        post()
    begun = counted = time.perf_counter()
    received, is_last = 0, False
    while not is_last:
        work, message = in_flight.popleft()
        groups.waits.wait(work)
        is_last = bool(message[0])
        if time.perf_counter() - begun < request.warm_s:
            counted, received = time.perf_counter(), 0
        else:
            received += request.message_bytes
        if not is_last:
            post()
    rate = received / (time.perf_counter() - counted)
    for work, _ in in_flight:
        groups.waits.wait(work)
    return rate


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--of", nargs="+", choices=OF, default=OF, help="what the hosts are")
    parser.add_argument("--kb", type=int, default=2048, help="size of a message between stages")
    parser.add_argument("--in-flight", type=int, default=16, help="messages between stages at a time")
    parser.add_argument("--update-mb", type=int, default=128, help="size of an update of a replica")
    parser.add_argument("--links", nargs="+", default=LINKS, help="rate, Mbit/s, and /share of lost packets")
    parser.add_argument("--controls", nargs="+", default=CONTROLS)
    parser.add_argument("--connections", type=int, nargs="+", default=CONNECTIONS)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/long_link.json"), help="path of the results")
    options = parser.parse_args()
    try:
        netlab.check(needs_tun=True)
    except RuntimeError as error:
        sys.exit(f"benchmarks/pipeline/long_link.py: {error}")
    links = [(float(mbit), float(loss or 0)) for mbit, _, loss in (link.partition("/") for link in options.links)]
    sizes = {"stages": 1024 * options.kb, "replicas": (1 << 20) * options.update_mb}
    rows = [Row(*link, *how) for link in links for how in product(options.controls, options.connections, options.of)]
    number = 0
    for loss, offload in sorted({(row.loss, row.offload) for row in rows}):
        with (
            netlab.lab(hosts=2, delay_s=DELAY_S, loss=loss, offload=offload) as network,
            on_hosts(network, be_rank, None) as pipes,
        ):
            for _ in range(options.rounds):
                for row in (row for row in rows if (row.loss, row.offload) == (loss, offload)):
                    network.limit(row.mbit)
                    number += 1
                    how = row.control, row.connections, row.of, sizes[row.of], options.in_flight
                    *_, rate = request_all(pipes, Request(number, *how, options.warm, options.seconds))
                    row.shares.append(rate * 8e-6 / row.mbit)
    table = Table("link", "run.congestion", "run.connections", "hosts are", "share of the rate", "range")
    for row in rows:
        link = f"{row.mbit:g} Mbit/s, {2e3 * DELAY_S:g} ms there and back, {row.loss:.0%} loss"
        shares = f"{statistics.median(row.shares):.2f}", f"{min(row.shares):.2f} - {max(row.shares):.2f}"
        table.add_row(link, row.control, str(row.connections), row.of, *shares)
    Console(width=120).print(table, f"load {os.getloadavg()[0]:.1f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
