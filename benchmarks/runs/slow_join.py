"""Joins over slow links: for how long the other hosts stand still, and how much slower their steps are meanwhile:

    .venv/bin/python -m benchmarks.runs.slow_join [--mbit 100] [--joins 4] [--runs 2] [--json PATH]

Three hosts with a worker each are network namespaces whose links have this rate. Two train a GPT-2 of 10 M parameters in
one stage, with powersgd between the replicas, so that a step needs little of the links; the third one joins, is killed,
and joins again. With AdamW its state has 120 MB. Runs take turns: in one kind it gets all state at once, while the
others wait (elastic.join_budget is above what the transfer takes); in the other one in the background, with the default
budget.

stand still     time between the last step before the view with three replicas and the first step after it, minus the
                median of the 10 step times before: the time that training loses
until it trains from that view to the first step in which the new host has micro-batches
step time       median of the steps until then, relative to the median of the 10 steps before, of each join in the
                background. Three ranks share two cores

Needs root and iproute2.
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
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.netlab import lab
from benchmarks.common.small_model import save_blank
from benchmarks.runs.recovery import RUN_FILE
from benchmarks.runs.recovery_hosts import NAMES, Hosts
from tests.lib.forked_torchrun import send

BUDGET_S = 2.0
"""Default of elastic.join_budget, and the goal."""
UNLIMITED_S = 1e6
STEPS_BEFORE = 12


@dataclass
class Joins:
    """The joins of one kind."""

    name: str
    budget_s: float
    stand_still_s: list[float] = field(default_factory=list)
    until_it_trains_s: list[float] = field(default_factory=list)
    step_ratio: list[float] = field(default_factory=list)


def measure(joins: Joins, directory: Path, run_file: Path, *, rounds: int, mbit: float) -> None:
    """Add the joins of a new run."""
    flags = ("--dp.mode", "powersgd:rank=4", "--elastic.join_budget", str(joins.budget_s), "--elastic.snapshot", "0")
    with lab(hosts=len(NAMES)) as network:
        network.limit(mbit)
        with Hosts(directory, run_file, "elastic", flags, is_forked=True, network=network) as hosts:
            for name in "ab":
                hosts.start(name, min_hosts=2)
            for _ in range(rounds):
                _wait_for_steps(hosts, replicas=2)
                _join(hosts, joins)
                _wait_for_steps(hosts, replicas=3, steps=3)
                send(signal.SIGKILL, hosts.pids("c"))


def _join(hosts: Hosts, joins: Joins) -> None:
    """Start the third host; add its times when it trains."""
    first = len(hosts.watch.arrivals)

    def find(kind: str, since: int = first) -> int | None:
        """Return the index of the first line of a kind: a step, a view of three replicas, or an event."""
        for index, arrival in enumerate(hosts.watch.arrivals[since:], since):
            if arrival.is_step if kind == "step" else arrival.line.get("event") == kind:
                if kind != "view" or arrival.line["replicas"] == len(NAMES):
                    return index
        return None

    def wait_for(kind: str, since: int = first) -> int:
        hosts.wait_until(lambda: find(kind, since) is not None)
        index = find(kind, since)
        assert index is not None
        return index

    hosts.start("c")
    view = wait_for("view")
    step = wait_for("step", view)
    before = [each.at for each in hosts.watch.arrivals[:view] if each.is_step][-11:]
    joined_at = hosts.watch.arrivals[view].at
    joins.stand_still_s.append(hosts.watch.arrivals[step].at - before[-1] - _median_step_s(before))
    if joins.budget_s == BUDGET_S:
        ready = wait_for("ready", step)
        meanwhile = [each.at for each in hosts.watch.arrivals[step:ready] if each.is_step]
        joins.step_ratio.append(_median_step_s(meanwhile) / _median_step_s(before))
        step = wait_for("step", ready)
    joins.until_it_trains_s.append(hosts.watch.arrivals[step].at - joined_at)


def _wait_for_steps(hosts: Hosts, *, replicas: int, steps: int = STEPS_BEFORE) -> None:
    """Wait until that many replicas have completed some steps."""
    hosts.wait_until(lambda: hosts.watch.replicas == replicas)
    step = hosts.watch.last_step + steps
    hosts.wait_until(lambda: hosts.watch.last_step >= step)


def _median_step_s(times: Sequence[float]) -> float:
    return statistics.median(after - before for before, after in zip(times, times[1:], strict=False))


def join_table(kinds: Sequence[Joins], mbit: float) -> Table:
    """Return the table of joins."""
    table = Table(title=f"Joins over {mbit:g} Mbit/s, median (max)", title_justify="left")
    for column in ("state", "joins", "stand still, s", "until it trains, s", "step time", "goal", "reached"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for kind in kinds:
        is_goal = kind.budget_s == BUDGET_S
        reached = ("yes" if max(kind.stand_still_s) <= BUDGET_S else "no") if is_goal else ""
        cells = [_summary(values) for values in (kind.stand_still_s, kind.until_it_trains_s, kind.step_ratio)]
        table.add_row(kind.name, str(len(kind.stand_still_s)), *cells, f"{BUDGET_S:g}" if is_goal else "", reached)
    return table


def _summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})" if values else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100, help="rate of each link, Mbit/s")
    parser.add_argument("--joins", type=int, default=4, help="joins in each run")
    parser.add_argument("--runs", type=int, default=2, help="runs of each kind")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/slow_join.json"), help="path of the results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save."""
    options, console = parse_arguments(), Console(width=120)
    kinds = [Joins("at once", UNLIMITED_S), Joins("in the background", BUDGET_S)]
    with tempfile.TemporaryDirectory(prefix="slow-join-") as scratch:
        directory = Path(scratch)
        (directory / "model").mkdir()
        text = "\n".join(topics.values())
        save_blank(directory / "model", text, vocabulary=4096, sequence=64, hidden=320, blocks=7, heads=5)
        (run_file := directory / "run.toml").write_text(RUN_FILE.format(model=directory / "model"))
        for run in range(options.runs):
            for kind in kinds:
                measure(kind, directory / f"{kind.name} {run}", run_file, rounds=options.joins, mbit=options.mbit)
                console.print(f"run {run + 1}, {kind.name}: stand still {_summary(kind.stand_still_s)}")
    console.print(join_table(kinds, options.mbit))
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about | {"mbit": options.mbit}, "kinds": list(map(asdict, kinds))}))


if __name__ == "__main__":
    main()
