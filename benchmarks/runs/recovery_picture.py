"""The figure of recovery.py: seconds until the next step, by event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

if TYPE_CHECKING:
    from benchmarks.runs.recovery import Row

INK, GREY, GRID = "#1f2933", "#5b6672", "#e4e8ec"
ELASTIC, TORCHRUN = "#1f5fbf", "#b4530a"
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(rows: Sequence[Row]) -> Figure:
    """Draw a bar up to the median, and a mark per round."""
    figure = Figure(figsize=(10.4, 0.5 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    highest = max(row.max_s for row in rows)
    lowest = min(0.1, *(max(0.01, min(row.seconds)) for row in rows))
    axes.set(xscale="log", xlim=(lowest, 1.6 * highest), xlabel="seconds; bar = median, marks = rounds")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    for place, row in enumerate(rows):
        color = TORCHRUN if "torchrun" in row.name else ELASTIC
        axes.barh(place, row.median_s, height=0.6, color=color, alpha=0.8)
        axes.plot(row.seconds, [place] * len(row.seconds), "|", color=INK, markersize=9)
        axes.annotate(
            row.text(row.median_s),
            (row.max_s, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if lowest <= tick <= 1.6 * highest]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=GREY)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure
