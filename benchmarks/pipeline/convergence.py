"""Training loss with compressed activations, against uncompressed runs, fine-tuning a small GPT-2:

    .venv/bin/python -m benchmarks.pipeline.convergence [--rows "delta*" ...] [--pretrain a.txt --finetune b.txt]

A model of 1.3 M parameters, whose head is its embedding, is pretrained on one text and fine-tuned on 256 sequences of
another for 10 epochs, on two stages in two processes, cut in the middle (common/tuning.py); with --size large one of
106 M parameters, on 64 sequences for 5. Rows differ in the codecs
of that boundary, and in that of the rows of the embedding. Each row is compared with the uncompressed run of the same
seed on the same batches: its excess is the difference of the mean train losses of the last epoch. Bits per element
count all bytes of activations after the first epoch, which is uncompressed in every run. By default the two texts are
the halves of the "demo" source.

Results are cached in --dir: a second start with other rows or more seeds runs only what is missing, or everything if
the code has changed. Several processes may share one --dir. The picture needs pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.tuning import SIZES, Outcome, Setting, Tuning, Variant, read


class Row(NamedTuple):
    """One combination of codecs."""

    family: str
    point: str
    """Its name within the family."""
    variant: Variant
    goal: float | None = None
    """Largest acceptable excess."""

    @property
    def label(self) -> str:
        """Name in tables and on the command line."""
        dropout, mask = self.variant.dropout, self.variant.dropout_mask
        return f"{self.family}, {self.point}" + (f", dropout {dropout:g} per {mask}" if dropout else "")

    @property
    def baseline(self) -> Variant:
        """Options of the uncompressed run to compare with."""
        return self.variant._replace(forward="none", backward="none", tied="rows", is_exact_first=True)


def of(family: str, point: str, forward: str, goal: float | None = None, **options: Any) -> Row:
    """Return a row with gradients in 8 bits unless `options`, fields of Variant, override that."""
    return Row(family, point, Variant(**{"forward": forward, "backward": "fixpoint:bits=8", **options}), goal)


def with_dropout(mask: Literal["step", "sample"]) -> list[Row]:
    """Return rows with dropout, with masks drawn per step or once per sample."""
    options = {"dropout": 0.1, "dropout_mask": mask}
    return [
        of("none", "uncompressed", "none", backward="none", **options),
        of("fixpoint", "2 bits", "fixpoint:bits=2", **options),
        of("delta", "2 bits", "delta:bits=2", **options),
    ]


CACHED: dict[str, Any] = {"backward": "delta:step=0.5,transform=true,rounding=stochastic"}
"""Gradients with a cache."""
ROWS = [
    of("none", "uncompressed", "none", backward="none"),
    of("none", "gradients in 8 bits", "none"),
    of("activations in 8 bits", "fixpoint", "fixpoint:bits=8"),
    of("none", "bf16 in both directions", "none:dtype=bf16", backward="none:dtype=bf16"),
    *(of("fixpoint", f"{bits} bits", f"fixpoint:bits={bits}") for bits in (2, 3, 4)),
    *(of("delta", f"{bits} bits", f"delta:bits={bits}", goal) for bits, goal in ((2, 0.01), (3, None), (4, 0.002))),
    *(of("rate-adaptive delta", f"step {step:g}", f"delta:step={step:g}") for step in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)),
    *(of("delta in a basis", f"step {step:g}", f"delta:step={step:g},transform=true") for step in (0.2, 1.3, 1.5)),
    *(
        of("balanced delta", f"step {step}, {share}", f"delta:step={step},transform=true,balance={share}", **CACHED)
        for step in (0.25, 1.5)
        for share in (0.0, 0.25, 0.5)
    ),
    of("no cache", "hadamard 4 bits", "hadamard:bits=4,low=4"),
    of("no cache", "transform step 0.1", "transform:step=0.1"),
    of("gradients in a basis", "uncompressed", "none", backward="transform:step=0.36"),
    of("gradients with a cache", "uncompressed", "none", **CACHED),
    of(
        "as pp.compress",
        "gradients with a cache",
        "none",
        backward=f"{CACHED['backward']},first_bits=8",
        is_exact_first=False,
    ),
    of(
        "as pp.compress",
        "delta in a basis, step 0.25",
        "delta:step=0.25,transform=true,first_bits=8",
        backward=f"{CACHED['backward']},first_bits=8",
        is_exact_first=False,
    ),
    of("gradients in 4 bits", "uncompressed", "none", backward="fixpoint:bits=4"),
    of("gradients in 4 bits", "delta 2 bits", "delta:bits=2", backward="fixpoint:bits=4"),
    of("tied dense", "uncompressed", "none", backward="none", tied="dense"),
    of("tied rows in 8 bits", "uncompressed", "none", 0.002, backward="none", tied="rows:bits=8"),
    of("tied rows in 8 bits", "delta 2 bits", "delta:bits=2", backward="fixpoint:bits=4", tied="rows:bits=8"),
    *with_dropout("step"),
    *with_dropout("sample"),
]


class Summary(NamedTuple):
    """Results of one row; lists are by seed."""

    row: Row
    train: list[float]
    """Mean train loss of the last epoch."""
    excess: list[list[float]]
    """Mean train loss minus that of the baseline, by seed and epoch."""
    held_out: list[float]
    """Held-out loss at the end."""
    held_out_lowest: list[float]
    """Lowest held-out loss of all epochs."""
    held_out_excess: list[float]
    """Held-out loss at the end minus that of the baseline."""
    bits: list[float]
    """Bits per activation element, after the exact epochs."""
    gradient_bits: list[float]
    """The same of gradients of activations."""
    forward_bytes: list[int]
    """Bytes sent forward in the whole run."""

    @property
    def last_excess(self) -> list[float]:
        """Excess of the last epoch, by seed."""
        return [by_epoch[-1] for by_epoch in self.excess]


def choose(patterns: Sequence[str]) -> list[Row]:
    """Return the rows whose labels match a pattern, and their baselines."""
    matching = [row for row in ROWS if any(fnmatchcase(row.label, pattern) for pattern in patterns)]
    baselines = {row.baseline for row in matching}
    return [row for row in ROWS if row in matching or row.variant in baselines]


def measure(tuning: Tuning, rows: Sequence[Row], seeds: Sequence[int], console: Console) -> list[Summary]:
    """Run what is not cached yet, one seed after the other, and summarise."""
    outcomes: dict[Variant, list[Outcome]] = {row.variant: [] for row in rows}
    for seed in seeds:
        for row in rows:
            began = time.monotonic()
            outcome = tuning.outcome(row.variant, seed)
            outcomes[row.variant].append(outcome)
            loss, seconds = epoch_means(outcome, tuning.setting)[-1], time.monotonic() - began
            console.print(f"seed {seed}, {row.label}: train loss {loss:.4f}, {seconds:.0f} s", highlight=False)
    return [summarise(row, outcomes[row.variant], outcomes[row.baseline], tuning.setting) for row in rows]


def summarise(row: Row, runs: Sequence[Outcome], baselines: Sequence[Outcome], setting: Setting) -> Summary:
    """Summarise the runs of a row against its baseline's, seed by seed."""
    pairs = list(zip(runs, baselines, strict=True))
    exact = setting.exact_epochs * setting.steps_per_epoch
    return Summary(
        row=row,
        train=[epoch_means(run, setting)[-1] for run in runs],
        excess=[[a - b for a, b in zip(*(epoch_means(run, setting) for run in pair), strict=True)] for pair in pairs],
        held_out=[run.held_out[-1] for run in runs],
        held_out_lowest=[min(run.held_out) for run in runs],
        held_out_excess=[run.held_out[-1] - baseline.held_out[-1] for run, baseline in pairs],
        bits=[8 * fmean(run.forward_bytes[exact:]) / setting.elements for run in runs],
        gradient_bits=[8 * fmean(run.backward_bytes[exact:]) / setting.elements for run in runs],
        forward_bytes=[sum(run.forward_bytes) for run in runs],
    )


def epoch_means(run: Outcome, setting: Setting) -> list[float]:
    """Return the mean train loss of each epoch."""
    steps = setting.steps_per_epoch
    return [fmean(run.losses[first : first + steps]) for first in range(0, len(run.losses), steps)]


def table(summaries: Sequence[Summary]) -> Table:
    """Return a table of the mean over the seeds, and of the range of the excess, by row."""
    shown = Table(title=f"Means of {len(summaries[0].train)} seeds; excess: over the uncompressed run of the same seed")
    shown.add_column("activations", no_wrap=True)
    losses = "train loss", "excess", "range", "goal", "held out", "excess", "lowest"
    for name in ("bits", "of gradients", "MB forward", *losses):
        shown.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        excess, goal = summary.last_excess, summary.row.goal
        mark = "[green]met[/]" if goal is not None and fmean(excess) <= goal else "[red]missed[/]"
        shown.add_row(
            summary.row.label,
            f"{fmean(summary.bits):.2f}",
            f"{fmean(summary.gradient_bits):.2f}",
            f"{fmean(summary.forward_bytes) / 1e6:.1f}",
            f"{fmean(summary.train):.4f}",
            f"{fmean(excess):+.4f}",
            f"{min(excess):+.4f} .. {max(excess):+.4f}",
            "" if goal is None else f"<= {goal:g} {mark}",
            f"{fmean(summary.held_out):.4f}",
            f"{fmean(summary.held_out_excess):+.4f}",
            f"{fmean(summary.held_out_lowest):.4f}",
        )
    return shown


def to_json(summaries: Sequence[Summary], options: argparse.Namespace, setting: Setting) -> str:
    """Return all results and the settings as JSON."""
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "texts": [options.pretrain, options.finetune],
        "seeds": options.seeds,
        "setting": asdict(setting),
    }
    rows = []
    for summary in summaries:
        row, *measured = summary
        head = {"activations": row.label, "goal": row.goal, **row.variant._asdict()}
        rows.append({**head, **dict(zip(Summary._fields[1:], measured, strict=True))})
    return json.dumps({"about": about, "rows": rows}, indent=1)


def texts(pretrain: str | None, finetune: str | None) -> tuple[str, str]:
    """Return the texts for pretraining and fine-tuning: by default the halves of the "demo" source."""
    if pretrain is not None and finetune is not None:
        return read(pretrain), read(finetune)
    text = read("demo")
    return text[: len(text) // 2], text[len(text) // 2 :]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", default=["*"], help='labels as in the table; wildcards such as "delta*" match several'
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pretrain", help="text, as in data.sources")
    parser.add_argument("--finetune", help="another text, as in data.sources")
    parser.add_argument("--size", choices=SIZES, default="small", help="1.3 M or 106 M parameters")
    parser.add_argument("--epochs", type=int, help="default: 10, or 5 of the large model")
    parser.add_argument("--lr", type=float, help="default: 5e-4, or 1e-4 of the large model")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks/convergence"), help="cache of results")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/convergence.json"), help="the numbers")
    parser.add_argument("--svg", type=Path, default=Path("runs/benchmarks/convergence.svg"), help="the picture")
    options = parser.parse_args()
    if (options.pretrain is None) != (options.finetune is None):
        parser.error("give both --pretrain and --finetune, or neither")
    return options


def main() -> None:
    """Measure, print, save, draw."""
    # here, so that the ranks, which import this file, need no matplotlib; and first, as it may be absent
    from benchmarks.common.pictures import save
    from benchmarks.pipeline.convergence_picture import draw, is_drawn

    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are terminated, too
    rows = choose(options.rows)
    if not rows:
        sys.exit(f"--rows matches none of: {'; '.join(row.label for row in ROWS)}")
    given = {name: getattr(options, name) for name in ("epochs", "lr") if getattr(options, name) is not None}
    setting = replace(SIZES[options.size], **given)
    console = Console(width=160)
    pretrain, finetune = texts(options.pretrain, options.finetune)
    tuning = Tuning.open(options.dir, setting, pretrain=pretrain, finetune=finetune)
    summaries = measure(tuning, rows, options.seeds, console)
    console.print(table(summaries))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(to_json(summaries, options, setting))
    if any(is_drawn(summary) for summary in summaries):
        save(draw(summaries), options.svg)


if __name__ == "__main__":
    main()
