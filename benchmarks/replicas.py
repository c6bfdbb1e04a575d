"""What do ways in which replicas agree do to training? Fine-tunes a small GPT-2, once for each, on new text:

    .venv/bin/python benchmarks/replicas.py [--rows "cocktail*" ...] [--pretrain a.txt --finetune b.txt]

A model of 1.3 M parameters is pretrained on one text and fine-tuned for one epoch on another, by replicas in processes
of their own (benchmarks/tuning.py): the same batches in every run of a seed. What counts is the loss on held-out text
of what is saved at the end, at each mode's best learning rate among --rates, and the bytes that a replica sends. By
default the two texts are halves of the one that every Python carries.

What has been run is kept in --dir: started again, with other rows or more seeds, only what is missing is run, and all
if the code has changed.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))  # of a script only its own directory is there

from acsgd.shards.base import skeleton
from acsgd.shards.convert import read_config
from benchmarks.convergence import texts
from benchmarks.tuning import Setting, Tuning, Variant

EXACT = "allreduce"
MODES = (
    EXACT,
    "local",
    "cocktail",
    "cocktail:gain=2",
    "cocktail:random=0.05,topk=0.1",
    "sparseloco:inner=15",
    "diloco:inner=15",
)


class Row(NamedTuple):
    """A mode at one learning rate."""

    mode: str
    rate: float
    """Relative to the setting's."""
    held_out: list[float]
    """Loss at the end, by seed."""
    sent: float
    """Bytes per step and replica, over the whole run."""


def measure(tuning: Tuning, modes: Sequence[str], options: argparse.Namespace, console: Console) -> list[Row]:
    """Make all runs that are not there yet."""
    rows = []
    for mode in modes:
        for rate in options.rates:
            began, variant = time.monotonic(), Variant(mode=mode, replicas=options.replicas, rate=rate)
            outcomes = [tuning.outcome(variant, seed) for seed in options.seeds]
            sent = fmean(fmean(outcome.dp_bytes) for outcome in outcomes) / options.replicas
            rows.append(Row(mode, rate, [outcome.held_out[-1] for outcome in outcomes], sent))
            told = ", ".join(f"{loss:.4f}" for loss in rows[-1].held_out)
            seconds = time.monotonic() - began
            console.print(f"{mode}, rate x {rate:g}: held-out loss {told}, {seconds:.0f} s", highlight=False)
    return rows


def table(rows: Sequence[Row], options: argparse.Namespace, exact_bytes: float) -> Table:
    """Show the mean held-out loss of a mode at each rate, and how its best compares with that of exact sums."""
    shown = Table(title=f"{options.replicas} replicas, {options.steps} steps, {len(options.seeds)} seeds")
    shown.add_column("dp.mode", no_wrap=True)
    for name in (*(f"rate x {rate:g}" for rate in options.rates), "best / exact best", "bytes", "fewer than fp16"):
        shown.add_column(name, justify="right")
    by_mode = {mode: [row for row in rows if row.mode == mode] for mode in dict.fromkeys(row.mode for row in rows)}
    best = {mode: min(fmean(row.held_out) for row in mine) for mode, mine in by_mode.items()}
    for mode, mine in by_mode.items():
        losses = [f"{fmean(row.held_out):.4f}" for row in mine]
        relative = f"{best[mode] / best[EXACT] - 1:+.2%}" if EXACT in best else ""
        fewer = f"{exact_bytes / mine[0].sent:.3g} x" if mine[0].sent else "all"
        shown.add_row(mode, *losses, relative, f"{mine[0].sent:.0f}", fewer)
    return shown


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["*"], help='modes; "cocktail*" is each that matches')
    parser.add_argument("--modes", nargs="+", default=MODES, help="what there is to choose from")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.25, 0.5, 1.0, 2.0], help="of 5e-4")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pretrain", help="text, as in data.task")
    parser.add_argument("--finetune", help="another text, as in data.task")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks/replicas"), help="where runs are kept")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/replicas.json"), help="the numbers")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    setting = Setting(trained=options.steps * Setting.batch, epochs=1, exact_epochs=0, warmup=0.1)
    options.dir.mkdir(parents=True, exist_ok=True)
    pretrain, finetune = texts(options.pretrain, options.finetune)
    tuning = Tuning.open(options.dir, setting, pretrain=pretrain, finetune=finetune)
    chosen = [mode for mode in options.modes if any(fnmatchcase(mode, row) for row in options.rows)]
    console = Console(width=140)
    rows = measure(tuning, chosen, options, console)
    parameters = sum(parameter.numel() for parameter in skeleton(read_config(tuning.model)).parameters())
    exact_bytes = 2 * (options.replicas - 1) / options.replicas * 2 * parameters
    console.print(table(rows, options, exact_bytes))
    about = {"torch": torch.__version__, "python": platform.python_version(), "setting": asdict(setting)}
    about |= {"replicas": options.replicas, "seeds": options.seeds, "fp16_ring_bytes": exact_bytes}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "rows": [row._asdict() for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
