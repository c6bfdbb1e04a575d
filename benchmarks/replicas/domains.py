"""What hosts with several replicas each send to each other, with dp.local=auto and none; needs root:

    .venv/bin/python -m benchmarks.replicas.domains [--json runs/benchmarks/replica_domains.json]

The hosts are network namespaces (netlab.py). A GPT-2 of 3 M parameters trains in fp32. Bytes are those that the network
interface of a host has sent, with all headers; replicas of one host reach each other without it. A step is the mean of
the second period of the mode's exchanges. The losses of both must agree in the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.topology import Topology
from benchmarks.common import netlab
from benchmarks.pipeline.network_ranks import TIMEOUT_S, on_hosts, request_all, save_model
from benchmarks.replicas.network import LOSS_TOLERANCE, MODES
from benchmarks.replicas.network_ranks import FIRST_STEP, VOCABULARY, Setting, Step, acsgd, make_batch, period


@dataclass(frozen=True)
class Hosts(Setting):
    """Options of a run, sent to every replica."""

    per_host: int
    """Replicas on each host."""


class Request(NamedTuple):
    """Request to run consecutive steps in one mode."""

    mode: str
    local: str
    """Value of dp.local."""
    steps: int


class Block(NamedTuple):
    """Results of consecutive steps, per step."""

    seconds: float
    sent_bytes: float
    """Of the host."""
    loss: float
    """This rank's part of the loss of the first step; the parts sum to the loss."""


def be_replica(rank: int, hosts: Hosts, store: str, pipe: Connection) -> None:
    """Run one replica: the steps of each request, until the pipe is closed."""
    files, timeout = dist.FileStore(store, hosts.replicas), timedelta(seconds=TIMEOUT_S)
    topology, domain = Topology.of(rank, hosts.replicas, stages=1), f"host {rank // hosts.per_host}"
    with connect(topology, timeout=timeout, store=files, domain=domain) as groups, contextlib.suppress(EOFError):
        steps, numbers = dict[tuple[str, str], Step](), dict[tuple[str, str], int]()
        while True:
            request: Request = pipe.recv()
            key = request.mode, request.local
            if key not in steps:
                job = prepare(hosts.config(request.mode), Launch(rank, 0, hosts.replicas))
                of_both = groups if request.local == "auto" else replace(groups, domains=None)
                steps[key], numbers[key] = acsgd(job, make_batch(job, hosts), of_both), FIRST_STEP
            dist.barrier()
            before, started = sent_bytes(), time.perf_counter()
            losses = [steps[key](number).loss for number in range(numbers[key], numbers[key] + request.steps)]
            dist.barrier()
            seconds, numbers[key] = time.perf_counter() - started, numbers[key] + request.steps
            pipe.send(Block(seconds / request.steps, (sent_bytes() - before) / request.steps, losses[0]))


def sent_bytes() -> int:
    """Return the number of bytes that the network interface of this host has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "eth0:")


def measure(hosts: Hosts, mbit: float) -> dict[str, dict[str, Block]]:
    """Return the steps of the first host in each mode, by mode and dp.local; the loss is that of all replicas."""
    found: dict[str, dict[str, Block]] = {}
    with netlab.lab(hosts=hosts.replicas // hosts.per_host) as network:
        network.limit(mbit)
        by_rank = replace(network, namespaces=tuple(each for each in network.namespaces for _ in range(hosts.per_host)))
        with on_hosts(by_rank, be_replica, hosts) as pipes:
            for mode in hosts.modes:
                found[mode] = {}
                for local in ("none", "auto"):
                    request = Request(mode, local, period(mode))
                    loss = sum(block.loss for block in request_all(pipes, request))
                    blocks: list[Block] = request_all(pipes, request)
                    seconds = max(block.seconds for block in blocks)
                    found[mode][local] = Block(seconds, blocks[0].sent_bytes, loss)
                losses = [block.loss for block in found[mode].values()]
                if abs(losses[1] / losses[0] - 1) > LOSS_TOLERANCE:
                    raise RuntimeError(f"{mode}, first step: loss {losses[1]:.6f}, {losses[0]:.6f} with dp.local=none")
    return found


def table(found: Mapping[str, Mapping[str, Block]], title: str) -> Table:
    """Return the table of bytes and step times."""
    shown = Table("mode", title=title)
    for name in ("kB per step and host, none", "auto", "ratio", "step, s, none", "auto"):
        shown.add_column(name, justify="right")
    for mode, by_local in found.items():
        none, auto = by_local["none"], by_local["auto"]
        kilobytes = f"{none.sent_bytes / 1e3:.0f}", f"{auto.sent_bytes / 1e3:.0f}"
        ratio = f"{none.sent_bytes / auto.sent_bytes:.2f}"
        shown.add_row(mode, *kilobytes, ratio, f"{none.seconds:.2f}", f"{auto.seconds:.2f}")
    return shown


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2, help="replicas on each host")
    parser.add_argument("--modes", nargs="+", default=(*MODES, "sharded_ps"), help="values of dp.mode")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each host")
    path = Path("runs/benchmarks/replica_domains.json")
    parser.add_argument("--json", type=Path, default=path, help="path of the results")
    options = parser.parse_args()
    try:
        netlab.check(needs_tun=False)
    except RuntimeError as error:
        sys.exit(f"benchmarks/replicas/domains.py: {error}")
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", vocabulary=VOCABULARY, tied=False)
        replicas = options.hosts * options.per_host
        hosts = Hosts(model, replicas, 1, tuple(options.modes), per_host=options.per_host)
        found = measure(hosts, options.rate)
    title = f"{options.hosts} hosts x {options.per_host} replicas, {options.rate:g} Mbit/s"
    Console(width=140).print(table(found, title))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    results = {mode: {local: block._asdict() for local, block in each.items()} for mode, each in found.items()}
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
