"""Cost of the log from which a lost stage is replayed, in step time and memory."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from transformers.utils import logging as transformers_logging

from acsgd.elastic.replay_log import Position, ReplayLog
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.sampling.batches import BatchReader
from acsgd.launch import Launch
from acsgd.run.build import build_session
from acsgd.run.data import open_data
from acsgd.run.inputs import open_weight_source
from acsgd.run.job import prepare
from acsgd.run.loop_state import LoopState
from acsgd.run.session import Session
from acsgd.topology import connect
from acsgd.train import train_step
from acsgd.waits import InterruptibleWaits
from benchmarks.common.compare import Comparison, RankRounds, Step, alternate, on_ranks, summarise
from benchmarks.runs.snapshots import STAGES, config_of

BATCH = 4
"""Sequences per step."""
WARMUP, STEPS_PER_BLOCK = 10, 10
"""Steps after which the log is emptied, as a snapshot would."""
LIMIT_BYTES = 2**30


class RankResult(NamedTuple):
    """What one rank has measured."""

    rounds: RankRounds
    step_bytes: int
    """Size of the messages of a step in its log."""


class LogCost(NamedTuple):
    """Steps with a log relative to steps without."""

    steps: Comparison
    step_bytes: list[int]
    """By rank, memory that the log takes per step."""


def measure_log_cost(model: Path, rounds: int) -> LogCost:
    """Return the cost of the log with a model in 2 stages, a process each. Raises RuntimeError if the losses differ."""
    ranks = on_ranks(STAGES, _rank_rounds, model, str(model.parent / "store"), rounds)
    steps = summarise([each.rounds for each in ranks], steps=STEPS_PER_BLOCK)
    if steps.loss_error:
        raise RuntimeError(f"the losses differ by {steps.loss_error:.1e}, relatively")
    return LogCost(steps, [each.step_bytes for each in ranks])


def log_cost_table(cost: LogCost) -> Table:
    """Return the table of the cost."""
    table = Table(title="Steps with a log of sent messages / without", title_justify="left")
    for name in ("step time, median", "quartiles", "CPU time", "step, ms", "KiB per step, by rank"):
        table.add_column(name, justify="right")
    steps, (low, high) = cost.steps, cost.steps.quartiles
    sizes = ", ".join(f"{each / 1024:.0f}" for each in cost.step_bytes)
    ratios = f"{steps.median:.3f}", f"{low:.3f} - {high:.3f}", f"{steps.cpu:.3f}"
    table.add_row(*ratios, f"{1000 * steps.theirs_s:.0f}", sizes)
    return table


def _rank_rounds(rank: int, model: Path, store: str, rounds: int) -> RankResult:
    """Run one rank."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    job = prepare(config_of(model, BATCH), Launch(rank, rank, STAGES))
    file_store, waits, timeout = dist.FileStore(store, STAGES), InterruptibleWaits(), timedelta(seconds=120)
    with connect(job.topology, timeout=timeout, store=file_store, waits=waits) as groups:
        sessions, reader = [build_session(job, open_weight_source(job), groups) for _ in range(2)], open_data(job).reader
        log = ReplayLog()
        log.open(1, 0, Position(rank, STAGES), LIMIT_BYTES)
        sessions[0].pipeline.log_messages(log)
        ours, theirs = _step_of(sessions[0], reader, log), _step_of(sessions[1], reader)
        measured = alternate(ours, theirs, warmup=WARMUP, rounds=rounds, steps=STEPS_PER_BLOCK, barrier=dist.barrier)
        return RankResult(measured, log.nbytes // log.num_steps)


def _step_of(session: Session, reader: BatchReader, log: ReplayLog | None = None) -> Step:
    """Return a step of a run."""
    state = LoopState(Progress(), log=log)

    def step(number: int) -> float:
        if log is not None and number % STEPS_PER_BLOCK == 0:
            log.drop_before(number)
        state.started_at = time.perf_counter()
        result = train_step(session, reader.batch(number), state.progress, state=state)
        return result.loss / session.job.topology.world_size

    return step
