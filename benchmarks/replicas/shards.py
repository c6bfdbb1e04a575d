"""What a replica holds, sends and takes per step with each value of dp.shard; needs root:

    .venv/bin/python -m benchmarks.replicas.shards [--json runs/benchmarks/replica_shards.json]
    .venv/bin/python -m benchmarks.replicas.shards --per-host 2 --rate 100    # replicas of a host divide the weights

Hosts are network namespaces (netlab.py). A GPT-2 of 3 M parameters trains with AdamW. Bytes are those that the network
interface of a host has sent, with all headers. Memory is that of the tensors after a step, by kind. Steps of all values
take turns; a step is the median of the turns. The losses of dp.mode=allreduce must agree to 1e-5 in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.utils import logging as transformers_logging

from acsgd.config.options import ReplicaConfig, ShardKind
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.topology import Topology
from acsgd.train import train_step
from benchmarks.common import netlab
from benchmarks.pipeline.network_ranks import TIMEOUT_S, on_hosts, request_all, save_model
from benchmarks.replicas.domains import Hosts, sent_bytes
from benchmarks.replicas.network_ranks import VOCABULARY, make_batch


class Row(NamedTuple):
    """Options of a run."""

    shard: ShardKind
    local: Literal["auto", "none"] = "auto"
    mode: str = "allreduce"


COMPRESSED = "cocktail_grad:topk=.02,bits=4"
ROWS = tuple(map(Row, ("none", "optimizer", "gradients", "weights")))
ROWS_OF_SEVERAL = (
    *(Row(shard, local) for shard in ("none", "optimizer", "weights") for local in ("none", "auto")),
    *(Row(shard, mode=COMPRESSED) for shard in ("none", "weights")),
)
"""Where a host has several replicas."""
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


class Block(NamedTuple):
    """Results of consecutive steps."""

    seconds: float
    """Per step."""
    sent_bytes: float
    """Of the host, per step."""
    loss: float
    """Of the last step."""
    memory: dict[str, int]
    """Bytes of tensors after it, by kind."""


def be_replica(rank: int, hosts: Hosts, store: str, pipe: Connection) -> None:
    """Run one replica: (dtype, row, steps) of each request, until the pipe is closed."""
    files, timeout = dist.FileStore(store, hosts.replicas), timedelta(seconds=TIMEOUT_S)
    topology, domain = Topology.of(rank, hosts.replicas, stages=1), f"host {rank // hosts.per_host}"
    sessions = dict[tuple[str, Row], tuple[Session, Progress]]()
    opened = connect(topology, timeout=timeout, store=files, domain=domain, divides=True)
    with opened as groups, contextlib.suppress(EOFError):
        while True:
            dtype, row, steps = pipe.recv()
            if (dtype, row) not in sessions:
                config: Any = hosts.config(row.mode)
                dp = ReplicaConfig(row.mode, shard=row.shard, local=row.local)
                config = replace(config, dp=dp, model=replace(config.model, dtype=dtype))
                job = prepare(config, Launch(rank, 0, hosts.replicas, local_world_size=hosts.per_host))
                of_row = groups if row.local == "auto" else replace(groups, domains=None)
                sessions[dtype, row] = build_session(job, open_weight_source(job), of_row), Progress()
            session, progress = sessions[dtype, row]
            batch = make_batch(session.job, hosts)
            dist.barrier()
            before, started = sent_bytes(), time.perf_counter()
            for _ in range(steps):
                result = train_step(session, batch, progress)
                progress = result.progress
            dist.barrier()
            seconds, sessions[dtype, row] = time.perf_counter() - started, (session, progress)
            pipe.send(Block(seconds / steps, (sent_bytes() - before) / steps, result.loss, memory_of(session)))


def memory_of(session: Session) -> dict[str, int]:
    """Return the bytes of the tensors of a session by kind."""
    owned = session.owned.of(session.weights)
    masters = [each.master for each in (*owned, *session.weights) if each.master is not each.param]
    gradients = [each.master.grad for each in (*owned, *session.weights) if each.master.grad is not None]
    moments = session.owned.state_of(session.optimizer, session.weights)
    return {
        "weights": nbytes([each.param for each in (*owned, *session.weights)]),
        "masters": nbytes(masters),
        "gradients": nbytes(gradients),
        "moments": nbytes(x for by_key in moments.values() for x in by_key.values()),
    }


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the memory of tensors, which may share some."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(hosts: Hosts, mbit: float, turns: int, steps: int) -> dict[str, dict[Row, Block]]:
    """Return the median steps of the first replica, by dtype and row. turns: of as many steps each."""
    found: dict[str, dict[Row, Block]] = {}
    with netlab.lab(hosts=hosts.replicas // hosts.per_host) as network:
        network.limit(mbit)
        by_rank = replace(network, namespaces=tuple(each for each in network.namespaces for _ in range(hosts.per_host)))
        with on_hosts(by_rank, be_replica, hosts) as pipes:
            for dtype, tolerance in LOSS_TOLERANCE.items():
                blocks = {row: list[Block]() for row in (ROWS if hosts.per_host == 1 else ROWS_OF_SEVERAL)}
                for turn in range(turns + 1):
                    for row, of_row in blocks.items():
                        of_replicas: list[Block] = request_all(pipes, (dtype, row, steps))
                        slowest = max(block.seconds for block in of_replicas)
                        if turn:  # the first one opens the run
                            of_row.append(of_replicas[0]._replace(seconds=slowest))
                found[dtype] = {
                    row: each[-1]._replace(seconds=statistics.median(block.seconds for block in each))
                    for row, each in blocks.items()
                }
                losses = {row: block.loss for row, block in found[dtype].items() if row.mode == "allreduce"}
                if any(abs(loss / next(iter(losses.values())) - 1) > tolerance for loss in losses.values()):
                    raise RuntimeError(f"{dtype}: losses differ: {losses}")
    return found


def table(found: dict[str, dict[Row, Block]], title: str) -> Table:
    """Return the table of bytes, step times and memory."""
    shown = Table("dtype", "dp.shard", "dp.local", "dp.mode", title=title)
    for name in ("MB sent per step", "step, s", "MB: weights", "masters", "gradients", "moments"):
        shown.add_column(name, justify="right")
    for dtype, by_row in found.items():
        for row, block in by_row.items():
            memory = (f"{size / 1e6:.2f}" for size in block.memory.values())
            shown.add_row(dtype, *row, f"{block.sent_bytes / 1e6:.2f}", f"{block.seconds:.3f}", *memory)
    return shown


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, help="replicas on each host")
    parser.add_argument("--micros", type=int, default=1, help="micro-batches of a replica per step")
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s of each host")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    path = Path("runs/benchmarks/replica_shards.json")
    parser.add_argument("--json", type=Path, default=path, help="path of the results")
    options = parser.parse_args()
    try:
        netlab.check(needs_tun=False)
    except RuntimeError as error:
        sys.exit(f"benchmarks/replicas/shards.py: {error}")
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", vocabulary=VOCABULARY, tied=False)
        replicas, modes = options.hosts * options.per_host, ("allreduce", COMPRESSED)
        hosts = Hosts(model, replicas, options.micros, modes, per_host=options.per_host)
        found = measure(hosts, options.rate, options.turns, options.steps)
    of_hosts = f"{options.hosts} hosts x {options.per_host} replicas"
    title = f"{of_hosts}, {options.micros} micro-batches each, {options.rate:g} Mbit/s"
    Console(width=140).print(table(found, title))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    results = {
        dtype: [{**row._asdict(), **block._asdict()} for row, block in by_row.items()]
        for dtype, by_row in found.items()
    }
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
