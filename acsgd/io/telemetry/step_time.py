"""Where the time of a step went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class StepTime(NamedTuple):
    """Where the time of the slowest rank of a step went: the one that computed longest."""

    rank: int
    factor: float
    """Its computing time as a multiple of the mean of all ranks."""
    idle_share: float
    """Share of the step in which the ranks did not compute, on average: the measured bubble."""
    parts: Mapping[str, float]
    """Seconds by cause. "schedule" is the wait that the schedule alone implies, "link A->B" the rest of the waits for
    messages from rank A to B, "replicas" the wait for other replicas, "update" what follows the reduced gradients."""

    @property
    def limit(self) -> str:
        """The cause of most of the time. The wait that the schedule implies counts as computing."""
        parts = dict(self.parts)
        parts["compute"] += parts.pop("schedule")
        return max(parts, key=parts.__getitem__)

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> StepTime | None:
        """Return the times of a line of metrics.jsonl; None if it has none, or is damaged."""
        try:
            return _read(line)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None


def _read(line: Mapping[str, Any]) -> StepTime:
    """Return the times of a line. Raises any of several exceptions for one that lacks them."""
    ranks = line["ranks"]
    grid, step_s = ranks["compute_s"], float(line["step_s"])
    size, compute_s = len(grid[0]), [float(seconds) for replica in grid for seconds in replica]
    rank = max(range(len(compute_s)), key=compute_s.__getitem__)
    replica, stage = divmod(rank, size)

    def wait_s(name: str) -> float:
        return float(ranks[name][replica][stage]) if name in ranks else 0.0

    first, bubble = rank - stage, float(line["schedule_bubble"])
    before, after = (f"link {first + (stage + hop) % size}->{rank}" for hop in (-1, 1))
    forward_s, backward_s = wait_s("pp_forward_wait_s"), wait_s("pp_backward_wait_s")
    fill_s = min(compute_s[rank] * bubble / (1 - bubble), forward_s + backward_s)
    left = 1 - fill_s / (forward_s + backward_s) if fill_s else 1.0
    parts = {"data": float(line["data_wait_s"]), "compute": compute_s[rank], "schedule": fill_s}
    parts[before] = forward_s * left
    parts[after] = parts.get(after, 0.0) + backward_s * left  # of two ranks, both links are the same
    parts |= {"tied weights": wait_s("tied_wait_s"), "replicas": wait_s("dp_wait_s")}
    parts["update"] = max(0.0, step_s - sum(parts.values()))
    mean_s = sum(compute_s) / len(compute_s)
    factor = compute_s[rank] / mean_s if mean_s else 1.0
    return StepTime(rank, factor, max(0.0, 1 - mean_s / step_s), parts)
