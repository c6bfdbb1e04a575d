"""Time until training continues after the only holder of a stage is lost, by replay and by return to the snapshot:

    .venv/bin/python -m benchmarks.runs.replay [--rounds 5] [--cost-rounds 20] [--json runs/benchmarks/replay.json]

Three hosts with a worker each run on this machine, each under a torchrun of its own; the model is a GPT-2 of 10 M
parameters with random weights in two stages, so there is one replica and a spare. A snapshot is taken every INTERVAL
steps. Some steps after one, all processes of the host of the last stage are killed. The spare takes its place: by
replay, the default, it repeats the steps since the snapshot, and the other stage waits for it; with
elastic.replay_log=0 both stages return to the snapshot and repeat these steps. Both kinds of runs take turns. Then the
killed host is started again as a spare.

steps since the snapshot   those that are repeated
new step        from the signal to the first line in metrics.jsonl of a step that the run had not completed before. So it
                includes detection, forming the groups, all repeated steps, and a complete step
repeated        the part of it in which the spare has repeated steps, the transfer of the snapshot and of the messages
                included; not known for the return to the snapshot

The cost of the log is measured with the same model with one process per stage, blocks of steps with and without it taking
turns in the same processes: see replay_cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.metrics_watch import Arrival
from benchmarks.common.small_model import save_blank
from benchmarks.runs.recovery import RUN_FILE
from benchmarks.runs.recovery_hosts import NAMES, Hosts
from benchmarks.runs.replay_cost import log_cost_table, measure_log_cost
from tests.lib.forked_torchrun import send

INTERVAL = 30
"""Steps between snapshots."""
DISTANCES = (3, 14, 27)
"""Steps between the newest snapshot and the kill."""


class Recovery(NamedTuple):
    """One kill, and how training continued."""

    distance: int
    """Of DISTANCES."""
    steps: int
    """Number of steps between the snapshot and the next step."""
    seconds: float
    """From the kill to the next step."""
    replay_s: float
    """Of which the new rank of the stage has replayed steps; 0 if it has not."""


@dataclass
class Kind:
    """A kind of recovery."""

    origin: str
    """As in the events of views."""
    log_gib: float
    """elastic.replay_log."""
    recoveries: list[Recovery] = field(default_factory=list)

    def at(self, distance: int) -> list[Recovery]:
        """Return those at a distance."""
        return [each for each in self.recoveries if each.distance == distance]


def measure(kind: Kind, directory: Path, run_file: Path) -> None:
    """Add a recovery at each distance, all in one new run."""
    flags = ("--pp.stages", "2", "--elastic.snapshot", str(INTERVAL), "--elastic.replay_log", str(kind.log_gib))
    with Hosts(directory, run_file, "elastic", flags, is_forked=True) as hosts:
        hosts.start_all()
        for distance in DISTANCES:
            _wait_for_snapshot(hosts, distance)
            lost = hosts.by_rank()[-1]
            kind.recoveries.append(_kill(hosts, lost, kind.origin, distance))
            hosts.start(lost)


def _wait_for_snapshot(hosts: Hosts, distance: int) -> None:
    """Wait until a view of all hosts has taken its first snapshot, some steps ago."""
    hosts.wait_until(lambda: (views := _lines(hosts, "view")) and views[-1].line["hosts"] == len(NAMES))
    step = _lines(hosts, "view")[-1].line["after_step"] + INTERVAL + distance
    hosts.wait_until(lambda: hosts.watch.last_step >= step)


def _kill(hosts: Hosts, name: str, origin: str, distance: int) -> Recovery:
    """Kill a host, and wait until training continues. Raises RuntimeError if it does in another way than `origin`."""
    views = len(_lines(hosts, "view"))
    started = send(signal.SIGKILL, hosts.pids(name))
    hosts.wait_until(lambda: len(_lines(hosts, "view")) > views)
    view = _lines(hosts, "view")[views]
    known = view.line["after_step"]  # its line may be written late
    hosts.wait_until(lambda: hosts.watch.last_step > known and hosts.watch.steps[-1].at > view.at)
    step = next(each for each in hosts.watch.steps if each.at > view.at and each.line["step"] > known)
    if view.line["from"] != origin:
        raise RuntimeError(f"training continued from {view.line['from']}, not from {origin}: {view.line}")
    replayed = [each.line for each in _lines(hosts, "replayed") if each.at > started]
    snapshot_step = view.line["after_step"] - sum(line["steps"] for line in replayed)
    replay_s = sum(line["replay_s"] for line in replayed)
    return Recovery(distance, step.line["step"] - 1 - snapshot_step, step.at - started, replay_s)


def _lines(hosts: Hosts, event: str) -> list[Arrival]:
    """Return the events of a kind."""
    return [arrival for arrival in list(hosts.watch.arrivals) if arrival.line.get("event") == event]


def recovery_table(kinds: Sequence[Kind]) -> Table:
    """Return the table of times."""
    table = Table(title="Seconds from the loss of a stage to a new step, median (max)", title_justify="left")
    for column in ("steps since the snapshot", "by", "kills", "new step", "repeated"):
        table.add_column(column, justify="right")
    for distance in DISTANCES:
        for kind in kinds:
            found = kind.at(distance)
            seconds, replay_s = ([each.seconds for each in found], [each.replay_s for each in found])
            steps = " - ".join(str(each) for each in sorted({pick(each.steps for each in found) for pick in (min, max)}))
            repeated = _summary(replay_s) if any(replay_s) else ""
            table.add_row(steps, kind.origin, str(len(found)), _summary(seconds), repeated)
    return table


def _summary(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, with a kill at each distance; 0 = none")
    parser.add_argument("--cost-rounds", type=int, default=20, help="blocks of steps of each side, 2 or more; 0 = none")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/replay.json"), help="path of the results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save."""
    options, console, started = parse_arguments(), Console(width=120), time.monotonic()
    kinds, cost = [Kind("replay", 1.0), Kind("snapshot", 0.0)], None
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        directory = Path(scratch)
        (directory / "model").mkdir()
        text = "\n".join(topics.values())
        save_blank(directory / "model", text, vocabulary=4096, sequence=64, hidden=320, blocks=7, heads=5)
        (run_file := directory / "run.toml").write_text(RUN_FILE.format(model=directory / "model"))
        if options.cost_rounds:
            cost = measure_log_cost(directory / "model", options.cost_rounds)
            console.print(log_cost_table(cost))
        for number in range(options.rounds):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                measure(kind, directory / f"{kind.origin} {number}", run_file)
                console.print(f"{time.monotonic() - started:.0f} s: {kind.origin}: {kind.recoveries[-len(DISTANCES) :]}")
    if options.rounds:
        console.print(recovery_table(kinds))
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    cost_fields = cost and {**cost.steps._asdict(), "step_bytes": cost.step_bytes}
    recoveries = {kind.origin: [each._asdict() for each in kind.recoveries] for kind in kinds}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "recoveries": recoveries, "cost": cost_fields}, indent=1))


if __name__ == "__main__":
    main()
