"""What being elastic costs a run that nothing disturbs.

An elastic run and a static one (three hosts, static rendezvous) with the same options take turns: all processes of
one are stopped while the other completes STEPS_PER_BLOCK steps, and which one begins alternates, so that a machine that
becomes slower for a while slows both. Two sets of processes of the same program differ by several percent for as long
as they live, in CPU time, too. So both runs are started again after ROUNDS_PER_START pairs of blocks. CPU time is that
of all processes of a run, the agents included. The table has the geometric mean of the ratios of the blocks of a pair,
and its 95 % confidence interval (Student's t of the logarithms, which are averaged by start).

What an elastic run does besides training, it does in threads of its own: the daemon in the agent; waits, and reports to
the daemon, in the worker. Their CPU time varies little. "Beside training" is that of the agents and of all threads of
the workers but the main one and those of gloo, in an elastic run less that in a static one, relative to the step time:
the share of one core of a host.
"""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from scipy import stats

from benchmarks.runs.recovery_hosts import NAMES, Hosts, cpu_s
from tests.lib.forked_torchrun import send

GOAL = 1.01
WARMUP, STEPS_PER_BLOCK, ROUNDS_PER_START = 6, 20, 4
"""Steps before and in a block, and pairs of blocks. A run that continues first does what has come due while it was
stopped, an elastic one more than a static one: a calm run has no such steps."""
SETTLED = 14
"""Steps before the first block. The first snapshot, after 8 steps, is complete by then. The next one follows only when
all steps since have taken 200 times as long as it did."""
NEVER = ("--elastic.hang", "1000000", "--elastic.silence", "3600")
"""Flags of an elastic run whose processes are stopped on purpose."""


class Block(NamedTuple):
    """Time per step of a block of steps."""

    wall_s: float
    cpu_s: float
    beside_s: float
    """CPU time of the agents, and of the workers' threads but the main ones and those of gloo."""


Blocks = list[tuple[Block, Block]]
"""An elastic and a static block by round."""


def measure_cost(directory: Path, run_file: Path, starts: int) -> list[Blocks]:
    """Return the blocks by start of both runs."""
    directory.mkdir()
    return [_measure(directory / str(start), run_file) for start in range(starts)]


def _measure(directory: Path, run_file: Path) -> Blocks:
    """Return the blocks of two runs."""
    directory.mkdir()
    with (
        Hosts(directory / "elastic", run_file, "elastic", NEVER, is_forked=True) as elastic,
        Hosts(directory / "static", run_file, "static", is_forked=True) as static,
    ):
        sides = (elastic, static)
        for side in sides:
            side.start_all()
            side.wait_until(lambda side=side: side.watch.last_step >= SETTLED)
            send(signal.SIGSTOP, side.pids(*NAMES))
        blocks = []
        for index in range(ROUNDS_PER_START):
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
    cpu_before, beside_before = cpu_s(pids), _beside_s(hosts)
    hosts.wait_until(lambda: hosts.watch.last_step >= first + STEPS_PER_BLOCK)
    cpu, beside = cpu_s(pids) - cpu_before, _beside_s(hosts) - beside_before
    send(signal.SIGSTOP, pids)
    at = {arrival.line["step"]: arrival.at for arrival in hosts.watch.steps}
    wall = at[first + STEPS_PER_BLOCK] - at[first]
    return Block(*(seconds / STEPS_PER_BLOCK for seconds in (wall, cpu, beside)))


def _beside_s(hosts: Hosts) -> float:
    """Return the CPU time until now of the agents, and of the workers' threads but the main ones and those of gloo."""
    workers = hosts.workers(*NAMES)
    agents = [pid for pid in hosts.pids(*NAMES) if pid not in workers]
    threads = [
        thread
        for pid in workers
        for thread in Path(f"/proc/{pid}/task").iterdir()
        if int(thread.name) != pid and "gloo" not in (thread / "comm").read_text()
    ]
    return cpu_s(agents) + sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def cost_table(starts: Sequence[Blocks]) -> Table:
    """Return the table of ratios, elastic / static."""
    step_s = statistics.median(static.wall_s for blocks in starts for _, static in blocks)
    title = f"Elastic / static, steps of {step_s:.2f} s, {len(starts)} starts of {ROUNDS_PER_START} pairs"
    table = Table(title=title, title_justify="left")
    for column in ("", "mean", "95 % interval", "goal"):
        table.add_column(column)
    for name, text in (("wall_s", "step time"), ("cpu_s", "CPU time")):
        ratios = [[getattr(ours, name) / getattr(theirs, name) for ours, theirs in blocks] for blocks in starts]
        low, mean, high = mean_ratio([statistics.geometric_mean(of_start) for of_start in ratios])
        table.add_row(text, f"{mean:.4f}", f"{low:.4f} - {high:.4f}", f"{GOAL:g}" if name == "wall_s" else "")
    shares = [
        statistics.mean((ours.beside_s - theirs.beside_s) / theirs.wall_s / len(NAMES) for ours, theirs in blocks)
        for blocks in starts
    ]
    half = half_interval(shares)
    mean = statistics.mean(shares)
    table.add_row("beside training, per host", f"{mean:.2%}", f"{mean - half:.2%} - {mean + half:.2%}", "")
    return table


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios between the ends of its 95 % confidence interval."""
    logarithms = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.mean(logarithms), half_interval(logarithms)
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def half_interval(samples: Sequence[float]) -> float:
    """Return half the length of the 95 % confidence interval of a mean; NaN of a single sample."""
    if len(samples) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(samples) - 1) * statistics.stdev(samples) / len(samples) ** 0.5)
