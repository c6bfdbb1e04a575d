"""Cost of log.trace in step time and CPU time:

    .venv/bin/python -m benchmarks.pipeline.traced [--rounds 40]

The model, text, batch and optimizer are those of examples/demo.py, as one pipeline of 2 stages of two processes over
gloo on this machine. Traced steps alternate with steps that are not, of the same training. The CPU time of a step is
robust against other programs; less so is its ratio, so the number of spans of a step times the CPU time of one, which
is measured alone, is printed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from acsgd.comm.spans import SpanRecorder
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.data import open_data
from benchmarks.common.compare import RankRounds, alternate, on_ranks, summarise
from benchmarks.pipeline.forms import Training, open_trainings
from benchmarks.pipeline.overhead import BATCHES, STAGES, config_of
from examples.demo import write_inputs

WARMUP = 4
GOAL = 0.01
"""Largest acceptable share of a step."""
PROBES = 100_000


@dataclass
class Side:
    """Steps of a training, traced or not."""

    training: Training
    batches: Sequence[Batch]
    traced: bool
    spans: list[int] = field(default_factory=list)
    """Number of spans, by step."""

    def __call__(self, number: int) -> float:
        """Run a step; return this rank's part of the loss."""
        recorder = SpanRecorder() if self.traced else None
        self.training.record_to(recorder)
        result = self.training.step(self.batches[number % BATCHES])
        self.spans.append(len(recorder.spans) if recorder else 0)
        return result.loss / STAGES


class RankResult(NamedTuple):
    """One rank's part."""

    rounds: RankRounds
    spans: float
    """Per step."""
    cpu_per_span_s: float


def rank_result(rank: int, model: Path, store: str, form: str, rounds: int) -> RankResult:
    """Run one rank."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    job = prepare(config_of(model, form), Launch(rank, rank, STAGES))
    reader = open_data(job).reader
    read = [reader.batch(number) for number in range(BATCHES)]
    batches = [replace(batch, upcoming=upcoming) for batch, upcoming in zip(read, [*read[1:], read[0]], strict=True)]
    with open_trainings([job], store, sequences=BATCHES * job.config.data.batch) as (training,):
        sides = Side(training, batches, traced=True), Side(training, batches, traced=False)
        costs = alternate(*sides, warmup=WARMUP, rounds=rounds, steps=1, barrier=dist.barrier)
    return RankResult(costs, statistics.median(sides[0].spans), cpu_per_span())


def cpu_per_span() -> float:
    """Return the CPU time of recording a span with details, seconds."""
    recorder, started = SpanRecorder(), time.process_time()
    for number in range(PROBES):
        with recorder.span("action", "probe", bytes=number):
            pass
    return (time.process_time() - started) / PROBES


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="a step of each kind per round")
    parser.add_argument("--form", default="delta:bits=4/fixpoint:bits=8", help="codecs of activations/gradients")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_inputs(model.parent)
        ranks = on_ranks(STAGES, rank_result, model, str(Path(directory) / "store"), options.form, options.rounds)
    times = summarise([rank.rounds for rank in ranks], steps=1)
    cpu_s = statistics.median(sum(rank.rounds.rounds[at][1].cpu_s for rank in ranks) for at in range(options.rounds))
    recorded_s = sum(rank.spans * rank.cpu_per_span_s for rank in ranks)
    print(f"traced / not: step time {times.median:.3f}, CPU time {times.cpu:.4f} (goal {1 + GOAL})")
    print(f"spans per step of all ranks: {sum(rank.spans for rank in ranks):.0f}, {1e6 * recorded_s:.0f} us of CPU")
    print(f"CPU time of a step: {1e3 * cpu_s:.1f} ms; share of the spans {recorded_s / cpu_s:.2%} (goal {GOAL:.0%})")


if __name__ == "__main__":
    main()
