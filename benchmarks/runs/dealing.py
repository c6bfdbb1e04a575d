"""Step time with one slow rank: micro-batches dealt by speed against dealt evenly, layers divided by time or by cost.

    .venv/bin/python -m benchmarks.runs.dealing [--json runs/benchmarks/dealing.json]

2 and 3 replicas, and 2 stages, of a GPT-2 of 9 M parameters, one process each. As a replica, rank 0 sleeps after each
forward and backward for twice the time that it took, so it is 3 times as slow; as a stage, it shares its core with two
busy processes. The two sides alternate in the same processes, with the same weights and tokens; their losses in the
warm-up, in which the speeds of replicas are measured, must agree to LOSS_TOLERANCE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.pp.stage import Stage
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.auto import choose_options
from acsgd.run.setup.build import build_session
from acsgd.run.step.hooks import LoopState
from acsgd.run.step.pace import Pace
from acsgd.train import train_step
from benchmarks.common.compare import Comparison, RankRounds, Step, alternate, on_ranks, summarise
from benchmarks.runs.speed import SMALL, save_model

MICROS, FACTOR = 4, 3
"""Micro-batches per replica if dealt evenly; how many times as slow rank 0 is."""
WARMUP, STEPS_PER_BLOCK = 12, 2
LOSS_TOLERANCE = 1e-5


def config_of(model: Path, ranks: int, *, stages: int = 1, deal: Any = "even", layers: Any = None) -> Config:
    """Return a run of single sequences per micro-batch."""
    return Config(
        model=ModelConfig(name=str(model)),
        data=DataConfig(sources="demo", sequence=SMALL.sequence, batch=MICROS * ranks, deal=deal),
        optim=OptimConfig(lr=3e-4, steps=10**9),
        pp=PipelineConfig(stages=stages, layers=layers),
        log=LogConfig(dir=str(model.parent / "run")),
    )


def step_of(session: Session, deals: list[list[int]]) -> Step:
    """Return a step of a run, on random tokens; each new dealing is appended to `deals`."""
    pace = Pace(session, lambda event: deals.append(event.fields["micros"]) if event.name == "deal" else None)

    def step(number: int) -> float:
        mine = pace.micros(number)
        generator = torch.Generator().manual_seed(number % 4)
        shape = session.job.shapes.num_micros, 1, SMALL.sequence + 1
        tokens = torch.randint(SMALL.vocabulary, shape, generator=generator)
        tokens = tokens[mine.start : mine.stop]
        ids = torch.zeros(len(tokens), 1, dtype=torch.int64)
        batch = Batch({"input_ids": tokens[..., :-1]}, tokens[..., 1:], sample_ids=ids, micro_ids=mine)
        result = train_step(session, batch, Progress(step=number))
        pace.before_next(LoopState(result.progress, result.summary))
        return result.loss / session.job.topology.world_size  # all ranks return the loss of all

    return step


def slow_down(name: str) -> None:
    """Make a method of Stage take FACTOR times as long."""
    method: Callable[..., Any] = getattr(Stage, name)

    def slow(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = method(*args, **options)
        time.sleep((FACTOR - 1) * (time.perf_counter() - started))
        return result

    setattr(Stage, name, slow)


@contextlib.contextmanager
def on_shared_core(rank: int) -> Iterator[None]:
    """Run this process on a core of its own; rank 0 beside FACTOR - 1 processes that are always busy."""
    os.sched_setaffinity(0, {rank})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((FACTOR - 1) * (rank == 0))]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def rank_rounds(
    rank: int, replicas: int, stages: int, model: Path, store: str, rounds: int
) -> tuple[RankRounds, tuple[int, ...]]:
    """Run one rank; return its times, and the micro-batches of each replica, or the blocks of each stage."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    size = replicas * stages
    launch, file_store = Launch(rank, rank, size), dist.FileStore(store, size)
    deals = list[list[int]]()
    with contextlib.ExitStack() as stack:
        if stages > 1:
            stack.enter_context(on_shared_core(rank))
            options: list[dict[str, Any]] = [{"stages": stages, "layers": "auto"}, {"stages": stages}]
        else:
            for name in ("forward", "backward") if rank == 0 else ():
                slow_down(name)
            options = [{"deal": "speed"}, {}]
        jobs = [prepare(config_of(model, size, **each), launch) for each in options]
        timeout = timedelta(seconds=120)
        groups = stack.enter_context(connect(jobs[0].topology, timeout=timeout, store=file_store))
        jobs = [choose_options(job, launch, groups)[0] for job in jobs]
        ours, theirs = (step_of(build_session(job, open_weight_source(job), groups), deals) for job in jobs)
        measured = alternate(ours, theirs, warmup=WARMUP, rounds=rounds, steps=STEPS_PER_BLOCK, barrier=dist.barrier)
    return measured, jobs[0].config.pp.blocks or tuple(deals[-1])


def measure(replicas: int, stages: int, rounds: int) -> tuple[Comparison, tuple[int, ...]]:
    """Compare the two; return how micro-batches or blocks were divided. Raises RuntimeError if losses differ."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", tied=True)
        ranks = on_ranks(
            replicas * stages, rank_rounds, replicas, stages, model, str(Path(directory) / "store"), rounds
        )
    result = summarise([measured for measured, _ in ranks], steps=STEPS_PER_BLOCK)
    if result.loss_error > LOSS_TOLERANCE:
        raise RuntimeError(f"{replicas} x {stages} ranks: the losses differ by {result.loss_error:.1e}, relatively")
    return result, ranks[0][1]


def main() -> None:
    """Measure, print, save."""
    transformers_logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/dealing.json"), help="path of the results")
    parser.add_argument("--rounds", type=int, default=10, help=f"of {STEPS_PER_BLOCK} steps of each side")
    options = parser.parse_args()
    shown = Table(title=f"Step time with rank 0 {FACTOR} times as slow, divided by speed and evenly")
    for name in ("ranks", "share of each", "by speed, s", "evenly, s", "ratio", "quartiles", "loss error"):
        shown.add_column(name, justify="right")
    rows = []
    for replicas, stages in ((2, 1), (3, 1), (1, 2)):
        result, shares = measure(replicas, stages, options.rounds)
        low, high = result.quartiles
        shown.add_row(
            f"{replicas} replicas" if stages == 1 else f"{stages} stages",
            " ".join(map(str, shares)),
            f"{result.ours_s:.3f}",
            f"{result.theirs_s:.3f}",
            f"{result.median:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{result.loss_error:.1e}",
        )
        rows.append({"replicas": replicas, "stages": stages, "shares": shares, **result._asdict()})
    Console(width=120).print(shown)
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
