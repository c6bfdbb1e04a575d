"""Joins over slow links: how much longer the longest step takes while a host joins, and until it takes part:

    .venv/bin/python -m benchmarks.runs.slow_join [--modes exact cocktail diloco delta] [--mbit 20 100] [--runs 2]

Three hosts are network namespaces whose links have this rate. Two train a GPT-2 of 2.6 M parameters; the third one
joins. With AdamW its state has 31 MB. For each mode and rate, two kinds of runs take turns: in one, it gets all state
at once, while the others wait (elastic.join_budget is above what the transfer takes); in the other one in the
background, with the default budget.

exact     dp.mode=allreduce: all gradients travel in each step, so the links of this run are busy all the time
cocktail  dp.mode=cocktail; diloco: dp.mode=diloco:inner=10
delta     dp.mode=cocktail, two stages on two workers per host, pp.forward=delta: between these, activation caches

longest delay   longest time between two steps, from the view of the join to the first STEPS steps of the new replica,
                less the median of the steps before or after the join, whichever is longer: a step of more replicas
                takes longer by itself. With diloco less the longest of these: one in 10 exchanges
until it trains from that view to the first step in which the new host has micro-batches
step time       median of the steps until then, relative to that median, for joins in the background

Up to six ranks share two cores. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.metrics_watch import Arrival
from benchmarks.common.netlab import lab
from benchmarks.common.small_model import save_blank
from benchmarks.runs.recovery import RUN_FILE
from benchmarks.runs.recovery_hosts import NAMES, Hosts
from tests.lib.forked_torchrun import send

BUDGET_S = 2.0
"""Default of elastic.join_budget, and the goal."""
UNLIMITED_S = 1e6
STEPS, EXCHANGES = 8, 12
"""Steps before and after a join; and with diloco, of which one in 10 exchanges."""
MODES = {
    "exact": ("--dp.mode", "allreduce"),
    "cocktail": ("--dp.mode", "cocktail"),
    "diloco": ("--dp.mode", "diloco:inner=10"),
    "delta": ("--dp.mode", "cocktail", "--pp.stages", "2", "--pp.forward", "delta", "--pp.tied", "rows"),
}


@dataclass
class Joins:
    """The joins of one kind. Lists have one entry per run."""

    mode: str
    mbit: float
    name: str
    budget_s: float
    delay_s: list[float] = field(default_factory=list)
    """The longest delay of a step."""
    until_it_trains_s: list[float] = field(default_factory=list)
    step_ratio: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """Median of the steps before or after, whichever is longer."""

    @property
    def steps(self) -> int:
        """Number of steps before and after a join."""
        return EXCHANGES if self.mode == "diloco" else STEPS

    @property
    def is_background(self) -> bool:
        return self.budget_s == BUDGET_S


def measure(joins: Joins, directory: Path, run_file: Path) -> None:
    """Add a join in a new run."""
    flags = (*MODES[joins.mode], "--elastic.join_budget", str(joins.budget_s), "--elastic.snapshot", "0")
    workers = "2" if joins.mode == "delta" else "1"
    with lab(hosts=len(NAMES)) as network:
        network.limit(joins.mbit)
        options = {"torchrun_flags": ("--nproc-per-node", workers), "is_forked": True, "network": network}
        with Hosts(directory, run_file, "elastic", flags, **options) as hosts:
            for name in "ab":
                hosts.start(name, min_hosts=2)
            _wait_for_steps(hosts, 2, joins.steps)
            _join(hosts, joins)
            send(signal.SIGKILL, hosts.pids("c"))


def _join(hosts: Hosts, joins: Joins) -> None:
    """Start the third host; add its times when it trains."""
    began = len(hosts.watch.arrivals)
    hosts.start("c")
    hosts.wait_until(lambda: _index(hosts.watch.arrivals, "view", began) is not None)
    view = _index(hosts.watch.arrivals, "view", began)
    assert view is not None
    ready = view
    if not hosts.watch.arrivals[view].line["moved_bytes"]:  # else it was sent before the view began
        hosts.wait_until(lambda: _index(hosts.watch.arrivals, "ready", view) is not None)
        ready = _index(hosts.watch.arrivals, "ready", view) or view
    _wait_for_steps(hosts, len(NAMES), joins.steps + 1)
    steps = [each.at for each in hosts.watch.arrivals if each.is_step]
    at, until = (hosts.watch.arrivals[index].at for index in (view, ready))
    before = _durations([each for each in steps if each < at][-joins.steps :])
    after = _durations([each for each in steps if each > until])
    usual = max(map(statistics.median, (before, after)))
    longest = max(*before, *after) if joins.mode == "diloco" else usual
    last = max(each for each in steps if each < at)
    joins.step_s.append(usual)
    joins.delay_s.append(max(_durations([each for each in steps if each >= last])) - longest)
    joins.until_it_trains_s.append(min(each for each in steps if each > until) - at)
    if meanwhile := _durations([each for each in steps if at < each <= until]):
        joins.step_ratio.append(statistics.median(meanwhile) / usual)


def _index(arrivals: Sequence[Arrival], event: str, since: int) -> int | None:
    """Return the index of the first event of a kind; of views, that of all hosts."""
    for index, arrival in enumerate(arrivals[since:], since):
        if arrival.line.get("event") == event and (event != "view" or arrival.line["hosts"] == len(NAMES)):
            return index
    return None


def _wait_for_steps(hosts: Hosts, replicas: int, steps: int) -> None:
    """Wait until that many replicas have completed some steps."""
    hosts.wait_until(lambda: hosts.watch.replicas == replicas)
    step = hosts.watch.last_step + steps
    hosts.wait_until(lambda: hosts.watch.last_step >= step)


def _durations(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def join_table(kinds: Sequence[Joins]) -> Table:
    """Return the table of joins; the last columns are those of the goal."""
    table = Table(title="Joins, median (max)", title_justify="left")
    for column in (
        "mode",
        "Mbit/s",
        "state",
        "joins",
        "step, s",
        "longest delay, s",
        "until it trains, s",
        "step time",
    ):
        table.add_column(column, justify="left" if column in ("mode", "state") else "right")
    table.add_column("goal reached")
    for kind in kinds:
        columns = (kind.step_s, kind.delay_s, kind.until_it_trains_s, kind.step_ratio)
        reached = ("yes" if max(kind.delay_s) <= BUDGET_S else "no") if kind.is_background else ""
        numbers = (kind.mode, f"{kind.mbit:g}", kind.name, str(len(kind.delay_s)))
        table.add_row(*numbers, *map(_summary, columns), reached)
    return table


def _summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})" if values else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--mbit", nargs="+", type=float, default=[20.0, 100.0], help="rates of the links, Mbit/s")
    parser.add_argument("--runs", type=int, default=2, help="runs of each kind")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/slow_join.json"), help="path of the results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save."""
    options, console = parse_arguments(), Console(width=140)
    kinds = [
        Joins(mode, mbit, name, budget_s)
        for mode in options.modes
        for mbit in options.mbit
        for name, budget_s in (("at once", UNLIMITED_S), ("background", BUDGET_S))
    ]
    with tempfile.TemporaryDirectory(prefix="slow-join-") as scratch:
        directory = Path(scratch)
        (directory / "model").mkdir()
        text = "\n".join(topics.values())
        save_blank(directory / "model", text, vocabulary=4096, sequence=64, hidden=192, blocks=4, heads=3)
        (run_file := directory / "run.toml").write_text(RUN_FILE.format(model=directory / "model"))
        for run in range(options.runs):
            for number, kind in enumerate(kinds):
                measure(kind, directory / f"{number} {run}", run_file)
                console.print(
                    f"run {run + 1}, {kind.mode}, {kind.mbit:g} Mbit/s, {kind.name}: longest delay "
                    f"{kind.delay_s[-1]:.2f} s of steps of {kind.step_s[-1]:.2f} s; trains after "
                    f"{kind.until_it_trains_s[-1]:.1f} s"
                )
    console.print(join_table(kinds))
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "kinds": list(map(asdict, kinds))}))


if __name__ == "__main__":
    main()
