"""Cost of the snapshots of an elastic run, in step time: with snapshots against without.

    .venv/bin/python -m benchmarks.runs.snapshots [--json runs/benchmarks/snapshots.json]

A GPT-2 of 10 M parameters in 2 stages, a process each, one replica, so that each layer is on one host alone; the
processes count as two hosts. Both sides take turns in the same processes, with the same weights and tokens. "auto"
chooses the interval from the cost that it measures, with the goal in the table. A block of steps with snapshots ends
when its last snapshot is complete on both hosts.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from acsgd.comm.waits import InterruptibleWaits
from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig
from acsgd.elastic.state.snapshot_store import SnapshotStore
from acsgd.elastic.state.snapshots import BUDGET, Snapshots
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.batches import BatchReader
from acsgd.io.telemetry.metrics import Metrics
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import open_data
from acsgd.run.step.hooks import LoopState, StepHook, StepHooks
from acsgd.train import train_step
from benchmarks.common.compare import RankRounds, Step, alternate, on_ranks, summarise
from benchmarks.common.small_model import save_blank

STAGES, HOSTS = 2, ("a/0", "b/0")
SEQUENCE, BATCH = 64, 8
WARMUP, STEPS_PER_BLOCK = 40, 30
"""Steps in which "auto" measures the cost, and of a block, longer than the interval."""
LOSS_TOLERANCE = 1e-6


class RankResult(NamedTuple):
    """What one rank has measured."""

    rounds: RankRounds
    interval: int
    """Steps between snapshots, at the end."""
    memory_bytes: int
    """Host memory of its snapshots."""


def config_of(model: Path, batch: int = BATCH) -> Config:
    """Return a run of single sequences per micro-batch. batch: sequences per step."""
    return Config(
        model=ModelConfig(name=str(model), init="scratch"),
        data=DataConfig(sources="demo", sequence=SEQUENCE, batch=batch),
        optim=OptimConfig(lr=1e-4, steps=10**9),
        pp=PipelineConfig(stages=STAGES, micro=1),
        log=LogConfig(dir=str(model.parent / "run")),
    )


def step_of(session: Session, reader: BatchReader, *participants: StepHook) -> Step:
    """Return a step of a run with some participants of its boundary."""
    state, hooks = LoopState(Progress()), StepHooks(participants, Metrics([]))

    def step(number: int) -> float:
        state.started_at = time.perf_counter()
        result = train_step(session, reader.batch(number), state.progress, hooks.report(state), state=state)
        hooks.before_next(state)
        return result.loss / session.job.topology.world_size

    return step


def rank_rounds(rank: int, model: Path, store: str, rounds: int) -> RankResult:
    """Run one rank."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    job = prepare(config_of(model), Launch(rank, rank, STAGES))
    file_store, waits, timeout = dist.FileStore(store, STAGES), InterruptibleWaits(), timedelta(seconds=120)
    with connect(job.topology, timeout=timeout, store=file_store, waits=waits, several_hosts=True) as groups:
        sessions, reader = (
            [build_session(job, open_weight_source(job), groups) for _ in range(2)],
            open_data(job).reader,
        )
        snapshots = Snapshots(SnapshotStore(), sessions[0], reader, groups, HOSTS, epoch=1, interval=None)
        ours, theirs = step_of(sessions[0], reader, snapshots), step_of(sessions[1], reader)

        def barrier() -> None:
            while snapshots.is_pending:
                time.sleep(0.001)
            dist.barrier()

        measured = alternate(ours, theirs, warmup=WARMUP, rounds=rounds, steps=STEPS_PER_BLOCK, barrier=barrier)
        return RankResult(measured, snapshots.interval, snapshots.memory_bytes())


def main() -> None:
    """Measure, print, save."""
    transformers_logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/snapshots.json"), help="path of the results")
    parser.add_argument("--rounds", type=int, default=12, help=f"of {STEPS_PER_BLOCK} steps of each side")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        save_blank(model, "\n".join(topics.values()), vocabulary=4096, sequence=SEQUENCE, hidden=320, blocks=7, heads=5)
        ranks = on_ranks(STAGES, rank_rounds, model, str(Path(scratch) / "store"), options.rounds)
    result = summarise([each.rounds for each in ranks], steps=STEPS_PER_BLOCK)
    if result.loss_error > LOSS_TOLERANCE:
        raise RuntimeError(f"the losses differ by {result.loss_error:.1e}, relatively")
    interval = max(each.interval for each in ranks)
    memory = max(each.memory_bytes for each in ranks)
    shown = Table(title="Step time with snapshots / without")
    for name in ("steps between snapshots", "MiB per process", "ratio", "quartiles", "CPU time", "goal"):
        shown.add_column(name, justify="right")
    low, high = result.quartiles
    numbers = f"{result.median:.3f}", f"{low:.3f} - {high:.3f}", f"{result.cpu:.3f}", f"{1 + BUDGET:.2f}"
    shown.add_row(str(interval), f"{memory / 2**20:.1f}", *numbers)
    Console(width=120).print(shown)
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
    case = {"interval": interval, "memory_bytes": memory, **result._asdict()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, **case}, indent=1))


if __name__ == "__main__":
    main()
