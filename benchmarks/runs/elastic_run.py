"""One elastic run whose hosts end, leave and join, beside the same run that nothing disturbs:

    .venv/bin/python -m benchmarks.runs.elastic_run [--steps 500] [--json PATH] [--svg docs/elastic-run.svg]

Three hosts with a worker each run on this machine, each under a torchrun of its own; the model is a small GPT-2 with
random weights, one stage, so there are three replicas. EVENTS occur one after the other, each at a random moment of a
step, as soon as the run has trained in peace after the one before. The calm run has the same options and three hosts
with torchrun's static rendezvous.

recovery    for which training stood still at a change of hosts: the time between the last step before the event and the
            first step of the new view, minus the median of the 10 times between steps before
difference  largest relative difference between the two losses of a step; tests/run/test_elastic.py allows 1e-5
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.metrics_watch import Arrival
from benchmarks.common.small_model import save_blank
from benchmarks.runs.recovery_hosts import NAMES, Hosts
from tests.lib.forked_torchrun import send

CALM_STEPS = 15
"""Steps of a view before the next event."""
RUN_FILE = """
[model]
name = "{model}"
init = "scratch"
[data]
sources = "demo"
sequence = 64
batch = 12
[pp]
micro = 2
[optim]
lr = 1e-3
steps = {steps}
warmup = 20
[log]
to = "jsonl"
"""


class Event(NamedTuple):
    """A change of hosts."""

    name: str
    host: str
    replicas: int
    """Number of replicas afterwards."""


EVENTS = (
    Event("kill host", "c", 2),
    Event("join", "c", 3),
    Event("kill host 0", "a", 2),
    Event("join", "a", 3),
    Event("leave", "b", 2),
    Event("join", "b", 3),
    Event("kill host", "c", 2),
    Event("kill host", "b", 1),
    Event("join", "c", 2),
    Event("join", "b", 3),
)


@dataclass(frozen=True)
class Change:
    """A new view of a run."""

    name: str
    at_s: float
    """Time of its first step, since the first step of the run, seconds."""
    replicas: int
    recovery_s: float


@dataclass(frozen=True)
class Curve:
    """The steps of a run."""

    seconds: list[float]
    """When each step was complete, since the first one."""
    losses: list[float]


def train_with_events(
    directory: Path, run_file: Path, steps: int, report: Callable[[str], None]
) -> tuple[Curve, list[Change]]:
    """Train a run to its end while events occur; return its steps, and its views but the first."""
    moments, views = random.Random(0), list[int]()
    with Hosts(directory, run_file, "elastic") as hosts:
        hosts.start_all()
        for event in EVENTS:
            _wait_until_calm(hosts)
            time.sleep(moments.random())
            started = _cause(hosts, event)
            views.append(_wait_for_view(hosts, started, event.replicas))
            report(f"step {hosts.watch.last_step}: {event.name}, host {event.host}; {event.replicas} replicas")
        _wait_until_complete(hosts, steps)
        arrivals = list(hosts.watch.arrivals)
        first = next(arrival.at for arrival in arrivals if arrival.is_step)
        changes = [_change(arrivals, view, event, first) for view, event in zip(views, EVENTS, strict=True)]
        return _curve(hosts), changes


def train_calmly(directory: Path, run_file: Path, steps: int) -> Curve:
    """Train the same run with a fixed set of hosts; return its steps."""
    with Hosts(directory, run_file, "static") as hosts:
        hosts.start_all()
        _wait_until_complete(hosts, steps)
        return _curve(hosts)


def _cause(hosts: Hosts, event: Event) -> float:
    """Let an event occur; return the time.monotonic() just before."""
    match event.name:
        case "join":
            started = time.monotonic()
            hosts.start(event.host)
            return started
        case "leave":
            return hosts.interrupt(event.host)
        case _:
            return send(signal.SIGKILL, hosts.pids(event.host))


def _wait_until_calm(hosts: Hosts) -> None:
    step = hosts.watch.last_step + CALM_STEPS
    hosts.wait_until(lambda: hosts.watch.last_step >= step)


def _wait_for_view(hosts: Hosts, since: float, replicas: int) -> int:
    """Wait for the view of so many replicas; return its index in the arrivals."""
    hosts.wait_until(lambda: hosts.watch.find_view(since, replicas) is not None)
    index = hosts.watch.find_view(since, replicas)
    assert index is not None
    return index


def _wait_until_complete(hosts: Hosts, steps: int) -> None:
    while hosts.watch.last_step < steps:
        some = min(steps, hosts.watch.last_step + CALM_STEPS)
        hosts.wait_until(lambda some=some: hosts.watch.last_step >= some)
    hosts.wait_until(lambda: not hosts.pids(*NAMES))


def _curve(hosts: Hosts) -> Curve:
    """Return the steps of a run that is complete. Raises ValueError unless each was logged once."""
    steps = hosts.watch.steps
    lines = [json.loads(line) for line in (hosts.run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if "step" in line]
    if logged != list(range(1, len(logged) + 1)):
        raise ValueError(f"steps are missing or were logged twice: {logged}")
    return Curve([step.at - steps[0].at for step in steps], [step.line["loss"] for step in steps])


def _change(arrivals: Sequence[Arrival], view: int, event: Event, first: float) -> Change:
    """Return what an event did. view: index of its view; first: time of the first step."""
    before = [arrival.at for arrival in arrivals[:view] if arrival.is_step][-11:]
    after = next(arrival.at for arrival in arrivals[view:] if arrival.is_step)
    step_s = statistics.median(end - begin for begin, end in itertools.pairwise(before))
    return Change(event.name, after - first, event.replicas, after - before[-1] - step_s)


def change_table(changes: Sequence[Change]) -> Table:
    """Return the table of changes."""
    table = Table(title="Changes of hosts in one run", title_justify="left")
    for column in ("event", "after, s", "replicas", "recovery, s"):
        table.add_column(column, justify="left" if column == "event" else "right")
    for change in changes:
        table.add_row(change.name, f"{change.at_s:.0f}", str(change.replicas), f"{change.recovery_s:.2f}")
    return table


def largest_difference(elastic: Curve, calm: Curve) -> float:
    """Return the largest relative difference between two losses of a step."""
    return max(abs(ours - theirs) / theirs for ours, theirs in zip(elastic.losses, calm.losses, strict=True))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps, enough for all events")
    parser.add_argument(
        "--json", type=Path, default=Path("runs/benchmarks/elastic-run.json"), help="path of the results"
    )
    parser.add_argument("--svg", type=Path, default=Path("docs/elastic-run.svg"), help="path of the picture")
    return parser.parse_args()


def main() -> None:
    """Train both runs, print, save, draw."""
    options = parse_arguments()
    from benchmarks.common.pictures import save
    from benchmarks.runs.elastic_run_picture import draw  # needs matplotlib, which is better missed before than after

    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="elastic-run-") as scratch:
        directory = Path(scratch)
        (directory / "model").mkdir()
        text = "\n".join(topics.values())
        save_blank(directory / "model", text, vocabulary=4096, sequence=64, hidden=192, blocks=4, heads=3)
        (run_file := directory / "run.toml").write_text(RUN_FILE.format(model=directory / "model", steps=options.steps))
        elastic, changes = train_with_events(directory / "elastic", run_file, options.steps, console.print)
        calm = train_calmly(directory / "calm", run_file, options.steps)
    console.print(change_table(changes))
    difference = largest_difference(elastic, calm)
    console.print(f"{len(calm.losses)} steps, each once; largest relative difference of losses {difference:.1e}")
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    results = {"about": about, "difference": difference, "changes": [asdict(change) for change in changes]}
    results |= {"elastic": asdict(elastic), "calm": asdict(calm)}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))
    save(draw(elastic, calm, changes), options.svg)


if __name__ == "__main__":
    main()
