"""How many micro-batches each replica gets, by the time they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

from acsgd.io.sampling.sampler import deal

WINDOW = 5
"""Number of steps whose median is the time of a replica."""
MIN_GAIN = 0.1
"""Fraction of the time of a step that another split must save; so measurements that vary do not change it back and
forth."""


class Dealer:
    """Deals the micro-batches of a step to replicas: evenly at first, then as their times suggest.

    A pure function of the recorded times, so that all ranks, which record the same, deal alike. fill: as of `deal`.
    """

    def __init__(self, num_micros: int, replicas: int, fill: float) -> None:
        self._num_micros = num_micros
        self._replicas = replicas
        self._fill = fill
        self._steps = deque[Sequence[float]](maxlen=WINDOW)
        self.shares: tuple[range, ...] = ()
        """Micro-batches of each replica."""
        self.deal_evenly()

    def deal_evenly(self, without: Collection[int] = ()) -> None:
        """Deal the micro-batches evenly to all replicas but some, and forget the recorded times."""
        self.shares = deal(self._num_micros, [float(replica not in without) for replica in range(self._replicas)])
        self._steps.clear()

    @property
    def counts(self) -> list[int]:
        """Number of micro-batches of each replica."""
        return [len(share) for share in self.shares]

    def record(self, micro_s: Sequence[float]) -> bool:
        """Record the time of each replica per micro-batch in one step; return whether `shares` change."""
        if min(micro_s) <= 0:
            return False
        self._steps.append(micro_s)
        if len(self._steps) < WINDOW:
            return False
        times = [median(of_replica) for of_replica in zip(*self._steps, strict=True)]
        shares = deal(self._num_micros, [1 / seconds for seconds in times], self._fill)
        if self._step_s(shares, times) > (1 - MIN_GAIN) * self._step_s(self.shares, times):
            return False
        self.shares = shares
        self._steps.clear()
        return True

    def _step_s(self, shares: Sequence[range], times: Sequence[float]) -> float:
        """Return the time of a step with given times per micro-batch."""
        return max((len(share) + self._fill) * seconds for share, seconds in zip(shares, times, strict=True))
