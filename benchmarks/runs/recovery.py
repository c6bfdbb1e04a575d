"""Time from a fault to the next optimizer step of an elastic run, and what being elastic costs without faults:

    .venv/bin/python -m benchmarks.runs.recovery [--rounds 20] [--json runs/benchmarks/recovery.json] [--svg PATH]

Three hosts with a worker each run on this machine, each under a torchrun of its own; the model is a GPT-2 of 10 M
parameters with random weights, one stage, so there are three replicas. In each round, every fault occurs once, at a
random moment of a step. Then the benchmark waits until three replicas train again.

next step       from the signal to the first line of a step in metrics.jsonl that follows the line of the view with fewer
                replicas. So it includes detection, forming the groups, and a complete step of the hosts that are left.
                Lines are noticed within some milliseconds
kill a worker   SIGKILL of the worker of the last rank; torchrun starts it again
kill a host     SIGKILL of all processes of the host of the last rank, torchrun's among them
kill host 0     the same of the host that has rank 0 and the first endpoint of --rdzv-endpoint
kill two hosts  the same of all hosts but the one with the first endpoint, which itself was started last
hung worker     SIGSTOP of the worker of the last rank; elastic.hang is HANG_S, to which the time is to be compared
silent host     SIGSTOP of all processes of the host of the last rank, later SIGCONT; elastic.silence is SILENCE_S
join            the killed host is started again. "Stand still" is the time between the last step before the view with
                the new replica and the first step after it, minus the median of the 10 step times before: the time that
                training loses. "Until it trains" is from the command to that first step

torchrun's own rendezvous (c10d) takes the same run, with a checkpoint every CHECKPOINT_EVERY steps, through the kill of
a worker. There, next step is the first that the run had not completed before, so that both sides are back where they
were; in between, all workers start again and repeat the steps since the checkpoint. Each of these rounds is a new run,
and is given up after GIVE_UP_S. Settings are the defaults but for one, without which two rounds of two did not end:
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, see recovery_hosts.py.

Cost: an elastic run and a static one (three hosts, static rendezvous) with the same options take turns: all processes of
one are stopped while the other completes STEPS_PER_BLOCK steps, and which one begins alternates. CPU time is that of all
processes of a run, the agents included, to a hundredth of a second.
"""

from __future__ import annotations

import argparse
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

from benchmarks.common.small_model import save_blank
from benchmarks.runs.recovery_hosts import NAMES, Hosts, cpu_s, send

HANG_S, SILENCE_S = 3.0, 2.0
CHECKPOINT_EVERY = 10
GIVE_UP_S = 120.0
WARMUP, STEPS_PER_BLOCK = 2, 20
NEVER = ("--elastic.hang", "1000000", "--elastic.silence", "3600")
"""Flags of an elastic run whose processes are stopped on purpose."""
TORCHRUN_ROW = "kill a worker, torchrun's c10d"
RUN_FILE = """
[model]
name = "{model}"
init = "scratch"
[data]
sources = "demo"
sequence = 32
batch = 3
[pp]
micro = 1
[optim]
lr = 1e-4
steps = 1000000
[log]
to = "jsonl"
"""


class Goal(NamedTuple):
    """Largest acceptable median and maximum of a time, seconds."""

    median_s: float
    max_s: float


@dataclass(frozen=True)
class Row:
    """Times of one kind of event."""

    name: str
    seconds: list[float]
    goal: Goal | None = None
    limit_s: float | None = None
    """Time after which a round was given up; such rounds have this time."""

    def text(self, seconds: float) -> str:
        """Return a time as text."""
        return f"> {seconds:.0f}" if self.limit_s is not None and seconds >= self.limit_s else f"{seconds:.2f}"

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def max_s(self) -> float:
        return max(self.seconds)


KILL = Goal(1.0, 2.0)
GOALS = {
    "kill a worker": KILL,
    "kill a host": KILL,
    "kill host 0": KILL,
    "kill two hosts": KILL,
    "hung worker": Goal(HANG_S + 1, HANG_S + 1),
    "silent host": None,
    "join: others stand still": Goal(1.0, 1.0),
    "join: until it trains": None,
    TORCHRUN_ROW: None,
}
COST_GOAL = 1.01


class Block(NamedTuple):
    """Time per step of a block of steps."""

    wall_s: float
    cpu_s: float


class Faults:
    """Faults of one elastic run, and the seconds until the next step, by fault."""

    def __init__(self, hosts: Hosts, moments: random.Random) -> None:
        self._hosts, self._watch, self._moments = hosts, hosts.watch, moments
        self.seconds: dict[str, list[float]] = {name: [] for name in GOALS if name != TORCHRUN_ROW}

    def run_round(self) -> None:
        """Let every fault occur once. Host a has rank 0 before and after it."""
        last = self._hosts.by_rank()[-1]
        self._fail("kill a worker", signal.SIGKILL, self._hosts.workers(last), replicas=2)
        self._wait_until_calm()

        last = self._hosts.by_rank()[-1]
        self._fail("hung worker", signal.SIGSTOP, self._hosts.workers(last), replicas=2)
        self._wait_until_calm()

        stopped = self._hosts.pids(self._hosts.by_rank()[-1])
        self._fail("silent host", signal.SIGSTOP, stopped, replicas=2)
        send(signal.SIGCONT, stopped)
        self._wait_until_calm()

        self._kill_and_join("kill a host", self._hosts.by_rank()[-1])
        assert self._hosts.by_rank()[0] == "a"
        self._kill_and_join("kill host 0", "a")
        self._fail("kill two hosts", signal.SIGKILL, self._hosts.pids("b", "c"), replicas=1)
        for name in ("b", "c"):
            self._hosts.start(name)
        self._wait_until_calm()

    def _fail(self, name: str, number: signal.Signals, pids: Sequence[int], *, replicas: int) -> None:
        """Send a signal; note the seconds until the next step with fewer replicas."""
        time.sleep(self._moments.random())
        started = send(number, pids)
        _, at = self._first_step(started, replicas)
        self.seconds[name].append(at - started)

    def _kill_and_join(self, name: str, host: str) -> None:
        self._fail(name, signal.SIGKILL, self._hosts.pids(host), replicas=2)
        started = time.monotonic()
        self._hosts.start(host)
        index, at = self._first_step(started, replicas=3)
        before = [arrival.at for arrival in self._watch.arrivals[:index] if arrival.is_step][-11:]
        self.seconds["join: others stand still"].append(at - before[-1] - _step_s(before))
        self.seconds["join: until it trains"].append(at - started)
        self._wait_until_calm()

    def _first_step(self, since: float, replicas: int) -> tuple[int, float]:
        """Wait for a view of so many replicas and its first step; return the view's index and the time of the step."""
        self._hosts.wait_until(lambda: self._watch.find_view(since, replicas) is not None)
        index = self._watch.find_view(since, replicas)
        assert index is not None
        self._hosts.wait_until(lambda: any(arrival.is_step for arrival in self._watch.arrivals[index:]))
        return index, next(arrival.at for arrival in self._watch.arrivals[index:] if arrival.is_step)

    def _wait_until_calm(self) -> None:
        """Wait until all replicas have trained together for a while."""
        self._hosts.wait_until(lambda: self._watch.replicas == len(NAMES))
        step = self._watch.last_step + 6
        self._hosts.wait_until(lambda: self._watch.last_step >= step)


def measure_elastic(directory: Path, run_file: Path, rounds: int, report: Callable[[str], None]) -> list[Row]:
    """Return the rows of an elastic run."""
    flags = ("--elastic.hang", str(HANG_S), "--elastic.silence", str(SILENCE_S))
    with Hosts(directory, run_file, "elastic", flags) as hosts:
        hosts.start_all()
        faults = Faults(hosts, random.Random(0))
        for index in range(rounds):
            faults.run_round()
            report(
                f"round {index + 1}: " + ", ".join(f"{name} {times[-1]:.2f}" for name, times in faults.seconds.items())
            )
    return [Row(name, seconds, GOALS[name]) for name, seconds in faults.seconds.items()]


def measure_torchrun(directory: Path, run_file: Path, rounds: int, report: Callable[[str], None]) -> Row:
    """Return the row of torchrun's own rendezvous. Each round is a new run, since one may not recover."""
    row = Row(TORCHRUN_ROW, [], limit_s=GIVE_UP_S)
    flags = ("--checkpoint.every", str(CHECKPOINT_EVERY), "--checkpoint.keep", "2")
    for index in range(rounds):
        with Hosts(directory.with_name(f"{directory.name}-{index}"), run_file, "c10d", flags) as hosts:
            hosts.start_all()
            hosts.wait_until(lambda hosts=hosts: hosts.watch.last_step >= CHECKPOINT_EVERY + 5)
            row.seconds.append(_kill_and_restart(hosts))
        report(f"torchrun, round {index + 1}: {row.seconds[-1]:.1f}")
    return row


def _kill_and_restart(hosts: Hosts) -> float:
    """Kill the worker of the last rank; return the seconds until a step that is new, at most GIVE_UP_S."""
    workers = hosts.workers_by_rank()
    started = send(signal.SIGKILL, [workers[len(NAMES) - 1]])
    hosts.wait_until(lambda: not set(workers.values()) & set(hosts.workers(*NAMES)))
    step = hosts.watch.last_step + 1
    hosts.wait_until(lambda: hosts.watch.last_step >= step or time.monotonic() > started + GIVE_UP_S)
    at = [arrival.at for arrival in hosts.watch.steps if arrival.line["step"] == step]
    return at[0] - started if at else GIVE_UP_S


def measure_cost(directory: Path, run_file: Path, rounds: int) -> list[tuple[Block, Block]]:
    """Return an elastic and a static block by round."""
    with (
        Hosts(directory / "alone-elastic", run_file, "elastic", NEVER) as elastic,
        Hosts(directory / "alone-static", run_file, "static") as static,
    ):
        sides = (elastic, static)
        for side in sides:
            side.start_all()
            send(signal.SIGSTOP, side.pids(*NAMES))
        blocks = []
        for index in range(rounds):
            turn = sides if index % 2 else sides[::-1]
            measured = {side: _block(side) for side in turn}
            blocks.append((measured[elastic], measured[static]))
    return blocks


def _block(hosts: Hosts) -> Block:
    """Continue a run for a block of steps."""
    pids = hosts.pids(*NAMES)
    send(signal.SIGCONT, pids)
    first = hosts.watch.last_step + WARMUP
    hosts.wait_until(lambda: hosts.watch.last_step >= first)
    cpu_before = cpu_s(pids)
    hosts.wait_until(lambda: hosts.watch.last_step >= first + STEPS_PER_BLOCK)
    cpu = cpu_s(pids) - cpu_before
    send(signal.SIGSTOP, pids)
    at = {arrival.line["step"]: arrival.at for arrival in hosts.watch.steps}
    return Block((at[first + STEPS_PER_BLOCK] - at[first]) / STEPS_PER_BLOCK, cpu / STEPS_PER_BLOCK)


def _step_s(times: Sequence[float]) -> float:
    """Return the median time between lines."""
    return statistics.median(after - before for before, after in zip(times, times[1:], strict=False))


def recovery_table(rows: Sequence[Row]) -> Table:
    """Return the table of times."""
    table = Table(title="Seconds until the next step", title_justify="left")
    for column in ("event", "rounds", "median", "max", "goal", "reached"):
        table.add_column(column, justify="left" if column == "event" else "right")
    for row in rows:
        goal = reached = ""
        if row.goal is not None:
            goal = f"{row.goal.median_s:g}, {row.goal.max_s:g}"
            reached = "yes" if row.median_s <= row.goal.median_s and row.max_s <= row.goal.max_s else "no"
        table.add_row(row.name, str(len(row.seconds)), row.text(row.median_s), row.text(row.max_s), goal, reached)
    return table


def cost_table(blocks: Sequence[tuple[Block, Block]]) -> Table:
    """Return the table of ratios, elastic / static."""
    step_s = statistics.median(static.wall_s for _, static in blocks)
    table = Table(title=f"Elastic / static, steps of {step_s:.2f} s, {len(blocks)} rounds", title_justify="left")
    for column in ("", "median", "quartiles", "goal"):
        table.add_column(column)
    for name in Block._fields:
        low, median, high = statistics.quantiles(_ratios(blocks, name), n=4, method="inclusive")
        goal = f"{COST_GOAL:g}" if name == "wall_s" else ""
        table.add_row(
            {"wall_s": "step time", "cpu_s": "CPU time"}[name], f"{median:.3f}", f"{low:.3f} - {high:.3f}", goal
        )
    return table


def _ratios(blocks: Sequence[tuple[Block, Block]], name: str) -> list[float]:
    return [getattr(elastic, name) / getattr(static, name) for elastic, static in blocks]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds of faults")
    parser.add_argument("--torchrun-rounds", type=int, default=3, help="number of kills with torchrun's own rendezvous")
    parser.add_argument(
        "--cost-rounds", type=int, default=10, help="pairs of blocks of an elastic and a static run, 2 or more"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/recovery.json"), help="path of the results")
    parser.add_argument("--svg", type=Path, default=Path("docs/recovery.svg"), help="path of the picture")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save, draw."""
    options = parse_arguments()
    from benchmarks.common.pictures import save
    from benchmarks.runs.recovery_picture import draw  # needs matplotlib, which is better missed before than after

    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        directory = Path(scratch)
        text = "\n".join(topics.values())
        (directory / "model").mkdir()
        save_blank(directory / "model", text, vocabulary=4096, sequence=64, hidden=320, blocks=7, heads=5)
        (run_file := directory / "run.toml").write_text(RUN_FILE.format(model=directory / "model"))
        rows = measure_elastic(directory / "elastic", run_file, options.rounds, console.print)
        if options.torchrun_rounds:
            rows.append(measure_torchrun(directory / "torchrun", run_file, options.torchrun_rounds, console.print))
        blocks = measure_cost(directory, run_file, options.cost_rounds) if options.cost_rounds else []
    console.print(recovery_table(rows))
    if blocks:
        console.print(cost_table(blocks))
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    about |= {"hang_s": HANG_S, "silence_s": SILENCE_S}
    cost = [{"elastic": elastic._asdict(), "static": static._asdict()} for elastic, static in blocks]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows], "cost": cost}, indent=1))
    save(draw(rows), options.svg)


if __name__ == "__main__":
    main()
