"""Ranks that compute more slowly than the others with the same stages."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

SLOW, NORMAL = 2.0, 1.5
"""Multiples of the median time of the other ranks: above the first a rank becomes slow, below the second normal."""
PATIENCE = 20
"""Number of consecutive steps after which it does."""


class Change(NamedTuple):
    """A rank that has become slow, or normal again."""

    rank: int
    is_slow: bool
    factor: float
    """Its time per micro-batch as a multiple of the median of the other ranks with the same stages; median of the last
    PATIENCE steps."""


class Stragglers:
    """Finds slow ranks, from the times of all ranks. With one replica there is nothing to compare a rank with."""

    def __init__(self) -> None:
        self._slow = set[int]()
        self._factors: dict[int, list[float]] = {}
        """Factors of the ranks whose last steps, without a break, speak for a change."""

    def record(self, micro_s: list[list[float]]) -> list[Change]:
        """Record the times of one step per micro-batch, [replicas][stage ranks]; return which ranks have changed.

        0 = a rank had no micro-batches.
        """
        stages = len(micro_s[0])
        changes = []
        for replica, of_replica in enumerate(micro_s):
            for stage_rank, seconds in enumerate(of_replica):
                others = [row[stage_rank] for row in micro_s[:replica] + micro_s[replica + 1 :] if row[stage_rank]]
                if seconds and others:
                    changes += self._compare(replica * stages + stage_rank, seconds / median(others))
        return changes

    def _compare(self, rank: int, factor: float) -> list[Change]:
        was_slow = rank in self._slow
        if factor >= NORMAL if was_slow else factor <= SLOW:
            self._factors.pop(rank, None)
            return []
        factors = self._factors.setdefault(rank, [])
        factors.append(factor)
        if len(factors) < PATIENCE:
            return []
        self._slow ^= {rank}
        del self._factors[rank]
        return [Change(rank, not was_slow, median(factors))]
