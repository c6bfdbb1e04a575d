"""What a save costs: how long training stands still, what it slows down, and how soon the state is on disk.

    .venv/bin/python -m benchmarks.runs.checkpoint            about 3 minutes

The model and the run are those of `make demo`: 4 processes, 2 stages x 2 replicas. Blocks of steps with a save at
their beginning alternate with blocks without. The time until a save is on disk is compared with `cp` of the same files
to the same disk, with and without waiting for the disk, while nothing else runs.
"""

from __future__ import annotations

import json
import runpy
import shutil
import statistics
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmarks.common.compare import on_ranks
from rich.console import Console
from rich.table import Table

from acsgd.config.options import Config
from acsgd.config.run_file import parse
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.sampling.batches import Batch
from acsgd.run.checkpointing import Checkpointing
from acsgd.run.inputs import open_inputs
from acsgd.run.job import prepare
from acsgd.run.session import Session
from acsgd.run.state import start
from acsgd.run.lock import RunLock
from acsgd.topology import Launch, connect
from acsgd.train import train_step

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, STEPS_PER_BLOCK, ROUNDS, WARMUP = 4, 12, 15, 6
TIMEOUT = timedelta(seconds=120)


class Round(NamedTuple):
    """One rank's seconds in one round."""

    step_s: float
    """Median of the steps of the block without a save."""
    stall_s: float
    extra_s: float
    """Block with a save, until it is on disk, less block without."""
    alone_s: float
    """A save while nothing else runs, from its start until all is on disk."""


def config_of(directory: Path) -> Config:
    """Return the demo's run, in a directory of its own."""
    flags = f"--model.name {directory / 'model'} --log.dir {directory / 'run'} --checkpoint.keep 2 --log.to jsonl"
    return parse([str(EXAMPLES / "demo.toml"), *flags.split()])


def rank_rounds(rank: int, directory: Path) -> list[Round]:
    """Measure on one rank."""
    torch.set_num_threads(1)
    job = prepare(config_of(directory), Launch(rank, rank, RANKS))
    inputs = open_inputs(job)
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(directory / "store"), RANKS)) as groups:
        begun = start(job, inputs, groups)
        with Checkpointing.open(begun, inputs.identity, groups, RunLock([]), note=lambda text: None) as saves:
            batch = inputs.reader.batch(0)
            progress = _steps(begun.session, batch, begun.progress, WARMUP)[0]
            _save(saves, progress)  # makes the buffers
            saves.finish_save(wait=True)
            rounds = []
            for _ in range(ROUNDS):
                progress, measured = _round(begun.session, saves, batch, progress)
                rounds.append(measured)
        return rounds


def _round(worker: Session, saves: Checkpointing, batch: Batch, progress: Progress) -> tuple[Progress, Round]:
    dist.barrier()
    progress, times = _steps(worker, batch, progress, STEPS_PER_BLOCK)
    dist.barrier()
    began = time.perf_counter()
    stall_s = _save(saves, progress)
    progress, _ = _steps(worker, batch, progress, STEPS_PER_BLOCK)
    saves.finish_save(wait=True)
    with_save_s = time.perf_counter() - began
    dist.barrier()
    began = time.perf_counter()
    _save(saves, progress)
    saves.finish_save(wait=True)
    alone_s = time.perf_counter() - began
    return progress, Round(statistics.median(times), stall_s, with_save_s - sum(times), alone_s)


def _save(saves: Checkpointing, progress: Progress) -> float:
    stall_s = saves.copy_state(progress, due=True, evaluated=False)
    saves.start_write()
    return stall_s


def _steps(worker: Session, batch: Batch, progress: Progress, count: int) -> tuple[Progress, list[float]]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        progress = train_step(worker, batch, progress).progress
        times.append(time.perf_counter() - began)
    return progress, times


def copy_s(source: Path, target: Path, *, durable: bool) -> float:
    """Return the seconds that `cp -r` takes; durable: and `sync` of all it has written."""
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    if durable:
        subprocess.run(["sync", *target.iterdir(), target], check=True)
    return time.perf_counter() - began


def main() -> None:
    """Measure, print a table and a line of JSON."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        directory = Path(scratch)
        runpy.run_path(str(EXAMPLES / "demo.py"))["make_model"](directory / "model")
        ranks = on_ranks(RANKS, rank_rounds, directory)
        checkpoint = max((directory / "run" / "checkpoints").glob("step-*"))
        nbytes = sum(path.stat().st_size for path in checkpoint.iterdir())
        plain, durable = [], []
        for _ in range(ROUNDS):
            plain.append(copy_s(checkpoint, directory / "copy", durable=False))
            durable.append(copy_s(checkpoint, directory / "copy", durable=True))
    rounds = list(zip(*ranks, strict=True))
    figures = {
        "stall / step": [max(r.stall_s for r in each) / each[0].step_s for each in rounds],
        "slow-down / step": [each[0].extra_s / each[0].step_s for each in rounds],
        "save / cp + sync": [each[0].alone_s / seconds for each, seconds in zip(rounds, durable, strict=True)],
        "save / cp": [each[0].alone_s / seconds for each, seconds in zip(rounds, plain, strict=True)],
    }
    _show(figures, nbytes)


def _show(figures: dict[str, list[float]], nbytes: int) -> None:
    table = Table(
        "", "median", "quartiles", title=f"saves of {nbytes / 1e6:.0f} MB, {ROUNDS} rounds", title_justify="left"
    )
    summary = {}
    for name, values in figures.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        table.add_row(name, f"{median:.3f}", f"{low:.3f} - {high:.3f}")
        summary[name] = {"median": median, "quartiles": [low, high]}
    Console().print(table)
    print(json.dumps({"bytes": nbytes, "rounds": ROUNDS, **summary}))


if __name__ == "__main__":
    main()
