"""Time from a fault to the next optimizer step of an elastic run, and what being elastic costs without faults:

    .venv/bin/python -m benchmarks.runs.recovery [--rounds 20] [--torchft PYTHON] [--json runs/benchmarks/recovery.json]
        [--svg docs/recovery.svg]

Three hosts with a worker each run on this machine, each under a torchrun of its own; the model is a GPT-2 of 10 M
parameters with random weights, one stage, so there are three replicas. They share the GPU, if there is one. In each
round, every fault occurs once, at a random moment of a step. Then the benchmark waits until three replicas train again.
So that this takes seconds, hosts are forked from a process that has imported everything; only those of "until it
trains" are started by the command.

next step       from the signal to the first line of a step in metrics.jsonl that follows the line of the view with
                fewer replicas. So it includes detection, forming the groups, and a complete step of the hosts that are
                left. Lines are noticed within some milliseconds
kill a worker   SIGKILL of the worker of the last rank; torchrun starts it again
kill a host     SIGKILL of all processes of the host of the last rank, torchrun's among them
kill host 0     the same of the host that has rank 0; in the first round, it has the first endpoint, too
kill two hosts  the same of all hosts but the one with the first endpoint, which itself was started last
hung worker     SIGSTOP of the worker of the last rank; elastic.hang is HANG_S, to which the time is to be compared
silent host     SIGSTOP of all processes of the host of the last rank, later SIGCONT; elastic.silence is SILENCE_S
host cut off    the link of the host of the last rank is taken down, later up. In a run of its own, of hosts that are
                network namespaces, which need root and iproute2
join            the killed host is started again. "Stand still" is the time between the last step before the view with
                the new replica and the first step after it, minus the median of the 10 step times before: the time that
                training loses. "Until it trains" is from the command to that first step, in the first JOINS rounds

torchrun's own rendezvous (c10d) takes the same run, with a checkpoint every CHECKPOINT_EVERY steps, through the kill of
a worker. There, next step is the first that the run had not completed before, so that both sides are back where they
were; in between, all workers start again and repeat the steps since the checkpoint. Each of these rounds is a new run,
and is given up after GIVE_UP_S. Settings are the defaults but for one, without which two rounds of two did not end:
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, see recovery_hosts.py. "Tuned" has TUNED as well.

torchft (https://github.com/meta-pytorch/torchft) takes the kill of a replica of the same model, with its defaults, if
--torchft names a Python that has it: see recovery_torchft.py.

Cost: see recovery_cost.py.
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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.compare import setting
from benchmarks.common.netlab import Lab, lab
from benchmarks.common.small_model import save_blank
from benchmarks.runs.recovery_cost import cost_table, measure_cost
from benchmarks.runs.recovery_hosts import NAMES, Hosts
from benchmarks.runs.recovery_torchft import measure_torchft
from tests.lib.forked_torchrun import send

HANG_S, SILENCE_S = 3.0, 2.0
JOINS = 5
CHECKPOINT_EVERY = 10
GIVE_UP_S = 120.0
TORCHRUN_ROW, TUNED_ROW = "kill a worker, torchrun's c10d", "kill a worker, c10d tuned"
TORCHFT_ROWS = "kill a replica, torchft", "join until it trains, torchft"
TUNED = (
    "--monitor-interval",
    "0.1",
    "--rdzv-conf",
    "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
)
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
    "host cut off": None,
    "join: others stand still": Goal(1.0, 1.0),
    "join: until it trains": None,
    TORCHRUN_ROW: None,
    TUNED_ROW: None,
    **dict.fromkeys(TORCHFT_ROWS),
}


class Faults:
    """Faults of one elastic run, and the seconds until the next step, by fault."""

    def __init__(self, hosts: Hosts, moments: random.Random) -> None:
        self._hosts, self._watch, self._moments = hosts, hosts.watch, moments
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def run_round(self) -> None:
        """Let every fault occur once."""
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

        is_forked = len(self.seconds["join: until it trains"]) >= JOINS
        self._kill_and_join("kill a host", self._hosts.by_rank()[-1], is_forked=is_forked)
        self._kill_and_join("kill host 0", self._hosts.by_rank()[0], is_forked=True)
        self._fail("kill two hosts", signal.SIGKILL, self._hosts.pids("b", "c"), replicas=1)
        for name in ("b", "c"):
            self._hosts.start(name)
        self._wait_until_calm()

    def cut_off(self, network: Lab) -> None:
        """Take the host of the last rank off the network for a while."""
        host = NAMES.index(self._hosts.by_rank()[-1])
        time.sleep(self._moments.random())
        started = time.monotonic()
        network.cut(host)
        _, at = self._first_step(started, replicas=2)
        self.seconds["host cut off"].append(at - started)
        network.heal(host)
        self._wait_until_calm()

    def _fail(self, name: str, number: signal.Signals, pids: Sequence[int], *, replicas: int) -> None:
        """Send a signal; note the seconds until the next step with fewer replicas."""
        time.sleep(self._moments.random())
        started = send(number, pids)
        _, at = self._first_step(started, replicas)
        self.seconds[name].append(at - started)

    def _kill_and_join(self, name: str, host: str, *, is_forked: bool) -> None:
        self._fail(name, signal.SIGKILL, self._hosts.pids(host), replicas=2)
        started = time.monotonic()
        self._hosts.start(host, is_forked=is_forked)
        index, at = self._first_step(started, replicas=3)
        before = [arrival.at for arrival in self._watch.arrivals[:index] if arrival.is_step][-11:]
        self.seconds["join: others stand still"].append(at - before[-1] - _step_s(before))
        if not is_forked:
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
    with Hosts(directory, run_file, "elastic", flags, is_forked=True) as hosts:
        hosts.start_all()
        faults = Faults(hosts, random.Random(0))
        for index in range(rounds):
            faults.run_round()
            report(f"round {index + 1}: " + ", ".join(f"{name} {s[-1]:.2f}" for name, s in faults.seconds.items()))
    seconds = faults.seconds | measure_cuts(directory.with_name("cut off"), run_file, rounds, report)
    return [Row(name, seconds[name], goal) for name, goal in GOALS.items() if name in seconds]


def measure_cuts(
    directory: Path, run_file: Path, rounds: int, report: Callable[[str], None]
) -> Mapping[str, list[float]]:
    """Return the seconds until the next step after a host was cut off; nothing if this machine has no namespaces."""
    flags = ("--elastic.silence", str(SILENCE_S))
    try:
        with lab(hosts=len(NAMES)) as network:
            with Hosts(directory, run_file, "elastic", flags, is_forked=True, network=network) as hosts:
                hosts.start_all()
                faults = Faults(hosts, random.Random(1))
                for _ in range(rounds):
                    faults.cut_off(network)
            return faults.seconds
    except RuntimeError as error:
        report(f"host cut off: not measured: {error}")
        return {}


def measure_torchrun(
    name: str, directory: Path, run_file: Path, rounds: int, report: Callable[[str], None], tuning: Sequence[str] = ()
) -> Row:
    """Return the row of torchrun's own rendezvous. Each round is a new run, since one may not recover.

    tuning: flags of torchrun.
    """
    row = Row(name, [], limit_s=GIVE_UP_S)
    flags = ("--checkpoint.every", str(CHECKPOINT_EVERY), "--checkpoint.keep", "2")
    for index in range(rounds):
        place = directory.with_name(f"{directory.name}-{index}")
        with Hosts(place, run_file, "c10d", flags, torchrun_flags=tuning) as hosts:
            hosts.start_all()
            hosts.wait_until(lambda hosts=hosts: hosts.watch.last_step >= CHECKPOINT_EVERY + 5)
            row.seconds.append(_kill_and_restart(hosts))
        report(f"{name}, round {index + 1}: {row.seconds[-1]:.1f}")
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


def _step_s(times: Sequence[float]) -> float:
    """Return the median time between lines."""
    return statistics.median(after - before for before, after in itertools.pairwise(times))


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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds of faults; 0 = none")
    parser.add_argument(
        "--torchrun-rounds", type=int, default=3, help="number of kills with torchrun's own rendezvous, of each kind"
    )
    parser.add_argument(
        "--cost-starts", type=int, default=10, help="starts of an elastic and a static run that are compared, 2 or more"
    )
    parser.add_argument("--torchft", type=Path, help="Python that has torchft; default: torchft is left out")
    parser.add_argument("--torchft-rounds", type=int, default=5, help="number of kills with torchft")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/recovery.json"), help="path of the results")
    parser.add_argument(
        "--svg", type=Path, default=Path("docs/recovery.svg"), help="path of the picture; /dev/null = none"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, print, save, draw."""
    options = parse_arguments()
    draws = options.svg != Path(os.devnull)
    if draws:
        import matplotlib  # noqa: F401  # is better missed before than after
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        directory = Path(scratch)
        text = "\n".join(topics.values())
        (directory / "model").mkdir()
        save_blank(directory / "model", text, vocabulary=4096, sequence=64, hidden=320, blocks=7, heads=5)
        (run_file := directory / "run.toml").write_text(RUN_FILE.format(model=directory / "model"))
        rows = measure_elastic(directory / "elastic", run_file, options.rounds, console.print) if options.rounds else []
        if rounds := options.torchrun_rounds:
            rows.append(measure_torchrun(TORCHRUN_ROW, directory / "c10d", run_file, rounds, console.print))
            rows.append(measure_torchrun(TUNED_ROW, directory / "tuned", run_file, rounds, console.print, TUNED))
        if options.torchft:
            model, rounds = directory / "model", options.torchft_rounds
            times = measure_torchft(options.torchft, directory / "torchft", model, rounds, console.print)
            rows += [Row(name, seconds) for name, seconds in zip(TORCHFT_ROWS, times, strict=True)]
        starts = measure_cost(directory / "cost", run_file, options.cost_starts) if options.cost_starts else []
    if rows:
        console.print(recovery_table(rows))
    if starts:
        console.print(cost_table(starts))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {**setting(device), "python": platform.python_version(), "cores": os.cpu_count()}
    about |= {"hang_s": HANG_S, "silence_s": SILENCE_S}
    cost = [[{"elastic": ours._asdict(), "static": theirs._asdict()} for ours, theirs in blocks] for blocks in starts]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows], "cost": cost}, indent=1))
    if rows and draws:
        from benchmarks.common.pictures import save
        from benchmarks.runs.recovery_picture import draw

        save(draw(rows), options.svg)


if __name__ == "__main__":
    main()
