"""The charts of a report page, as JSON values, from the lines of metrics.jsonl."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from acsgd.io.telemetry.history import RunHistory, finite, numbers_by_rank
from acsgd.io.telemetry.step_time import StepTime
from acsgd.metrics import EVAL_LOSS, METRICS

MAX_POINTS = 2000
"""Number of points of a curve; of a longer run, each is the mean of several steps."""
MAX_CURVES = 10
"""Largest number of curves whose colours differ clearly."""
MEGA = 1e-6

Values = Sequence[float | None]
Curves = dict[str, Values]
Label = Callable[[int, int], str]
"""Returns the label of a rank's curve. Arguments: the rank, and the number of ranks of its pipeline."""


def axes_of(run: RunHistory) -> dict[str, Values]:
    """Return the values of both horizontal axes: the step, and the time that the run has trained, seconds."""
    parts = ([finite(line.get(name)) or 0.0 for name in ("step_s", "save_stall_s")] for line in run.steps)
    times = itertools.accumulate(max(0.0, sum(each)) for each in parts)
    axes = {"step": [line["step"] for line in run.steps], "time": [min(each, sys.float_info.max) for each in times]}
    return {name: [round(group[-1], 3) for group in _groups(values)] for name, values in axes.items()}


def charts_of(runs: Sequence[RunHistory]) -> Iterator[dict[str, Any]]:
    """Yield the charts that compare runs, then those of each run alone; without charts that have no curve."""
    compared = {
        "Loss": ("loss", EVAL_LOSS),
        "Learning rate": ("lr",),
        "Gradient norm": ("grad_norm",),
        "Tokens per second": ("tokens_per_s",),
        "Seconds per step": ("step_s",),
        **{f"Evaluation: {name}": (name,) for name in METRICS if name != EVAL_LOSS},
    }
    for title, names in compared.items():
        curves = [
            _curve(f"{run.directory.name}, {name}", field(run, name)) | {"run": index, "dashed": name == EVAL_LOSS}
            for index, run in enumerate(runs)
            for name in names
        ]
        if known := [curve for curve in curves if any(value is not None for value in curve["values"])]:
            yield {"title": title, "curves": known}
    for index, run in enumerate(runs):
        for title, of_chart in _details(run):
            largest = sorted(of_chart, key=lambda label: -sum(map(abs, filter(None, of_chart[label]))))
            drawn = [label for label in largest if any(of_chart[label])]
            if shown := [label for label in of_chart if label in drawn[:MAX_CURVES]]:
                title += f" (the largest {MAX_CURVES} of {len(drawn)})" if len(drawn) > MAX_CURVES else ""
                curves = [_curve(label, of_chart[label]) | {"run": index} for label in shown]
                yield {"title": title, "run": index, "curves": curves, "stacked": title.startswith(TIME)}


def field(run: RunHistory, name: str, factor: float = 1.0) -> Values:
    """Return a number of each step, times a factor."""
    numbers = (finite(line.get(name)) for line in run.steps)
    return [None if number is None else number * factor for number in numbers]


TIME = "Where the time of the slowest rank went"


def _details(run: RunHistory) -> Iterator[tuple[str, Curves]]:
    """Yield title and curves of the charts of one run."""
    times = [StepTime.of(line) for line in run.steps]
    causes = dict.fromkeys(cause for time in times if time for cause in time.parts)
    step_s = [finite(line.get("step_s")) or math.inf for line in run.steps]
    one, mega = ([factor] * len(step_s) for factor in (1.0, MEGA))
    per_s, share = [MEGA / seconds for seconds in step_s], [1 / seconds for seconds in step_s]

    yield f"{TIME}, s", {cause: [time and time.parts.get(cause, 0.0) for time in times] for cause in causes}
    yield "Computing time by rank, s", _by_rank(run, "compute_s", _rank, one)
    yield (
        "Idle share of the ranks (bubble)",
        {
            "measured": [time and time.idle_share for time in times],
            "by the schedule": field(run, "schedule_bubble"),
        },
    )
    yield "Share of the transfers' time that was hidden by computing", {"hidden": field(run, "hidden_share")}
    for unit, factors in (("MB/step", mega), ("MB/s", per_s)):
        sent = _by_rank(run, "pp_forward_bytes", _link(+1, receives=False), factors)
        sent = _sum(sent, _by_rank(run, "pp_backward_bytes", _link(-1, receives=False), factors))
        sent |= _by_rank(run, "dp_bytes", lambda rank, size: f"rank {rank} to replicas", factors)
        yield f"Sent over each link, {unit}", sent
    waits = _by_rank(run, "pp_forward_wait_s", _link(+1, receives=True), share)
    waits = _sum(waits, _by_rank(run, "pp_backward_wait_s", _link(-1, receives=True), share))
    waits |= _by_rank(run, "dp_wait_s", lambda rank, size: f"rank {rank} for replicas", share)
    yield "Share of the step in which the receiver waited for a link, bubble included", waits
    kinds = ("pp_forward_bytes", "pp_backward_bytes", "tied_bytes", "dp_bytes")
    yield "Sent by all ranks, MB/step", {kind.removesuffix("_bytes"): field(run, kind, MEGA) for kind in kinds}
    yield "Model FLOP utilization", {"all devices": field(run, "mfu")}
    memory = _by_rank(run, "peak_memory_bytes", _rank, mega)
    yield "Peak memory, MB", memory or {"largest rank": field(run, "peak_memory_bytes", MEGA)}
    yield (
        "Waits of training, s",
        {"for the batch": field(run, "data_wait_s"), "for a checkpoint": field(run, "save_stall_s")},
    )
    yield "Skipped updates of the run so far", {"skipped": field(run, "skipped")}


def _rank(rank: int, size: int) -> str:
    return f"rank {rank}"


def _link(step: int, *, receives: bool) -> Label:
    """Return the label of the link of a rank. step: from sender to receiver; receives: whether the rank does."""

    def label(rank: int, size: int) -> str:
        other = rank - rank % size + (rank + (-step if receives else step)) % size
        return f"link {other}->{rank}" if receives else f"link {rank}->{other}"

    return label


def _by_rank(run: RunHistory, name: str, label: Label, factors: Sequence[float]) -> Curves:
    """Return the numbers of all ranks by label, times a factor for each step."""
    curves: dict[str, list[float | None]] = {}
    for index, line in enumerate(run.steps):
        for rank, size, value in numbers_by_rank(line, name):
            curves.setdefault(label(rank, size), [None] * len(run.steps))[index] = value * factors[index]
    return dict(curves)


def _sum(curves: Curves, others: Curves) -> Curves:
    """Add curves of one label."""
    added = dict(curves)
    for label, values in others.items():
        pairs = zip(added.get(label, values), values, strict=True)
        known = ([each for each in pair if each is not None] for pair in pairs)
        added[label] = [sum(each) if each else None for each in known] if label in added else values
    return added


def _curve(label: str, values: Values) -> dict[str, Any]:
    means = [_mean(group) for group in _groups(values)]
    return {"label": label, "values": [None if mean is None else float(f"{mean:.6g}") for mean in means]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return finite(sum(known) / len(known)) if known else None


def _groups(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the values of the steps of each point."""
    size = max(1, math.ceil(len(values) / MAX_POINTS))
    return (values[first : first + size] for first in range(0, len(values), size))
