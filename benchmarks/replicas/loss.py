"""Held-out loss and traffic of the data-parallel modes, each at its best learning rate, training a small GPT-2:

    python -m benchmarks.replicas.loss --task finetune [--rows "cocktail*" ...] [--pretrain a.txt --finetune b.txt]
    python -m benchmarks.replicas.loss --task scratch ...
    python -m benchmarks.replicas.loss --svg docs/replicas_loss.svg        # draws the results of both tasks

A model of 1.3 M parameters, or with --size large of 106 M, is pretrained on one text and fine-tuned on another for one
epoch, or trained on the latter from scratch for two, with one process per replica (common/tuning.py). All runs of a
seed use the same batches; seeds differ in batches and new weights. Rows with the prefix "torch:" are
DistributedDataParallel on the same data (ddp.py).
The optimizer is AdamW, and in rows such as "diloco@muon" another one, as in optim.name.
Modes are compared by the held-out loss of the final weights and by the bytes that a replica sends. With the first seed
each mode runs at all --rates, and at up to two further ones while the best is the lowest or the highest; with the other
seeds only at its best rate and at the best rate of all-reduce. By default the two texts are the halves of the "demo"
source, long enough for --steps 25.

Results are cached in --dir: a second start with other rows or more seeds runs only what is missing, or everything if
the code has changed. The picture needs pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from acsgd.config.spec import from_spec, to_spec
from acsgd.dp import MODES as MODES_OF_ACSGD
from acsgd.dp.modes.cocktail_grad import CocktailGrad
from acsgd.dp.modes.diloco import DiLoCo
from acsgd.dp.modes.quantized import Quantized
from acsgd.dp.modes.sparseloco import SparseLoCo
from acsgd.shards.config import parameter_count, read_config
from benchmarks.common.tuning import SIZES, Outcome, Setting, Tuning, Variant
from benchmarks.pipeline.convergence import texts
from benchmarks.replicas.ddp import is_torch

EXACT, EXACT_OF_TORCH = "allreduce", "torch:ddp"
MODES = (
    EXACT,
    EXACT_OF_TORCH,
    "torch:fp16",
    *(f"torch:powersgd:rank={rank}" for rank in (1, 2, 4)),
    "torch:cocktail_hook:topk=0.02,bits=4",
    "torch:cocktail_hook:topk=0.02,bits=4,plain=true",
    *(f"powersgd:rank={rank}" for rank in (1, 2, 4)),
    *(f"quantized:bits={bits},exact_steps={{tenth}}" for bits in (1, 4)),
    *(f"cocktail_grad:topk={topk:g},bits={bits}" for topk in (0.1, 0.02, 0.015, 0.005) for bits in (4, 2)),
    "cocktail",
    "cocktail:moment_correction=false",
    "cocktail:random=0.05,topk=0.1",
    "sparseloco:inner=15",
    "sparseloco:inner=15,moment_correction=true",
    "diloco:inner=15",
    *(f"diloco:inner={inner},outer_lr=1,momentum=0,bits=4,moment_correction=true" for inner in (15, 75)),
    "diloco:inner={steps},outer_lr=1,momentum=0,bits=2",
    "local",
)
"""{steps} is replaced by the number of steps, {tenth} by a tenth of it."""
AFTER_UPDATE = (CocktailGrad, DiLoCo, Quantized, SparseLoCo)
"""Modes that exchange between the update of a step and the next step."""
FURTHER = 2
"""Maximum number of learning rates to try beyond --rates."""


class Task(NamedTuple):
    """Initial weights, learning rate and length of a training run."""

    init: Literal["pretrained", "scratch"]
    lr: float
    """Learning rate, multiplied by each of --rates."""
    epochs: int

    def setting(self, steps: int, size: str = "small") -> Setting:
        """Return the options that all runs share. steps: per epoch; a tenth of all steps are warm-up."""
        return replace(
            SIZES[size],
            trained=steps * SIZES[size].batch,
            init=self.init,
            epochs=self.epochs,
            exact_epochs=0,
            lr=self.lr,
            warmup=0.1 * self.epochs,
        )


TASKS = {"finetune": Task("pretrained", 5e-4, epochs=1), "scratch": Task("scratch", 2e-3, epochs=2)}


class Row(NamedTuple):
    """Results of one mode; lists are by seed."""

    mode: str
    by_rate: dict[float, float]
    """Final held-out loss of the first seed, by learning rate relative to the task's."""
    rate: float
    """The best of these learning rates."""
    held_out: list[float]
    """Final held-out loss at the best rate."""
    above: list[float]
    """Held-out loss relative to that of all-reduce at its own best rate, 0 = equal."""
    above_at_exact: list[float]
    """The same, with this mode, too, at all-reduce's best rate."""
    sent: float
    """Bytes per step and replica, mean over the whole run."""
    sent_late: float
    """Bytes per step and replica, mean over the second half."""


@dataclass(frozen=True)
class Sweep:
    """Runs of one task, each started when its result is needed."""

    tuning: Tuning
    replicas: int
    seeds: Sequence[int]
    rates: Sequence[float]
    console: Console

    def row(self, mode: str, exact: Row | None) -> Row:
        """Find a mode's best rate and run all seeds at it. exact: all-reduce's row; None = this is all-reduce."""
        by_rate = self.by_rate(mode)
        rate = min(by_rate, key=by_rate.__getitem__)
        outcomes = [self.outcome(mode, rate, seed) for seed in self.seeds]
        held_out = [outcome.held_out[-1] for outcome in outcomes]
        baseline = held_out if exact is None else exact.held_out
        exact_rate = rate if exact is None else exact.rate
        at_exact = [self.outcome(mode, exact_rate, seed).held_out[-1] for seed in self.seeds]
        sent = [self._sent_by_step(mode, rate, outcome) for outcome in outcomes]
        half = len(sent[0]) // 2
        return Row(
            mode,
            dict(sorted(by_rate.items())),
            rate,
            held_out,
            above=[mine / loss - 1 for mine, loss in zip(held_out, baseline, strict=True)],
            above_at_exact=[mine / loss - 1 for mine, loss in zip(at_exact, baseline, strict=True)],
            sent=fmean(map(fmean, sent)) / self.replicas,
            sent_late=fmean(fmean(each[half:]) for each in sent) / self.replicas,
        )

    def by_rate(self, mode: str) -> dict[float, float]:
        """Return the first seed's final held-out loss by rate; try further rates while the best is at an end."""
        losses = {rate: self.outcome(mode, rate, self.seeds[0]).held_out[-1] for rate in sorted(self.rates)}
        for _ in range(FURTHER if len(self.rates) > 1 else 0):
            best, ends = min(losses, key=losses.__getitem__), (min(losses), max(losses))
            if best not in ends:
                break
            rate = best / 2 if best == ends[0] else best * 2
            losses[rate] = self.outcome(mode, rate, self.seeds[0]).held_out[-1]
        return losses

    def outcome(self, mode: str, rate: float, seed: int) -> Outcome:
        """Return the result of a run, from the cache or by running it."""
        started = time.monotonic()
        name, optimizer = _with_optimizer(mode)
        variant = Variant(mode=name, replicas=self.replicas, rate=rate, optimizer=optimizer)
        outcome = self.tuning.outcome(variant, seed)
        if (seconds := time.monotonic() - started) > 1:  # else it is from the cache
            result = f"held-out loss {outcome.held_out[-1]:.4f}, {seconds:.0f} s"
            self.console.print(f"{mode}, rate x {rate:g}, seed {seed}: {result}", highlight=False)
        return outcome

    def _sent_by_step(self, mode: str, rate: float, outcome: Outcome) -> list[int]:
        """Return the bytes that all replicas sent for each step of a run.

        The metrics count an exchange after the update of a step in the next step, and one after the last step not at
        all: it is assumed to equal the one a period earlier, or, if it is the only one of the mode, the first one of a
        run of the first seed with half of the period. Raises ValueError if the only one is of one of several fragments.
        """
        name, optimizer = _with_optimizer(mode)
        parsed = None if is_torch(name) else from_spec(name, MODES_OF_ACSGD, key="--modes")
        if not isinstance(parsed, AFTER_UPDATE):
            return outcome.dp_bytes
        period = getattr(parsed, "inner", 1) // getattr(parsed, "fragments", 1)
        first, *others = outcome.dp_bytes
        others[0] += first  # of an exact step, which exchanges before its update
        steps, redundant = len(outcome.dp_bytes), getattr(parsed, "redundant_steps", 0)
        if period != steps - redundant or not isinstance(parsed, DiLoCo | SparseLoCo):
            return [*others, outcome.dp_bytes[-period] if period < steps - redundant else 0]
        if getattr(parsed, "fragments", 1) > 1:
            raise ValueError(f"--modes {mode}: the bytes of its only exchange are not known; give fragments=1")
        halved = replace(parsed, inner=period // 2)
        earlier = self.outcome(f"{to_spec(halved, MODES_OF_ACSGD)}@{optimizer}", rate, self.seeds[0])
        return [*others, earlier.dp_bytes[redundant + halved.inner]]

    def compare_exact(self, rate: float) -> float:
        """Return the largest difference between the train losses of torch's all-reduce and acsgd's."""
        pair = [self.outcome(mode, rate, self.seeds[0]).losses for mode in (EXACT, EXACT_OF_TORCH)]
        return max(abs(mine - other) for mine, other in zip(*pair, strict=True))


def _with_optimizer(mode: str) -> tuple[str, str]:
    """Return the mode and the optimizer of a row."""
    name, _, optimizer = mode.partition("@")
    return name, optimizer or Variant().optimizer


def table(rows: Sequence[Row], exact_bytes: float, title: str) -> Table:
    """Return a table of losses by rate, comparison with all-reduce, and bytes, one mode per row."""
    shown = Table(title=title)
    shown.add_column("dp.mode", no_wrap=True)
    rates = sorted({rate for row in rows for rate in row.by_rate})
    ends = ("all seeds", "above all-reduce", "at its rate", "bytes / step", "2nd half", "fewer")
    for name in (*(f"x {rate:g}" for rate in rates), *ends):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        losses = {rate: f"{loss:.4f}" for rate, loss in row.by_rate.items()}
        losses[row.rate] = f"[bold]{losses[row.rate]}[/]"
        fewer = f"{exact_bytes / row.sent:.3g} x" if row.sent else "all"
        shown.add_row(
            row.mode,
            *(losses.get(rate, "") for rate in rates),
            f"{fmean(row.held_out):.4f}",
            percent(row.above),
            percent(row.above_at_exact),
            f"{row.sent:.0f}",
            f"{row.sent_late:.0f}",
            fewer,
        )
    return shown


def percent(shares: Sequence[float]) -> str:
    """Format the mean and the range of fractions, %."""
    return f"{fmean(shares):+.2%} ({100 * min(shares):+.2f} .. {100 * max(shares):+.2f})"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="finetune", help="fine-tuning, or training from scratch")
    parser.add_argument(
        "--rows", nargs="+", default=["*"], help='modes to run; wildcards such as "cocktail*" match several'
    )
    parser.add_argument("--modes", nargs="+", default=MODES, help="modes that --rows chooses from")
    parser.add_argument("--size", choices=SIZES, default="small", help="1.3 M or 106 M parameters")
    parser.add_argument("--replicas", type=int, default=4, help="number of replicas, one process each")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.5, 1.0, 2.0, 4.0], help="learning rates, relative to the task's"
    )
    parser.add_argument("--steps", type=int, default=150, help="steps per epoch")
    parser.add_argument("--pretrain", help="text, as in data.sources")
    parser.add_argument("--finetune", help="another text, as in data.sources")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks/replicas"), help="cache of results")
    parser.add_argument("--json", default="runs/benchmarks/replicas_{task}_{replicas}.json", help="path of the results")
    parser.add_argument("--svg", type=Path, help="draw the results of both tasks to this path; measure nothing")
    options = parser.parse_args()
    if (options.pretrain is None) != (options.finetune is None):
        parser.error("give both --pretrain and --finetune, or neither")
    return options


def main() -> None:
    """Measure, print, save; or draw."""
    options = parse_arguments()
    if options.svg is not None:
        # here, so that the ranks, which import this file, need no matplotlib
        from benchmarks.common.pictures import save
        from benchmarks.replicas.loss_picture import draw

        paths = [Path(options.json.format(task=task, replicas=options.replicas)) for task in TASKS]
        save(draw([json.loads(path.read_text()) for path in paths]), options.svg)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are terminated, too
    setting = TASKS[options.task].setting(options.steps, options.size)
    options.dir.mkdir(parents=True, exist_ok=True)
    pretrain, finetune = texts(options.pretrain, options.finetune)
    tuning = Tuning.open(options.dir, setting, pretrain=pretrain, finetune=finetune)
    measure(tuning, options)


def measure(tuning: Tuning, options: argparse.Namespace) -> None:
    """Run what is not cached yet, print, save."""
    setting, console = tuning.setting, Console(width=210)
    steps = setting.epochs * setting.steps_per_epoch
    modes = [mode.format(steps=steps, tenth=steps // 10) for mode in options.modes]
    sweep = Sweep(tuning, options.replicas, options.seeds, options.rates, console)
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "setting": asdict(setting),
    }
    about |= {"task": options.task, "replicas": options.replicas, "seeds": options.seeds}
    about |= {"texts": [options.pretrain, options.finetune]}
    parameters = parameter_count(read_config(tuning.model))
    about["fp16_ring_bytes"] = exact_bytes = 2 * (options.replicas - 1) / options.replicas * 2 * parameters
    path = Path(options.json.format(task=options.task, replicas=options.replicas))
    rows = [exact := sweep.row(EXACT, None)]
    for mode in modes:
        if mode != EXACT and any(fnmatchcase(mode, pattern) for pattern in options.rows):
            rows.append(sweep.row(mode, exact))
            write(path, about, rows)
    seeds = f"{len(options.seeds)} seeds"
    console.print(table(rows, exact_bytes, f"{options.task}, {options.replicas} replicas, {steps} steps, {seeds}"))
    if any(row.mode == EXACT_OF_TORCH for row in rows):
        about["largest_difference_of_torch"] = difference = sweep.compare_exact(exact.rate)
        console.print(f"largest difference between the train losses of {EXACT_OF_TORCH} and {EXACT}: {difference:.1e}")
    write(path, about, rows)


def write(path: Path, about: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the results so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "rows": [row._asdict() for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
