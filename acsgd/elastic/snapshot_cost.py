"""The cost of snapshots in step time, and the interval between them that follows from it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

FIRST = 8
"""Steps of a view before its first snapshot, whose cost is not known yet."""
SNAPSHOTS, STEPS = 4, 16
"""Number of snapshots, and of steps without one in progress, over which is averaged."""


class SnapshotCost:
    """Measures how much longer steps take because of snapshots. budget: share of the step time that they may take."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._calm_s = deque[float](maxlen=STEPS)
        """Durations of steps without a snapshot in progress."""
        self._costs_s = deque[float](maxlen=SNAPSHOTS)
        self._copy_s = self._busy_s = 0.0
        """Time of the newest snapshot in which training stood still, and by which later steps were longer."""

    @property
    def interval(self) -> int:
        """Smallest number of steps between two snapshots with which they keep the budget."""
        if not self._costs_s or not self._calm_s:
            return FIRST
        cost_s = sum(self._costs_s) / len(self._costs_s)
        return max(1, math.ceil(cost_s / (self._budget * median(self._calm_s))))

    def begin(self, copy_s: float) -> None:
        """Record the start of a snapshot. copy_s: time for which training was stopped to copy the state, seconds."""
        self._copy_s, self._busy_s = copy_s, 0.0

    def record(self, step_s: float, *, is_pending: bool, completes: bool) -> None:
        """Record the duration of a step.

        is_pending: whether a snapshot was in progress; completes: whether this is the first step since it is complete.
        """
        if is_pending:
            self._busy_s += step_s - (median(self._calm_s) if self._calm_s else step_s)
            return
        self._calm_s.append(step_s)
        if completes:
            self._costs_s.append(self._copy_s + max(0.0, self._busy_s))
