"""Held-out loss of LoRA after equal steps, beside full fine-tuning, each at its best learning rate:

    .venv/bin/python -m benchmarks.runs.adapter_loss [--svg docs/adapter-loss.svg]

A GPT-2 of 1.3 M parameters is pretrained on the first half of the "demo" text and fine-tuned on a part of the second
for EPOCHS epochs (common/tuning.py), on 2 stages, or with `cocktail_grad` on 2 replicas. With the first seed each way
to fine-tune runs at all RATES, and at further ones while the best is the lowest or the highest; with the other seeds at
its best rate. Seeds differ in batches and in the initial adapter. Bytes are those that all ranks send in a step of the
last epoch: activations forward or, between replicas, updates.

Results are cached in --dir: a second start runs only what is missing, or everything if the code has changed. The
picture needs pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.tuning import Outcome, Setting, Tuning, Variant
from benchmarks.pipeline.convergence import texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPOCHS = 4
SETTING = Setting(pretrain_steps=600, trained=128, held_out=64, epochs=EPOCHS)
LORA = "lora:r=8,alpha=16"
WAYS = {
    "full": Variant(),
    "LoRA": Variant(adapter=LORA),
    "LoRA, delta": Variant(adapter=LORA, forward="delta:bits=4"),
    "LoRA, cocktail_grad": Variant(adapter=LORA, mode="cocktail_grad", replicas=2),
}
RATES = {None: (0.5, 1.0, 2.0), LORA: (4.0, 8.0, 16.0)}
"""Learning rates by adapter, relative to that of SETTING. Each is twice the one before."""
FURTHER = 2
"""Maximum number of rates to try beyond RATES."""
UNTUNED = Variant(rate=1e-6)
"""Training at a rate that changes the weights by less than their rounding."""
STYLES = (("#5b6672", "-"), ("#b4530a", "-"), ("#1f5fbf", "--"), ("#0b7a6b", "-"))
"""Color and line of each way; dashes show a line below."""
INK, GRID = "#1f2933", "#e4e8ec"


class Row(NamedTuple):
    """Results of one way to fine-tune; losses are of held-out text."""

    name: str
    by_rate: dict[float, float]
    """Final loss of the first seed, by relative learning rate."""
    rate: float
    """The best of these."""
    losses: list[list[float]]
    """Loss after each epoch at the best rate, by seed."""
    sent: float
    """Bytes per step."""

    @property
    def final(self) -> list[float]:
        """Final loss, by seed."""
        return [curve[-1] for curve in self.losses]

    @property
    def curve(self) -> list[float]:
        """Loss after each epoch, mean over the seeds."""
        return [fmean(losses) for losses in zip(*self.losses, strict=True)]


class Runs(NamedTuple):
    """Runs, each started when its result is needed and not cached."""

    tuning: Tuning
    console: Console

    def outcome(self, name: str, variant: Variant, seed: int) -> Outcome:
        """Return the result of a run. Raises RuntimeError if it fails."""
        started = time.monotonic()
        outcome = self.tuning.outcome(variant, seed)
        if (seconds := time.monotonic() - started) > 1:  # else it is from the cache
            result = f"held-out loss {outcome.held_out[-1]:.4f}, {seconds:.0f} s"
            self.console.print(f"{name}, rate x {variant.rate:g}, seed {seed}: {result}", highlight=False)
        return outcome

    def row(self, name: str, seeds: Sequence[int]) -> Row:
        """Find the best rate with the first seed, and run the other seeds at it."""
        variant, by_rate = WAYS[name], dict[float, float]()
        waiting = list(RATES[variant.adapter])
        for _ in range(FURTHER + 1):
            for rate in waiting:
                by_rate[rate] = self.outcome(name, variant._replace(rate=rate), seeds[0]).held_out[-1]
            best = min(by_rate, key=by_rate.__getitem__)
            waiting = [best / 2] if best == min(by_rate) else [best * 2] if best == max(by_rate) else []
        outcomes = [self.outcome(name, variant._replace(rate=best), seed) for seed in seeds]
        sent = fmean(_bytes(outcome, self.tuning.setting.steps_per_epoch) for outcome in outcomes)
        return Row(name, dict(sorted(by_rate.items())), best, [outcome.held_out for outcome in outcomes], sent)


def _bytes(outcome: Outcome, steps: int) -> float:
    """Return the bytes of a step of the last epoch."""
    return fmean(sum(each) for each in zip(outcome.forward_bytes[-steps:], outcome.dp_bytes[-steps:], strict=True))


def table(untuned: float, rows: Sequence[Row]) -> Table:
    """Return a table of the losses. untuned: loss before fine-tuning."""
    columns = "fine-tuning", "loss by rate, first seed", "best rate", "held-out loss", "of the seeds", "kB per step"
    shown = Table(*columns, title=f"Held-out loss after {EPOCHS} epochs; {untuned:.4f} before")
    for row in rows:
        tried = ", ".join(f"{SETTING.lr * rate:g}: {loss:.4f}" for rate, loss in row.by_rate.items())
        losses = f"{fmean(row.final):.4f}", f"{min(row.final):.4f} - {max(row.final):.4f}"
        shown.add_row(row.name, tried, f"{SETTING.lr * row.rate:g}", *losses, f"{row.sent / 1e3:,.1f}")
    return shown


def draw(untuned: float, rows: Sequence[Row]) -> Figure:
    """Draw the loss before fine-tuning and after each epoch, a line per way, with the range of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes, epochs = figure.subplots(), range(EPOCHS + 1)
    for row, (color, line) in zip(rows, STYLES, strict=True):
        axes.plot(epochs, [untuned, *row.curve], line, marker="o", color=color, label=row.name, markersize=4)
        ends = [(min(losses), max(losses)) for losses in zip(*row.losses, strict=True)]
        low, high = zip((untuned, untuned), *ends, strict=True)
        axes.fill_between(epochs, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set_xlabel("epoch", color=INK)
    axes.set_ylabel("held-out loss, mean and range of the seeds", color=INK)
    axes.set_xticks(epochs)
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Measure, print, save, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks/adapter_loss"), help="cache of results")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/adapter_loss.json"), help="the numbers")
    parser.add_argument("--svg", type=Path, help="the picture")
    options = parser.parse_args()
    if options.svg is not None and find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib: pip install '.[bench]', or leave --svg out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are terminated, too
    options.dir.mkdir(parents=True, exist_ok=True)
    pretrain, finetune = texts(None, None)
    console = Console(width=150)
    runs = Runs(Tuning.open(options.dir, SETTING, pretrain=pretrain, finetune=finetune), console)
    untuned = runs.outcome("not fine-tuned", UNTUNED, options.seeds[0]).held_out[-1]
    rows = [runs.row(name, options.seeds) for name in WAYS]
    console.print(table(untuned, rows))
    about = {"torch": torch.__version__, "setting": asdict(SETTING), "seeds": options.seeds}
    results = {"about": about, "untuned": untuned, "rows": [row._asdict() for row in rows]}
    options.json.write_text(json.dumps(results, indent=1))
    if options.svg is not None:
        from benchmarks.common.pictures import save

        save(draw(untuned, rows), options.svg)


if __name__ == "__main__":
    main()
