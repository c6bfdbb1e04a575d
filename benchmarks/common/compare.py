"""Paired timing of two implementations of the same training step, in the same processes.

Machine speed drifts and other programs take CPU time, so the two sides alternate, the side that starts alternates, and
the result is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

Step = Callable[[int], float]
"""Runs optimizer step n, counted from 0, and returns this rank's part of the loss; the parts sum to the loss."""


class Cost(NamedTuple):
    """Time of one block of steps."""

    wall_s: float
    cpu_s: float
    """CPU time of this process, all threads."""


class RankRounds(NamedTuple):
    """One rank's part of a comparison; each tuple is (ours, theirs)."""

    losses: list[tuple[float, float]]
    """Part of the loss of each warm-up step."""
    rounds: list[tuple[Cost, Cost]]


class Comparison(NamedTuple):
    """Duration of our steps relative to theirs; less than 1 = ours are faster."""

    median: float
    quartiles: tuple[float, float]
    cpu: float
    """Median ratio of the CPU time of all ranks: robust against other programs, but ignores waiting."""
    ours_s: float
    """Median seconds per step."""
    theirs_s: float
    loss_error: float
    """Largest relative difference of the two losses in the warm-up."""
    ratios: list[float]


def setting(device: str) -> dict[str, str]:
    """Return the setting of a measurement, for its results: the device, the version of torch, today's date."""
    return {"device": device, "torch": torch.__version__, "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def alternate(
    ours: Step, theirs: Step, *, warmup: int, rounds: int, steps: int, barrier: Callable[[], None]
) -> RankRounds:
    """Run blocks of `steps` steps of each side in turn, after `warmup` steps whose losses are recorded."""
    losses = [(ours(step), theirs(step)) for step in range(warmup)]
    costs = []
    for index in range(rounds):
        block = range(warmup + index * steps, warmup + (index + 1) * steps)
        if index % 2:
            second, first = (_cost(side, block, barrier) for side in (theirs, ours))
        else:
            first, second = (_cost(side, block, barrier) for side in (ours, theirs))
        costs.append((first, second))
    return RankRounds(losses, costs)


def _cost(side: Step, block: range, barrier: Callable[[], None]) -> Cost:
    barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for step in block:
        side(step)
    barrier()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def summarise(ranks: Sequence[RankRounds], *, steps: int) -> Comparison:
    """Aggregate the rounds of all ranks."""
    losses = [
        [sum(shares) for shares in zip(*sides, strict=True)] for sides in zip(*(r.losses for r in ranks), strict=True)
    ]
    wall = [(ours.wall_s, theirs.wall_s) for ours, theirs in ranks[0].rounds]
    cpu = [
        tuple(sum(cost.cpu_s for cost in costs) for costs in zip(*sides, strict=True))
        for sides in zip(*(r.rounds for r in ranks), strict=True)
    ]
    ratios = [ours / theirs for ours, theirs in wall]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Comparison(
        median=median,
        quartiles=(low, high),
        cpu=statistics.median(ours / theirs for ours, theirs in cpu),
        ours_s=statistics.median(ours for ours, _ in wall) / steps,
        theirs_s=statistics.median(theirs for _, theirs in wall) / steps,
        loss_error=max(abs(ours - theirs) / theirs for ours, theirs in losses),
        ratios=ratios,
    )


def on_ranks(world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """Call body(rank, *args) in `world_size` processes of one thread each; return the results by rank.

    Raises the error of the first that fails, or TimeoutError, and kills those that would wait for it.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(world_size, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(body, rank, *args) for rank in range(world_size)]
        ended, waiting = wait(futures, timeout_s, return_when=FIRST_EXCEPTION)
        if waiting:
            for process in list(pool._processes.values()):  # or leaving the pool would wait for them
                process.kill()
    for future in ended:
        future.result()
    if waiting:
        raise TimeoutError(f"ranks {[futures.index(future) for future in waiting]} have not ended in {timeout_s:g} s")
    return [future.result() for future in futures]


def run_all(names: Sequence[str], run: Callable[[Sequence[str]], object], done: Callable[[], set[str]]) -> list[str]:
    """Run cases together, and after one that fails those that are left; return what has failed, and why.

    run: runs some cases in order; done: returns the names of those that have results.
    """
    failed, left = [], [*names]
    while left:
        error: Exception | None = None
        try:
            run(left)
        except Exception as raised:
            error = raised
        left = [name for name in left if name not in done()]
        if left:
            failed.append(f"{left.pop(0)} ({error})")
    return failed


class OnLink:
    """Steps over a rate-limited link and steps without a limit (compute). Lists have one entry per round."""

    compute_s: list[float]
    step_s: list[float]
    traffic_s: float
    """Bytes of a step divided by the rate of the link."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_s)

    @property
    def bound_s(self) -> float:
        return max(statistics.median(self.compute_s), self.traffic_s)

    @property
    def share(self) -> float:
        """Fraction of the bound that is reached; 1 = the step is as fast as possible."""
        pairs = zip(self.compute_s, self.step_s, strict=True)
        return statistics.median(max(compute, self.traffic_s) / step for compute, step in pairs)

    @property
    def slowdowns(self) -> list[float]:
        """Step time relative to compute, by round."""
        return [step / compute for compute, step in zip(self.compute_s, self.step_s, strict=True)]

    @property
    def slowdown(self) -> float:
        """Median step time relative to compute."""
        return statistics.median(self.slowdowns)
