"""Step time of LoRA and of full fine-tuning on rate-limited links; needs root:

    .venv/bin/python -m benchmarks.runs.adapter_network [--rates 100 10] [--json runs/benchmarks/adapter_network.json]

2 stages x 2 replicas, one process of one thread on each of 4 hosts, which are network namespaces (common/netlab.py)
without delay. Model, batch and ways to fine-tune are those of `traffic` in adapters.py; the batch is the whole data
set, so all sequences are in the activation caches when anything is timed. All ways run in the same processes over the
same connections: in each round every way runs one step at every rate, in every second round in reversed order.

step        time of the slowest rank: median over the rounds, and range
of full     the same relative to the step of full fine-tuning of the same round and rate
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from benchmarks.common import netlab
from benchmarks.pipeline.forms import open_trainings
from benchmarks.pipeline.network_ranks import on_hosts, request_all
from benchmarks.runs.adapters import REPLICAS, SEQUENCES, STAGES, WAYS, batch_of, config_of
from benchmarks.runs.speed import save_model

HOSTS = STAGES * REPLICAS
WARMUP = 2
"""Steps of each way before the first round: the first one fills the activation caches."""
FASTEST = len(WAYS) - 1
"""Way whose steps let TCP adapt to a rate."""


@dataclass
class Cell:
    """One way to fine-tune at one rate."""

    way: str
    mbit: float | None
    """None = no limit."""
    step_s: list[float] = field(default_factory=list)
    """Step times by round."""


def be_rank(rank: int, model: Path, store: str, pipe: Connection) -> None:
    """Run one rank: one step of a way to fine-tune for each request, its index in WAYS, until the pipe is closed."""
    jobs = [prepare(config_of(way, model, STAGES), Launch(rank, 0, HOSTS)) for way in WAYS]
    batch = batch_of(jobs[0], 0)
    with open_trainings(jobs, store, sequences=SEQUENCES) as trainings, contextlib.suppress(EOFError):
        while True:
            training = trainings[pipe.recv()]
            dist.barrier()
            start = time.perf_counter()
            training.step(batch)
            pipe.send(time.perf_counter() - start)


def measure(model: Path, rates: Sequence[float | None], rounds: int, console: Console) -> list[Cell]:
    """Measure every way at every rate, round by round."""
    cells = [[Cell(way.name, mbit) for way in WAYS] for mbit in rates]
    with netlab.lab(hosts=HOSTS) as network, on_hosts(network, be_rank, model) as pipes:

        def step(way: int) -> float:
            return max(request_all(pipes, way))

        for way in [*range(len(WAYS))] * WARMUP:
            step(way)
        for number in range(rounds):
            for of_rate in cells:
                network.limit(of_rate[0].mbit)
                step(FASTEST)
                for way in range(len(WAYS))[:: -1 if number % 2 else 1]:
                    of_rate[way].step_s.append(step(way))
            console.print(f"{number + 1} of {rounds} rounds", highlight=False)
    return [cell for of_rate in cells for cell in of_rate]


def table(cells: Sequence[Cell]) -> Table:
    """Return a table of step times, one way to fine-tune per row."""
    shown = Table(title=f"Optimizer steps of {STAGES} stages x {REPLICAS} replicas on slow links")
    for name in ("rate", "fine-tuning", "step, s", "range", "of full", "range"):
        shown.add_column(name, no_wrap=True)
    full = {cell.mbit: cell.step_s for cell in cells if cell.way == WAYS[0].name}
    for cell in cells:
        rate = "no limit" if cell.mbit is None else f"{cell.mbit:g} Mbit/s"
        relative = [ours / theirs for ours, theirs in zip(cell.step_s, full[cell.mbit], strict=True)]
        shown.add_row(
            rate if cell.way == WAYS[0].name else "",
            cell.way,
            *middle_and_range(cell.step_s, ".2f"),
            *middle_and_range(relative, ".3f"),
            end_section=cell.way == WAYS[-1].name,
        )
    return shown


def middle_and_range(numbers: Sequence[float], form: str) -> tuple[str, str]:
    """Format the median, and minimum and maximum."""
    return f"{statistics.median(numbers):{form}}", f"{min(numbers):{form}} - {max(numbers):{form}}"


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/adapter_network.json"), help="the samples")
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 10.0], help="Mbit/s, besides no limit")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each way at each rate")
    options = parser.parse_args()
    try:
        netlab.check(needs_tun=False)
    except RuntimeError as error:
        sys.exit(f"benchmarks/runs/adapter_network.py: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that namespaces are removed
    transformers_logging.disable_progress_bar()
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", tied=False)
        cells = measure(model, [None, *options.rates], options.rounds, console)
    console.print(table(cells))
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "cells": [asdict(cell) for cell in cells]}, indent=1))


if __name__ == "__main__":
    main()
