"""Held-out loss, step time and memory of optimizers and of master weights, each at its best learning rate:

    python -m benchmarks.models.optimizers [--task scratch] [--rows "adamw*" ...] [--pretrain a.txt --finetune b.txt]

A GPT-2 of 1.3 M parameters is fine-tuned for one epoch, or trained from scratch for two, with two stages, as in
replicas.loss, whose texts and rates this takes. All runs of a seed use the same batches. The first seed runs at all
--rates, and at up to two further ones while the best is the lowest or the highest; other seeds at the best one. Rows
are compared with the first one that is run. Results of losses are cached in --dir.

Steps are timed in one process, all rows in turn: the CPU time of `Optimizer.step` for weights of 16 M parameters, and
the memory of weights, masters, gradients and state, and of the step beyond them.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from acsgd.config.options import OptimConfig
from acsgd.config.spec import from_spec
from acsgd.optim import OPTIMIZERS
from acsgd.optim.base import OptimizerSpec
from acsgd.optim.per_weight import open_optimizer
from acsgd.run.plan.layer_trace import MemoryTracker
from acsgd.shards.weights import Weight, as_own_master
from acsgd.streams import Streams
from benchmarks.common.tuning import Tuning, Variant
from benchmarks.pipeline.convergence import texts
from benchmarks.replicas.loss import FURTHER, TASKS, percent

ROWS = {
    "adamw": Variant(),
    "adamw, constant": Variant(schedule="constant"),
    "schedule_free_adamw": Variant(optimizer="schedule_free_adamw", schedule="constant"),
    "bf16": Variant(dtype="bf16"),
    "bf16, masters=none": Variant(dtype="bf16", masters="none"),
}
SHAPES = [(2048, 1024)] * 8
"""Of the weights whose steps are timed."""


class Row(NamedTuple):
    """Losses of one row; lists are by seed."""

    name: str
    by_rate: dict[float, float]
    """Final held-out loss of the first seed, by learning rate relative to the task's."""
    rate: float
    """The best of these learning rates."""
    held_out: list[float]
    """Final held-out loss at the best rate."""
    above: list[float]
    """Held-out loss relative to that of the first row, 0 = equal."""


class StepCost(NamedTuple):
    """Cost of a step of the optimizer."""

    name: str
    ratios: list[float]
    """CPU time relative to that of the first row, by round."""
    held: float
    """Memory between steps, with gradients, bytes per parameter."""
    peak: float
    """Memory of the step beyond that, bytes per parameter."""


def row_of(name: str, tuning: Tuning, options: argparse.Namespace, baseline: Row | None, console: Console) -> Row:
    """Find a row's best rate, and run all seeds at it. baseline: the first row; None = this is it."""

    def held_out(rate: float, seed: int) -> float:
        started = time.monotonic()
        loss = tuning.outcome(ROWS[name]._replace(rate=rate), seed).held_out[-1]
        if (seconds := time.monotonic() - started) > 1:  # else it is from the cache
            console.print(f"{name}, rate x {rate:g}, seed {seed}: held-out loss {loss:.4f}, {seconds:.0f} s")
        return loss

    by_rate = {rate: held_out(rate, options.seeds[0]) for rate in sorted(options.rates)}
    for _ in range(FURTHER if len(options.rates) > 1 else 0):
        best, ends = min(by_rate, key=by_rate.__getitem__), (min(by_rate), max(by_rate))
        if best not in ends:
            break
        rate = best / 2 if best == ends[0] else best * 2
        by_rate[rate] = held_out(rate, options.seeds[0])
    best = min(by_rate, key=by_rate.__getitem__)
    losses = [held_out(best, seed) for seed in options.seeds]
    first = baseline.held_out if baseline else losses
    above = [mine / loss - 1 for mine, loss in zip(losses, first, strict=True)]
    return Row(name, dict(sorted(by_rate.items())), best, losses, above)


def step_of(variant: Variant) -> tuple[Callable[[], None], MemoryTracker]:
    """Return a step of an optimizer, and what has counted the memory of its weights."""
    spec: OptimizerSpec = from_spec(variant.optimizer, OPTIMIZERS, key="optim.name")
    config = OptimConfig(lr=1e-3, steps=1000, schedule=variant.schedule, masters=variant.masters)
    with (tracker := MemoryTracker()):
        weights = []
        for number, shape in enumerate(SHAPES):
            values = torch.randn(shape, dtype=torch.bfloat16 if variant.dtype == "bf16" else torch.float32)
            param = nn.Parameter(values)
            has_master = spec.averages or (variant.dtype == "bf16" and variant.masters == "fp32")
            master = nn.Parameter(values.float().clone()) if has_master else as_own_master(param)
            master.grad = torch.randn(shape)
            weights.append(Weight(str(number), param, master, is_hidden_matrix=True))
        optimizer = open_optimizer(spec, weights, config, Streams(torch.device("cpu")))
        optimizer.step(0)  # which allocates the state
        held = tracker.peak = tracker.now
        optimizer.step(1)
        tracker.peak -= held
    return lambda: optimizer.step(1), tracker


def step_costs(names: Sequence[str], rounds: int) -> list[StepCost]:
    """Time the steps of some rows in turn."""
    made = {name: step_of(ROWS[name]) for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        times = {}
        for name, (step, _) in made.items():
            started = time.process_time()
            step()
            times[name] = time.process_time() - started
        for name in names:
            ratios[name].append(times[name] / times[names[0]])
    count = sum(rows * columns for rows, columns in SHAPES)
    return [StepCost(name, ratios[name], each.now / count, each.peak / count) for name, (_, each) in made.items()]


def table(rows: Sequence[Row], costs: Sequence[StepCost], title: str) -> Table:
    """Return a table of losses by rate and costs, one row each."""
    shown = Table(title=title)
    shown.add_column("row", no_wrap=True)
    rates = sorted({rate for row in rows for rate in row.by_rate})
    for name in (*(f"x {rate:g}" for rate in rates), "all seeds", f"above {costs[0].name}", "step", "held", "+ step"):
        shown.add_column(name, justify="right", no_wrap=True)
    by_name = {row.name: row for row in rows}
    for cost in costs:
        cells = [""] * (len(rates) + 2)
        if row := by_name.get(cost.name):
            losses = {rate: f"{loss:.4f}" for rate, loss in row.by_rate.items()}
            losses[row.rate] = f"[bold]{losses[row.rate]}[/]"
            cells = [*(losses.get(rate, "") for rate in rates), f"{fmean(row.held_out):.4f}", percent(row.above)]
        spread = f"{median(cost.ratios):.2f} x ({min(cost.ratios):.2f} - {max(cost.ratios):.2f})"
        shown.add_row(cost.name, *cells, spread, f"{cost.held:.1f} B", f"{cost.peak:.1f} B")
    return shown


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="finetune", help="fine-tuning, or training from scratch")
    parser.add_argument("--rows", nargs="+", default=["*"], help='rows to run; wildcards such as "bf16*" match several')
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.5, 1.0, 2.0, 4.0], help="learning rates, relative to the task's"
    )
    parser.add_argument("--steps", type=int, default=150, help="steps per epoch")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timed steps")
    parser.add_argument("--pretrain", help="text, as in data.sources")
    parser.add_argument("--finetune", help="another text, as in data.sources")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks/replicas"), help="cache of results")
    parser.add_argument("--json", default="runs/benchmarks/optimizers_{task}.json", help="path of the results")
    options = parser.parse_args()
    if (options.pretrain is None) != (options.finetune is None):
        parser.error("give both --pretrain and --finetune, or neither")
    options.rows = [name for name in ROWS if any(fnmatchcase(name, pattern) for pattern in options.rows)]
    return options


def main() -> None:
    """Measure, print, save."""
    options, console = parse_arguments(), Console(width=200, highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are terminated, too
    torch.set_num_threads(1)
    costs, rows = step_costs(options.rows, options.rounds), list[Row]()
    setting = TASKS[options.task].setting(options.steps)
    options.dir.mkdir(parents=True, exist_ok=True)
    pretrain, finetune = texts(options.pretrain, options.finetune)
    tuning = Tuning.open(options.dir, setting, pretrain=pretrain, finetune=finetune)
    about: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "task": options.task}
    about |= {"setting": asdict(setting), "seeds": options.seeds, "texts": [options.pretrain, options.finetune]}
    path = Path(options.json.format(task=options.task))
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in options.rows:
        rows.append(row_of(name, tuning, options, rows[0] if rows else None, console))
        results = {"rows": [row._asdict() for row in rows], "costs": [cost._asdict() for cost in costs]}
        path.write_text(json.dumps({"about": about, **results}, indent=1))
    steps = setting.epochs * setting.steps_per_epoch
    console.print(table(rows, costs, f"{options.task}, {steps} steps, {len(options.seeds)} seeds"))


if __name__ == "__main__":
    main()
