"""What being elastic costs a run that nothing disturbs.

An elastic run and a static one (three hosts, static rendezvous) with the same options take turns: all processes of
one are stopped while the other completes STEPS_PER_BLOCK steps, and which one begins alternates, so that a machine that
becomes slower for a while slows both. Two sets of processes of the same program differ by several percent for as long as
they live, in CPU time, too. So both runs are started again after ROUNDS_PER_START pairs of blocks. CPU time is that of
all processes of a run, the agents included. The table has the geometric mean of the ratios of the blocks of a pair, and
its 95 % confidence interval (Student's t of the logarithms, which are averaged by start).
"""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table
from scipy import stats

from benchmarks.runs.recovery_hosts import NAMES, Hosts, cpu_s
from tests.lib.forked_torchrun import send

GOAL = 1.01
WARMUP, STEPS_PER_BLOCK, ROUNDS_PER_START = 1, 6, 6
SETTLED = 14
"""Steps before the first block. The first snapshot, after 8 steps, is complete by then. The next one follows only when
all steps since have taken 200 times as long as it did."""
NEVER = ("--elastic.hang", "1000000", "--elastic.silence", "3600")
"""Flags of an elastic run whose processes are stopped on purpose."""


class Block(NamedTuple):
    """Time per step of a block of steps."""

    wall_s: float
    cpu_s: float


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
    cpu_before = cpu_s(pids)
    hosts.wait_until(lambda: hosts.watch.last_step >= first + STEPS_PER_BLOCK)
    cpu = cpu_s(pids) - cpu_before
    send(signal.SIGSTOP, pids)
    at = {arrival.line["step"]: arrival.at for arrival in hosts.watch.steps}
    return Block((at[first + STEPS_PER_BLOCK] - at[first]) / STEPS_PER_BLOCK, cpu / STEPS_PER_BLOCK)


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
    return table


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios between the ends of its 95 % confidence interval."""
    logarithms = np.log(ratios)
    mean = float(logarithms.mean())
    half = float(stats.t.ppf(0.975, len(ratios) - 1) * logarithms.std(ddof=1) / len(ratios) ** 0.5)
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)
