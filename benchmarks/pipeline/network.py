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
tie         the share of a step's time by which it is longer than one of the untied model with the same codecs

With --paced, computations take as long as their multiplications say, the longest forward of a stage so many seconds:
the ranks sleep what is left of it, and run before all else (network_ranks.py). So steps are those of hosts with free
cores; choose more than the computations take here.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from benchmarks.common import netlab, pictures
from benchmarks.common.compare import OnLink
from benchmarks.pipeline import network_picture
from benchmarks.pipeline.forms import UNCOMPRESSED
from benchmarks.pipeline.network_ranks import UNTIED, PacedSetting, Pipeline, Setting, relative_forwards, save_model

STAGES = (2, 4)
DELAYS_S = (0.0, 0.02)
FORMS = (
    "fixpoint:bits=4/fixpoint:bits=8",
    "delta:bits=4/fixpoint:bits=8",
    "delta:bits=2/fixpoint:bits=4",
    "delta:bits=2/fixpoint:bits=4/rows:entropy_coding=true",
    "delta:bits=2/fixpoint:bits=4/rows:bits=8",
    "delta:bits=2/fixpoint:bits=4/untied",
)
MIN_SPEED_UP, MIN_SHARE, MAX_SLOWDOWN, MAX_TIE = 4.3, 0.95, 1.2, 0.02
"""Goals of compressed forms: speed-up over uncompressed, fraction of the bound, step time relative to compute, share of
the tie in the step time."""
RATES = (0.5, 2.0, 4.0, 8.0)
"""Further rates in the picture, relative to that of the table."""


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

    @property
    def untied_form(self) -> str:
        """The same codecs for the untied model."""
        return "/".join(self.form.split("/")[:2]) + UNTIED

    def tie(self, untied: Cell) -> float:
        """Return the share of step time that untied steps of the same rounds do not take."""
        return statistics.median(1 - ours / tied for ours, tied in zip(untied.step_s, self.step_s, strict=True))


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
    for name in ("step, s", "bound, s", "of the bound", "times compute", "speed-up", "at most", "tie"):
        shown.add_column(name, justify="right")
    for result in results:
        cells = [*result.table, *result.picture]
        for cell in cells:
            beside = {each.form: each for each in cells if (each.delay_s, each.mbit) == (cell.delay_s, cell.mbit)}
            shown.add_row(*row(cell, beside), end_section=cell.form == result.table[-1].form)
    return shown


def row(cell: Cell, beside: Mapping[str, Cell]) -> list[str]:
    """Return a cell's table row; beside: the cells of the same network by form."""
    uncompressed, untied = beside[UNCOMPRESSED], beside.get(cell.untied_form, cell)
    where = f"{cell.stages}, {cell.delay_s * 1e3:g} ms, {cell.mbit:.1f} Mbit/s" if cell is uncompressed else ""
    speed_up, at_most = cell.speed_up(uncompressed), uncompressed.bound_s / cell.bound_s
    judged = [f"{cell.share:.0%}", f"{cell.slowdown:.2f}", f"{speed_up:.2f}"]
    if cell is not uncompressed:
        met = cell.share >= MIN_SHARE, cell.slowdown <= MAX_SLOWDOWN, speed_up >= MIN_SPEED_UP
        judged = [mark(text, is_met) for text, is_met in zip(judged, met, strict=True)]
    form, tie = cell.form.replace("/", " / "), ""
    if untied is not cell:
        tie = mark(f"{cell.tie(untied):.1%}", cell.tie(untied) <= MAX_TIE)
    return [where, form, f"{cell.seconds:.2f}", f"{cell.bound_s:.2f}", *judged, f"{at_most:.2f}", tie]


def mark(text: str, is_met: bool) -> str:
    """Return a figure in the colour of whether it meets its goal."""
    return f"[{'green' if is_met else 'red'}]{text}[/]"


def write_json(path: Path, options: argparse.Namespace, results: Sequence[Result]) -> None:
    """Write every sample."""
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    chosen = {name: getattr(options, name) for name in ("schedule", "paced", "micros", "vocabulary", "ratio", "rounds")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": {**about, **chosen}, "results": [asdict(r) for r in results]}, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/network.json"), help="path of the results")
    parser.add_argument("--svg", type=Path, default=Path("docs/network.svg"), help="path of the picture")
    parser.add_argument(
        "--forms",
        nargs="+",
        default=FORMS,
        help="codecs: activations/gradients, or activations/gradients/pp.tied; /untied: a head with weights of its own",
    )
    parser.add_argument("--schedule", default="1f1b:lead=6")
    parser.add_argument(
        "--paced",
        type=float,
        default=0.0,
        help="time of the longest forward of a stage, seconds; 0: as long as it takes",
    )
    parser.add_argument("--micros", type=int, default=64, help="micro-batches per step")
    parser.add_argument("--vocabulary", type=int, default=4096, help="of 24,576 tokens, about 3,000 are different")
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
        models = [
            save_model(Path(directory) / name, vocabulary=options.vocabulary, tied=name == "tied")
            for name in ("tied", "untied")
        ]
        for stages in options.stages:
            forms = UNCOMPRESSED, *options.forms
            setting = Setting(*models, stages, options.schedule, options.micros, forms, options.vocabulary)
            if options.paced:
                forward_s = tuple(each * options.paced for each in relative_forwards(stages, options.vocabulary))
                setting = PacedSetting(**vars(setting), forward_s=forward_s)
            rates = RATES if stages == options.stages[0] and not options.no_picture else ()
            results.append(measure(setting, options.ratio, options.rounds, rates, console))
    console.print(table(results, options))
    write_json(options.json, options, results)
    if not options.no_picture:
        pictures.save(network_picture.draw([*results[0].table, *results[0].picture]), options.svg)


if __name__ == "__main__":
    main()
