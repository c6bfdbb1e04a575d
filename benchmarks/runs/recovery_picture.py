"""The figure of recovery.py: seconds until the next step, by event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

if TYPE_CHECKING:
    from benchmarks.runs.recovery import Row

INK, GREY, GRID = "#1f2933", "#5b6672", "#e4e8ec"
ELASTIC, OTHERS, GOAL = "#1f5fbf", "#b4530a", "#2f855a"
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(rows: Sequence[Row]) -> Figure:
    """Draw a bar up to the median, a mark per round, and the goal of the median where there is one."""
    figure = Figure(figsize=(10.4, 0.5 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    highest = max(row.max_s for row in rows)
    lowest = min(0.1, *(max(0.01, min(row.seconds)) for row in rows))
    axes.set(
        xscale="log", xlim=(lowest, 1.6 * highest), xlabel="seconds until the next step; bar = median, marks = rounds"
    )
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    for place, row in enumerate(rows):
        color = OTHERS if any(name in row.name for name in ("c10d", "torchft")) else ELASTIC
        axes.barh(place, row.median_s, height=0.6, color=color, alpha=0.8)
        axes.plot(row.seconds, [place] * len(row.seconds), "|", color=INK, markersize=9)
        if row.goal is not None:
            axes.plot(2 * [row.goal.median_s], [place - 0.38, place + 0.38], color=GOAL, linewidth=2)
        axes.annotate(
            row.text(row.median_s),
            (row.max_s, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    bars = [Patch(color=ELASTIC, alpha=0.8, label="acsgd"), Patch(color=OTHERS, alpha=0.8, label="others")]
    bars.append(Line2D([], [], color=GOAL, linewidth=2, label="goal"))
    axes.legend(handles=bars, frameon=False, fontsize=9, labelcolor=INK, loc="upper right")
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if lowest <= tick <= 1.6 * highest]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=GREY)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure
