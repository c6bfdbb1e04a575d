"""Training stall, slow-down and duration of a checkpoint save:

    .venv/bin/python -m benchmarks.runs.checkpoint [--json runs/benchmarks/checkpoint.json]

The run is that of examples/demo.py: 4 processes, 2 stages x 2 replicas. Blocks of steps that start with a save
alternate with blocks without. The duration of a save without training is compared with `cp` of the same files to the
same disk, with and without `sync`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from acsgd.config.options import Config
from acsgd.config.run_file import parse
from acsgd.failures.signals import StopSignals
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.inputs import open_inputs
from acsgd.run.setup.resume import start
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.hooks import LoopState
from acsgd.train import train_step
from benchmarks.common.compare import on_ranks
from examples.demo import write_inputs

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
RANKS, STEPS_PER_BLOCK, WARMUP = 4, 12, 6
TIMEOUT = timedelta(seconds=120)


class Round(NamedTuple):
    """One rank's times in one round, seconds."""

    step_s: float
    """Median step of the block without a save."""
    stall_s: float
    """Time for which a save stops training."""
    extra_s: float
    """Block with a save, until it is on disk, minus block without."""
    save_s: float
    """Save without training, from its start until all files are on disk."""


def config_of(directory: Path) -> Config:
    """Return the demo's configuration, with model and run in `directory`."""
    paths = {"model.name": "model", "data.sources": "stories.jsonl", "log.dir": "run"}
    flags = [part for option, name in paths.items() for part in (f"--{option}", str(directory / name))]
    return parse([str(DEMO), *flags, "--checkpoint.keep", "2", "--log.to", "jsonl"])


def rank_rounds(rank: int, directory: Path, rounds: int) -> list[Round]:
    """Run one rank."""
    torch.set_num_threads(1)
    job = prepare(config_of(directory), Launch(rank, rank, RANKS))
    inputs = open_inputs(job)
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(directory / "store"), RANKS)) as groups:
        begin = start(job, inputs, groups)
        signals, notes = StopSignals(lambda code: None), list[str]()
        with Checkpointing.open(begin, inputs, RunLock([]), signals, note=notes.append) as checkpointing:
            batch = inputs.reader.batch(0)
            progress, _ = _run_steps(begin.session, batch, begin.progress, WARMUP)
            _save(checkpointing, progress)  # allocates the buffers
            checkpointing.finish_save(wait=True)
            result = []
            for _ in range(rounds):
                progress, measured = _run_round(begin.session, checkpointing, batch, progress)
                result.append(measured)
        return result


def _run_round(
    session: Session, checkpointing: Checkpointing, batch: Batch, progress: Progress
) -> tuple[Progress, Round]:
    dist.barrier()
    progress, times = _run_steps(session, batch, progress, STEPS_PER_BLOCK)
    dist.barrier()
    started = time.perf_counter()
    stall_s = _save(checkpointing, progress)
    progress, _ = _run_steps(session, batch, progress, STEPS_PER_BLOCK)
    checkpointing.finish_save(wait=True)
    with_save_s = time.perf_counter() - started
    dist.barrier()
    started = time.perf_counter()
    _save(checkpointing, progress)
    checkpointing.finish_save(wait=True)
    save_s = time.perf_counter() - started
    return progress, Round(statistics.median(times), stall_s, with_save_s - sum(times), save_s)


def _save(checkpointing: Checkpointing, progress: Progress) -> float:
    """Start a save; return the seconds for which training stood still."""
    stall_s = checkpointing.copy_state(progress, due=True, best=False)
    checkpointing.after_log(LoopState(progress))
    return stall_s


def _run_steps(session: Session, batch: Batch, progress: Progress, count: int) -> tuple[Progress, list[float]]:
    """Run steps; return the progress after them and the seconds of each."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        progress = train_step(session, batch, progress).progress
        times.append(time.perf_counter() - started)
    return progress, times


def copy_s(source: Path, target: Path, *, sync: bool) -> float:
    """Return the duration of `cp -r`, seconds; sync: including `sync` of the copy."""
    shutil.rmtree(target, ignore_errors=True)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    if sync:
        subprocess.run(["sync", *target.iterdir(), target], check=True)
    return time.perf_counter() - started


def measure(options: argparse.Namespace) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of a checkpoint, and each ratio by round."""
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="checkpoint-") as scratch:
        directory = Path(scratch)
        write_inputs(directory)
        ranks = on_ranks(RANKS, rank_rounds, directory, options.rounds)
        checkpoint = max((directory / "run" / "checkpoints").glob("step-*"))
        nbytes = sum(path.stat().st_size for path in checkpoint.iterdir())
        unsynced, synced = [], []
        for _ in range(options.rounds):
            unsynced.append(copy_s(checkpoint, directory / "copy", sync=False))
            synced.append(copy_s(checkpoint, directory / "copy", sync=True))
    rounds = list(zip(*ranks, strict=True))
    return nbytes, {
        "stall / step": [max(rank.stall_s for rank in each) / each[0].step_s for each in rounds],
        "slow-down / step": [each[0].extra_s / each[0].step_s for each in rounds],
        "save / (cp + sync)": [each[0].save_s / seconds for each, seconds in zip(rounds, synced, strict=True)],
        "save / cp": [each[0].save_s / seconds for each, seconds in zip(rounds, unsynced, strict=True)],
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, default=Path("runs/benchmarks/checkpoint.json"), help="path of the results"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks"), help="directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds, 2 or more")
    options = parser.parse_args()
    nbytes, ratios = measure(options)
    title = f"Saves of {nbytes / 1e6:.0f} MB, {options.rounds} rounds"
    table = Table("", "median", "quartiles", title=title, title_justify="left")
    summary = {}
    for name, values in ratios.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        table.add_row(name, f"{median:.3f}", f"{low:.3f} - {high:.3f}")
        summary[name] = {"median": median, "quartiles": [low, high]}
    Console().print(table)
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor(),
    }
    about |= {"rounds": options.rounds, "checkpoint_bytes": nbytes}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "ratios": summary}, indent=1))


if __name__ == "__main__":
    main()
