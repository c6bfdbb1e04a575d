"""Step time of a pipeline on rate-limited links; needs root:

    .venv/bin/python -m benchmarks.pipeline.network [--json runs/benchmarks/network.json] [--svg docs/network.svg]

A pipeline of 2, then of 4 stages trains a GPT-2 of 4 M parameters in fp32, with one process of one thread per host. The
hosts are network namespaces (netlab.py), without delay and with 20 ms between any two. The head is the embedding, whose
rows and gradients travel between the first and the last stage. Tokens follow Zipf's law: about as many are different as
in a text. The batch is the whole data set, so all sequences are in the activation caches when anything is timed. All
codecs run in the same processes, in turn.

compute     an uncompressed step without delay or limit: all processes on the cores of this machine, the pipeline's
            bubble included. One is measured in every round, and the other steps of the round are compared with it
traffic     the bytes of all messages of a step that one host sends, of the host that sends most, divided by the rate.
            Of 2 stages that is one direction of their boundary, with rows or their gradients; of 4 stages mostly both
            boundaries of a host in the middle
rate        the same up and down at once, such that the uncompressed traffic takes --ratio times the compute
bound       max(compute, traffic). A step cannot be faster. It is slower by the headers of packets (6 % of the traffic),
            by the first activation and the last gradients, which are not overlapped, and, with delay, by the control
            message that ends a step
at most     the speed-up of the bounds. Where gradients of 8 bits are all that a host sends, it cannot exceed 32 / 8

--schedule is that of all forms. 1F1B with a lead uses both directions at once and has more messages in flight than
fill a link. GPipe uses one direction at a time; its gain is larger, from a slower step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from benchmarks.common import netlab, pictures
from benchmarks.common.compare import OnLink
from benchmarks.pipeline.forms import UNCOMPRESSED
from benchmarks.pipeline.network_ranks import Pipeline, Setting, save_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = (2, 4)
DELAYS_S = (0.0, 0.02)
FORMS = (
    "fixpoint:bits=4/fixpoint:bits=8",
    "delta:bits=4/fixpoint:bits=8",
    "delta:bits=2/fixpoint:bits=8",
    "delta:bits=2/fixpoint:bits=4",
    "delta:bits=2/fixpoint:bits=4/rows:bits=8",
)
MIN_SPEED_UP, MIN_SHARE, MAX_SLOWDOWN = 4.3, 0.9, 1.2
"""Goals of compressed forms: speed-up over uncompressed, fraction of the bound, step time relative to compute."""
RATES = (0.5, 2.0, 4.0, 8.0)
"""Further rates in the picture, relative to that of the table."""
INK, GRID, COLORS = "#1f2933", "#e4e8ec", ("#5b6672", "#b4530a", "#1f5fbf", "#0b7a6b", "#7a3fb0")


@dataclass
class Cell(OnLink):
    """One form on one network. Lists have one entry per round."""

    stages: int
    delay_s: float
    mbit: float
    form: str
    traffic_s: float = 0.0
    compute_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def measure(self, pipeline: Pipeline, compute_s: float) -> None:
        """Run one step, in a round whose compute took `compute_s`."""
        step = pipeline.step(self.form)
        self.traffic_s = pipeline.traffic_s(step, self.mbit)
        self.compute_s.append(compute_s)
        self.step_s.append(step.seconds)

    def speed_up(self, uncompressed: Cell) -> float:
        """Return the speed-up over the uncompressed steps of the same rounds."""
        pairs = zip(uncompressed.step_s, self.step_s, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


@dataclass
class Result:
    """Results for one number of stages."""

    compute_s: float
    unlimited: list[tuple[float, float]]
    """Without a rate limit, by delay: seconds of an uncompressed step, and CPU seconds of the switch in it."""
    table: list[Cell]
    picture: list[Cell] = field(default_factory=list)


def measure(setting: Setting, ratio: float, rounds: int, rates: Sequence[float], console: Console) -> Result:
    """Measure the table in rounds, then the further rates of the picture once; all delays in turn."""
    with contextlib.ExitStack() as running:
        pipelines = []
        for delay_s in DELAYS_S:
            network = running.enter_context(netlab.lab(hosts=setting.stages, delay_s=delay_s))
            pipelines.append(running.enter_context(Pipeline(setting, network).running()))
            for form in setting.forms:
                pipelines[-1].step(form)
        mbit, result = find_rate(setting, pipelines, ratio)
        console.print(f"{setting.stages} stages: compute {result.compute_s:.2f} s; {mbit:.2f} Mbit/s")
        for (seconds, cpu_s), delay_s in zip(result.unlimited, DELAYS_S, strict=True):
            console.print(
                f"  {delay_s * 1e3:g} ms, no limit: a step {seconds:.2f} s, CPU time of the switch {cpu_s:.2f} s"
            )
        for number in range(rounds):
            one_round(pipelines, result.table[:: -1 if number % 2 else 1])
        for rate in rates:
            cells = make_cells(setting, rate * mbit)
            one_round(pipelines, cells)
            result.picture += cells
    return result


def find_rate(setting: Setting, pipelines: Sequence[Pipeline], ratio: float) -> tuple[float, Result]:
    """Return the rate, Mbit/s, at which the uncompressed traffic takes `ratio` times the compute, and empty cells."""
    steps = [pipelines[0].step(UNCOMPRESSED) for _ in range(3)]
    compute_s = statistics.median(step.seconds for step in steps)
    mbit = pipelines[0].traffic_s(steps[0], mbit=1.0) / (ratio * compute_s)
    unlimited = []
    for pipeline in pipelines:
        before = pipeline.network.switch_cpu_s()
        seconds = pipeline.step(UNCOMPRESSED).seconds
        unlimited.append((seconds, pipeline.network.switch_cpu_s() - before))
    return mbit, Result(compute_s, unlimited, make_cells(setting, mbit))


def make_cells(setting: Setting, mbit: float) -> list[Cell]:
    return [Cell(setting.stages, delay_s, mbit, form) for delay_s in DELAYS_S for form in setting.forms]


def one_round(pipelines: Sequence[Pipeline], cells: Sequence[Cell]) -> None:
    """Measure compute, then every cell in order, all at the same rate."""
    pipelines[0].limit(None)
    compute_s = pipelines[0].step(UNCOMPRESSED).seconds
    for pipeline in pipelines:
        pipeline.limit(cells[0].mbit)
    for cell in cells:
        cell.measure(pipelines[DELAYS_S.index(cell.delay_s)], compute_s)


def table(results: Sequence[Result], options: argparse.Namespace) -> Table:
    """Return a table of step times, one form per row, the picture's further rates last; green = goal met."""
    shown = Table(title=f"Optimizer steps on slow links: {options.micros} micro-batches, {options.schedule}")
    for name in ("stages, delay, rate", "forward / backward"):
        shown.add_column(name, no_wrap=True)
    for name in ("step, s", "bound, s", "of the bound", "times compute", "speed-up", "at most"):
        shown.add_column(name, justify="right")
    for result in results:
        cells = [*result.table, *result.picture]
        for cell in cells:
            where = cell.delay_s, cell.mbit
            uncompressed = next(c for c in cells if (c.delay_s, c.mbit, c.form) == (*where, UNCOMPRESSED))
            shown.add_row(*row(cell, uncompressed), end_section=cell.form == result.table[-1].form)
    return shown


def row(cell: Cell, uncompressed: Cell) -> list[str]:
    """Return a cell's table row; uncompressed: the uncompressed cell of the same network."""
    where = f"{cell.stages}, {cell.delay_s * 1e3:g} ms, {cell.mbit:.1f} Mbit/s" if cell is uncompressed else ""
    speed_up, at_most = cell.speed_up(uncompressed), uncompressed.bound_s / cell.bound_s
    judged = [f"{cell.share:.0%}", f"{cell.slowdown:.2f}", f"{speed_up:.2f}"]
    if cell is not uncompressed:
        met = cell.share >= MIN_SHARE, cell.slowdown <= MAX_SLOWDOWN, speed_up >= MIN_SPEED_UP
        judged = [f"[{'green' if is_met else 'red'}]{text}[/]" for is_met, text in zip(met, judged, strict=True)]
    form = cell.form.replace("/", " / ")
    return [where, form, f"{cell.seconds:.2f}", f"{cell.bound_s:.2f}", *judged, f"{at_most:.2f}"]


def draw(result: Result) -> Figure:
    """Draw step time against rate, a panel per delay."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.4), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(DELAYS_S), sharey=True)
    cells = [*result.table, *result.picture]
    compute_s = statistics.median(seconds for cell in cells for seconds in cell.compute_s)
    for axes, delay_s in zip(panels, DELAYS_S, strict=True):
        axes.set_title(f"{delay_s * 1e3:g} ms of delay", color=INK, fontsize=11)
        draw_panel(axes, sorted((c for c in cells if c.delay_s == delay_s), key=lambda cell: cell.mbit), compute_s)
    panels[0].set_ylabel(f"seconds per step, {cells[0].stages} stages (dashed: bound)")
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def draw_panel(axes: Axes, cells: Sequence[Cell], compute_s: float) -> None:
    """Draw a line per form, and its bound. cells: in the order of their rates."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(xscale="log", yscale="log", xlabel="Mbit/s of every host, up and down")
    for form, color in zip(dict.fromkeys(cell.form for cell in cells), cycle(COLORS), strict=False):
        drawn = [cell for cell in cells if cell.form == form]
        rates, label = [cell.mbit for cell in drawn], form.replace("/", " / ")
        axes.plot(rates, [max(compute_s, cell.traffic_s) for cell in drawn], "--", color=color, linewidth=1)
        axes.plot(rates, [cell.seconds for cell in drawn], "o-", color=color, label=label, markersize=4)
    axes.axhline(compute_s, color=INK, linewidth=0.8, label="compute")
    rates = sorted({cell.mbit for cell in cells})
    axes.set_xticks(rates, [f"{rate:.3g}" for rate in rates])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.8)


def write_json(path: Path, options: argparse.Namespace, results: Sequence[Result]) -> None:
    """Write every sample."""
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    chosen = {
        name: getattr(options, name) for name in ("schedule", "micros", "vocabulary", "untied", "ratio", "rounds")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": {**about, **chosen}, "results": [asdict(r) for r in results]}, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/network.json"), help="path of the results")
    parser.add_argument("--svg", type=Path, default=Path("docs/network.svg"), help="path of the picture")
    parser.add_argument(
        "--forms", nargs="+", default=FORMS, help="codecs: activations/gradients, or activations/gradients/tied"
    )
    parser.add_argument("--schedule", default="1f1b:lead=6")
    parser.add_argument("--micros", type=int, default=64, help="micro-batches per step")
    parser.add_argument("--vocabulary", type=int, default=4096, help="of 24,576 tokens, about 3,000 are different")
    parser.add_argument("--untied", action="store_true", help="give the head weights of its own")
    parser.add_argument("--ratio", type=float, default=4.0, help="uncompressed traffic relative to compute")
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=STAGES, default=STAGES, help="the first ones are drawn"
    )
    parser.add_argument("--rounds", type=int, default=3, help="steps of each form on each network")
    parser.add_argument("--no-picture", action="store_true", help="skip the picture and the rates that only it needs")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save, draw."""
    options = parse_arguments()
    try:
        netlab.check(needs_tun=True)
    except RuntimeError as error:
        sys.exit(f"benchmarks/pipeline/network.py: {error}")
    if not options.no_picture and find_spec("matplotlib") is None:
        sys.exit(
            "benchmarks/pipeline/network.py: the picture needs matplotlib: pip install '.[bench]', or give --no-picture"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that namespaces are removed
    transformers_logging.disable_progress_bar()
    console, results = Console(width=140), []
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", vocabulary=options.vocabulary, tied=not options.untied)
        for stages in options.stages:
            forms = UNCOMPRESSED, *options.forms
            setting = Setting(model, stages, options.schedule, options.micros, forms, options.vocabulary)
            rates = RATES if stages == options.stages[0] and not options.no_picture else ()
            results.append(measure(setting, options.ratio, options.rounds, rates, console))
    console.print(table(results, options))
    write_json(options.json, options, results)
    if not options.no_picture:
        pictures.save(draw(results[0]), options.svg)


if __name__ == "__main__":
    main()
