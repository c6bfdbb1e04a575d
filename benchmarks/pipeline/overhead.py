"""Cost of codecs in step time on links without a rate limit:

    .venv/bin/python -m benchmarks.pipeline.overhead [--json runs/benchmarks/overhead.json]

The model, text, batch and optimizer are those of examples/demo.py, as one pipeline of 2 stages: two processes of one
thread each, over gloo on this machine. Steps with codecs alternate with uncompressed steps in the same processes;
step times are compared within a round. The data set is a few batches, all of which are in the activation caches before
anything is timed, so `delta` sends differences. Bytes are those of a step, over all ranks. The first row compares
uncompressed messages with themselves, which shows the noise.

The demo ties the head to the embedding. Its rows and their gradients travel in all forms; a form may name pp.tied, as
"none/none/rows:bits=8".
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from acsgd.config.options import Config
from acsgd.config.run_file import parse
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.plan.job import prepare
from acsgd.run.report import PP_BACKWARD_BYTES, PP_FORWARD_BYTES, TIED_BYTES
from acsgd.run.setup.data import open_data
from benchmarks.common.compare import Comparison, RankRounds, alternate, on_ranks, summarise
from benchmarks.pipeline.forms import UNCOMPRESSED, Training, open_trainings, with_form
from examples.demo import write_inputs

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
STAGES = 2
BATCHES = 4
"""Size of the data set."""
WARMUP, STEPS_PER_BLOCK = 2 * BATCHES, 1
GOAL = 1.1
"""Largest acceptable step time relative to uncompressed."""
FORWARD = ("fixpoint:bits=8", "fixpoint:bits=4", "delta:bits=4", "delta:bits=2", "delta:step=1.5")
FORMS = (UNCOMPRESSED, *(f"{forward}/fixpoint:bits=8" for forward in FORWARD))


class Sent(NamedTuple):
    """Bytes of all ranks in a step."""

    forward: float
    backward: float
    tied: float


@dataclass
class Side:
    """A training as one side of a comparison."""

    training: Training
    batches: Sequence[Batch]
    sent: list[Sent] = field(default_factory=list)
    """By step."""

    def __call__(self, number: int) -> float:
        """Run step `number`; return this rank's part of the loss."""
        result = self.training.step(self.batches[number % BATCHES])
        summary = result.summary
        self.sent.append(Sent(summary[PP_FORWARD_BYTES], summary[PP_BACKWARD_BYTES], summary[TIED_BYTES]))
        return result.loss / STAGES

    def median_sent(self) -> Sent:
        """Return the median over the timed steps."""
        return Sent(*map(statistics.median, zip(*self.sent[WARMUP:], strict=True)))


class Compared(NamedTuple):
    """One rank's part in comparing a form with uncompressed messages."""

    rounds: RankRounds
    sent: Sent


class Row(NamedTuple):
    """A form in comparison with uncompressed messages."""

    form: str
    sent: Sent
    times: Comparison


def config_of(model: Path, form: str) -> Config:
    """Return the demo's configuration as one pipeline, with a nearly constant learning rate."""
    texts, run = model.parent / "stories.jsonl", model.parent / "run"
    flags = {"model.name": model, "data.sources": texts, "log.dir": run, "pp.stages": STAGES, "optim.steps": 10**9}
    return with_form(parse([str(DEMO), *(f"--{key}={value}" for key, value in flags.items())]), form)


def rank_rounds(rank: int, model: Path, store: str, forms: Sequence[str], rounds: int) -> list[Compared]:
    """Run one rank: compare each form with uncompressed messages."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    launch = Launch(rank, rank, STAGES)
    jobs = [prepare(config_of(model, each), launch) for form in forms for each in (form, UNCOMPRESSED)]
    reader = open_data(jobs[0]).reader
    read = [reader.batch(number) for number in range(BATCHES)]
    batches = [replace(batch, upcoming=upcoming) for batch, upcoming in zip(read, [*read[1:], read[0]], strict=True)]
    result = []
    with open_trainings(jobs, store, sequences=BATCHES * jobs[0].config.data.batch) as trainings:
        for ours, theirs in zip(trainings[::2], trainings[1::2], strict=True):
            sides = Side(ours, batches), Side(theirs, batches)
            costs = alternate(*sides, warmup=WARMUP, rounds=rounds, steps=STEPS_PER_BLOCK, barrier=dist.barrier)
            result.append(Compared(costs, sides[0].median_sent()))
    return result


def measure(forms: Sequence[str], rounds: int) -> list[Row]:
    """Compare each form with uncompressed messages."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_inputs(model.parent)
        ranks = on_ranks(STAGES, rank_rounds, model, str(Path(directory) / "store"), forms, rounds)
    return [row(form, sides) for form, *sides in zip(forms, *ranks, strict=True)]


def row(form: str, ranks: Sequence[Compared]) -> Row:
    """Aggregate the ranks' results of one form."""
    return Row(form, ranks[0].sent, summarise([rank.rounds for rank in ranks], steps=STEPS_PER_BLOCK))


def table(rows: Sequence[Row]) -> Table:
    """Return a table of bytes, step times and CPU times, one form per row; green = goal met."""
    shown = Table(title="Steps of the demo's model on 2 stages, unlimited links, relative to uncompressed messages")
    shown.add_column("forward / backward", no_wrap=True)
    for name in (
        "forward, kB",
        "backward, kB",
        "tied, kB",
        "step, s",
        "uncompressed, s",
        "step time",
        "quartiles",
        "CPU time",
    ):
        shown.add_column(name, justify="right")
    for form, sent, times in rows:
        low, high = times.quartiles
        color = "green" if times.median <= GOAL else "red"
        shown.add_row(
            form.replace("/", " / "),
            *(f"{count / 1e3:.1f}" for count in sent),
            *(f"{seconds:.3f}" for seconds in (times.ours_s, times.theirs_s)),
            f"[{color}]{times.median:.3f}[/]",
            f"{low:.3f} - {high:.3f}",
            f"{times.cpu:.3f}",
        )
    return shown


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/overhead.json"), help="where the numbers go")
    parser.add_argument("--rounds", type=int, default=40, help="per form; a step of each side")
    parser.add_argument("--forms", nargs="+", default=FORMS, help="codecs of activations/gradients[/pp.tied]")
    options = parser.parse_args()
    rows = measure(options.forms, options.rounds)
    Console(width=160).print(table(rows))
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor(),
    }
    about |= {"goal": GOAL, "rounds": options.rounds, "steps_per_block": STEPS_PER_BLOCK}
    forms = [{"form": each.form, **each.sent._asdict(), "times": each.times._asdict()} for each in rows]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "forms": forms}, indent=1))


if __name__ == "__main__":
    main()
