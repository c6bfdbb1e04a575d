"""Steps of a pipeline whose links have a delay, by schedule: simulated, and measured with computations that sleep:

    .venv/bin/python -m benchmarks.pipeline.delays                       # simulated
    .venv/bin/python -m benchmarks.pipeline.delays --measured 2 4        # and measured; needs root

A forward takes --forward seconds, a backward twice as long, --split times as long in two parts; messages take no time
on the wire, and each arrives after the delay. A step ends with the delay of a message more, of the reports of all
ranks. Measured are real steps of one process per host, each in its network namespace (netlab.py), over gloo: of a GPT-2
that is so small that its computations are done in less time, of which each then sleeps the rest (network_ranks.py). The
schedules run in turn in the same processes.

compute   time of the computations of a stage with whole backwards; measured, also of what each does for its messages
share     compute over the time of the step: no step is faster
fill      the same of a step that waits for its first input alone, on the last stage, and for the reports
measured  median of --rounds steps, with the quartiles of its ratio to the step that is simulated with the measured time
          of computations
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from acsgd.config.options import Config
from acsgd.config.spec import from_spec
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.schedules import SCHEDULES
from acsgd.pp.schedules.simulate import Cost, Timeline, simulate
from benchmarks.common import netlab
from benchmarks.pipeline.forms import UNCOMPRESSED
from benchmarks.pipeline.network_ranks import (
    UNTIED,
    PacedSetting,
    Step,
    be_paced_rank,
    on_hosts,
    request_all,
    save_model,
)

STAGES, DELAYS_S = (2, 4), (0.02, 0.1)
COMPARED = (
    *("1f1b:lead=2", "1f1b:lead=4", "zb:lead=4", "1f1b:lead=4,split_last=true"),
    *("zb:lead=8", "1f1b:lead=8,split_last=true"),
)
WIDTH, VOCABULARY = 16, 64
"""Of the model."""


@dataclass
class Row:
    """A schedule on a network."""

    stages: int
    delay_s: float
    schedule: str
    micros: int
    forward_s: float
    """Time of a forward."""
    split: float
    """Time of a backward in two parts relative to that of a whole one."""
    measured_s: Sequence[float] = ()

    @property
    def compute_s(self) -> float:
        """Time of the computations of a stage with whole backwards."""
        return 3 * self.micros * self.forward_s

    @property
    def filled_s(self) -> float:
        """Time of a step that waits for nothing but the first input of the last stage, and the reports."""
        first_s = max(self.forward_s, self.delay_s) + self.delay_s  # its sender learns that its receive is posted
        return self.compute_s + first_s + (self.stages - 2) * (self.forward_s + self.delay_s) + self.delay_s

    @property
    def simulated_s(self) -> float:
        """Time of the simulated step."""
        return float(self.timeline.makespan) + self.delay_s

    @property
    def timeline(self) -> Timeline:
        """The simulated step, without the reports at its end."""
        program = from_spec(self.schedule, SCHEDULES, key="--schedules").program(self.stages, self.micros)
        part_s = self.split * self.forward_s
        cost = Cost(self.forward_s, 2 * self.forward_s, delay=self.delay_s, weight=part_s, inputs=part_s)
        return simulate(lower(program), cost)


@dataclass(frozen=True)
class ScheduleSetting(PacedSetting):
    """A paced pipeline whose forms are schedules."""

    def config(self, form: str) -> Config:
        """Return the configuration with a schedule."""
        config = super().config(UNCOMPRESSED + UNTIED)
        return replace(config, pp=replace(config.pp, schedule=form))


def measure(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Measure steps of schedules on one network, in turn."""
    stages, delay_s, schedules = rows[0].stages, rows[0].delay_s, tuple(row.schedule for row in rows)
    with tempfile.TemporaryDirectory() as directory, netlab.lab(hosts=stages, delay_s=delay_s) as network:
        model = save_model(Path(directory) / "model", vocabulary=VOCABULARY, tied=False, width=WIDTH)
        paces = (options.forward,) * stages, options.split
        setting = ScheduleSetting(model, model, stages, "", options.micros, schedules, VOCABULARY, *paces)
        with on_hosts(network, be_paced_rank, setting) as pipes:
            steps = [[_slowest(pipes, schedule) for schedule in schedules] for _ in range(1 + options.rounds)]
    for row, (_, *measured) in zip(rows, zip(*steps, strict=True), strict=True):  # the first step lets TCP adapt
        row.measured_s = [step.seconds for step in measured]
        computed_s = statistics.median(step.compute_s for step in measured)
        row.forward_s *= computed_s / float(max(row.timeline.busy))


def _slowest(pipes: Sequence[Connection], schedule: str) -> Step:
    slowest: Step = max(request_all(pipes, schedule))
    return slowest


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for row in rows:
        simulated_s, measured = row.simulated_s, [""] * 3
        shares = (f"{row.compute_s / each:.1%}" for each in (row.filled_s, simulated_s))
        if row.measured_s:
            low, middle, high = statistics.quantiles(row.measured_s, n=4, method="inclusive")
            ratios = (f"{each / simulated_s:.3f}" for each in (middle, low, high))
            measured = [f"{middle:.2f}", f"{row.compute_s / middle:.1%}", "{} ({} - {})".format(*ratios)]
        times = f"{row.compute_s:.2f}", f"{simulated_s:.2f}"
        yield [f"{row.stages}, {row.delay_s * 1e3:g} ms", row.schedule, *times, *shares, *measured]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=float, default=0.04 / 3, help="time of a forward of a stage, seconds")
    parser.add_argument("--split", type=float, default=1.0, help="time of a split backward relative to a whole one")
    parser.add_argument("--micros", type=int, default=64, help="micro-batches per step")
    parser.add_argument("--schedules", nargs="+", default=COMPARED)
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS_S, help="seconds")
    parser.add_argument("--measured", type=int, nargs="*", choices=STAGES, default=[], help="stages to measure")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each schedule")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/delays.json"), help="path of the results")
    return parser.parse_args()


def main() -> None:
    """Predict, measure, print, save."""
    options, results = parse_arguments(), list[Row]()
    if options.measured:
        try:
            netlab.check(needs_tun=True)
        except RuntimeError as error:
            sys.exit(f"benchmarks/pipeline/delays.py: {error}")
    for stages in STAGES:
        for delay_s in options.delays:
            given = options.micros, options.forward, options.split
            rows = [Row(stages, delay_s, each, *given) for each in options.schedules]
            if stages in options.measured:
                measure(rows, options)
            results += rows
    names = ["stages, delay", "pp.schedule", "compute, s", "simulated, s", "fill", "share"]
    names += ["measured, s", "share", "measured / simulated"]
    table = Table(*names, title=f"{options.micros} micro-batches, forward {options.forward * 1e3:.1f} ms")
    for line in lines(results):
        table.add_row(*line)
    Console(width=140).print(table, f"load {os.getloadavg()[0]:.1f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(row) for row in results], indent=1))


if __name__ == "__main__":
    main()
