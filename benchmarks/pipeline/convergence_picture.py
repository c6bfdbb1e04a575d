"""The figure of convergence.py: excess loss of codecs over the uncompressed run, by epoch and by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

if TYPE_CHECKING:
    from benchmarks.pipeline.convergence import Summary

COLORS = {"fixpoint": "#b4530a", "delta": "#1f5fbf", "rate-adaptive delta": "#0b7a6b"}
"""By family; other families are not drawn."""
ONLY_CURVE = {"rate-adaptive delta": "step 1.5"}
"""The point drawn by epoch, for families with many points."""
GREY, INK, GRID = "#5b6672", "#1f2933", "#e4e8ec"
LINEAR = 1e-3
"""Excess below which the axis is linear; the axis includes 0."""
TICKS = {0: "0", 0.001: ".001", 0.01: ".01", 0.1: ".1"}
BITS = [2.0**power for power in range(-3, 6)]
LABEL_GAP = 0.045
"""Minimum vertical distance between labels, as a fraction of the panel height."""


def draw(summaries: Sequence[Summary]) -> Figure:
    """Draw the excess by epoch on the left and that of the last epoch by bits on the right."""
    drawn = [each for each in summaries if is_drawn(each)]
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1, 1.15])
    for axes in (left, right):
        _prepare(axes)
    lowest = min(min(map(min, each.excess)) for each in drawn)
    highest = max(max(map(max, each.excess)) for each in drawn)
    left.set_ylim(min(-LINEAR / 2, 1.5 * lowest), 2.5 * highest)
    _draw_curves(left, drawn)
    _draw_points(right, drawn)
    return figure


def is_drawn(summary: Summary) -> bool:
    """Whether a row is drawn: it compresses activations and has no dropout."""
    return summary.row.family in COLORS and not summary.row.variant.dropout


def _prepare(axes: Axes) -> None:
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.4)
    axes.yaxis.set_major_locator(FixedLocator(list(TICKS)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(list(TICKS), list(TICKS.values()))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GREY)


def _title(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=12)
    axes.set_xlabel(x, fontsize=9.5, color=GREY)


def _draw_curves(axes: Axes, summaries: Sequence[Summary]) -> None:
    """Draw the mean and the range over the seeds from the second epoch on; label each curve at its end."""
    _title(axes, "Train loss above that of the uncompressed run", "epoch")
    curves = [each for each in summaries if each.row.point == ONLY_CURVE.get(each.row.family, each.row.point)]
    ends = [(0.0, "uncompressed", GREY)]
    for summary in curves:
        color = COLORS[summary.row.family]
        by_epoch = list(zip(*summary.excess, strict=True))[1:]
        epochs = range(2, 2 + len(by_epoch))
        means = [fmean(seeds) for seeds in by_epoch]
        axes.fill_between(epochs, [min(s) for s in by_epoch], [max(s) for s in by_epoch], color=color, alpha=0.15, lw=0)
        axes.plot(epochs, means, color=color, linewidth=1.6)
        ends.append((means[-1], f"{summary.row.family}, {summary.row.point}", color))
    last = max(len(each.excess[0]) for each in curves)
    axes.set_xlim(1.8, last)
    axes.set_xticks(range(2, last + 1))
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each (y, text, color) to the right of the panel, at its height or as near as there is room."""
    to_panel = (axes.transData + axes.transAxes.inverted()).transform
    ends = sorted(ends)
    heights = [float(to_panel((0, y))[1]) for y, _, _ in ends]
    for height, (_, text, color) in zip(spread(heights, LABEL_GAP), ends, strict=True):
        axes.text(1.015, height, text, color=color, fontsize=9, va="center", transform=axes.transAxes)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return heights, which ascend, moved as little as makes neighbours at least `gap` apart.

    Groups that are too close are spread around their mean, and merged where that brings them too close to others.
    """
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _around_mean(groups[-1], gap)[0] < _around_mean(groups[-2], gap)[-1] + gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [place for group in groups for place in _around_mean(group, gap)]


def _around_mean(group: Sequence[float], gap: float) -> list[float]:
    first = fmean(group) - gap * (len(group) - 1) / 2
    return [first + gap * index for index in range(len(group))]


def _draw_points(axes: Axes, summaries: Sequence[Summary]) -> None:
    """Draw each row's mean and range over bits per element; label the points, and each family once."""
    _title(axes, "In the last epoch, by bytes sent", "bits per element of the activations, all headers included")
    axes.set_xscale("log", base=2)
    bits = [fmean(each.bits) for each in summaries]
    axes.set_xlim(0.6 * min(bits), 1.6 * max(bits))
    for family in COLORS:
        _draw_family(axes, [each for each in summaries if each.row.family == family])
    ticks = [tick for tick in BITS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _draw_family(axes: Axes, summaries: Sequence[Summary]) -> None:
    """Draw one family's points; the first, with the fewest bits, has the family's name and the unit."""
    points = sorted(summaries, key=lambda each: fmean(each.bits))
    x, y = [fmean(each.bits) for each in points], [fmean(each.last_excess) for each in points]
    for index, each in enumerate(points):
        family, point, color = each.row.family, each.row.point, COLORS[each.row.family]
        axes.plot(x[index : index + 2], y[index : index + 2], color=color, linewidth=0.8)
        axes.plot(x[index], y[index], "o", color=color, markersize=5)
        axes.plot([x[index]] * 2, [min(each.last_excess), max(each.last_excess)], color=color, linewidth=1.4)
        number = "".join(char for char in point if char in "0123456789.")
        by = (-7, -3) if family in ONLY_CURVE else (7, 3)
        _annotate(axes, (x[index], y[index]), number if index else point, color, by, fontsize=8.5)
        if not index:
            _annotate(axes, (x[0], y[0]), family, color, (0, 14), fontsize=10, fontweight="bold")


def _annotate(axes: Axes, point: tuple[float, float], text: str, color: str, by: tuple[int, int], **font: Any) -> None:
    """Write a text beside a point. by: offset to the right and upwards, points."""
    sideways = "center" if not by[0] else "left" if by[0] > 0 else "right"
    upwards = "bottom" if by[1] > 0 else "top"
    place = {"xytext": by, "textcoords": "offset points", "ha": sideways, "va": upwards}
    axes.annotate(text, point, color=color, **place, **font)
