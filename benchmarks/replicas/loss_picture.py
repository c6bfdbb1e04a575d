"""The figure of loss.py: held-out loss above all-reduce's against the reduction of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import Bbox

GREY, INK, GRID, SHADE = "#5b6672", "#1f2933", "#e4e8ec", "#e3f0e6"
LINEAR = 0.1
"""Percent below which the axis is linear; the axis includes 0."""
TICKS = (-1, -0.5, -0.2, 0, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
FEWER = (1, 10, 100, 1000)


class Panel(NamedTuple):
    """Title and goal of a task."""

    title: str
    fewer: float
    """Goal: smallest reduction of bytes, relative to all-reduce in fp16."""
    above: float
    """Goal: largest held-out loss above all-reduce's, percent."""


PANELS = {"finetune": Panel("Fine-tuning", 250, 0.5), "scratch": Panel("From scratch", 100, 2.0)}


class Family(NamedTuple):
    """Modes that share a color and a line."""

    name: str
    color: str
    patterns: tuple[str, ...]
    """Patterns of dp.mode, as in fnmatch."""


FAMILIES = (
    Family("all-reduce", GREY, ("torch:fp16",)),
    Family("PowerSGD of torch", "#b4530a", ("torch:powersgd*",)),
    Family("powersgd", "#d39a0c", ("powersgd*",)),
    Family("quantized", "#0b7a6b", ("quantized*",)),
    Family("cocktail_grad, 4 bits", "#1f5fbf", ("cocktail_grad*bits=4",)),
    Family("cocktail_grad, 2 bits", "#6a9be0", ("cocktail_grad*bits=2",)),
    Family("cocktail_hook of DDP", "#0f8fb3", ("torch:cocktail_hook:topk=0.02,bits=4",)),
    Family("cocktail", "#8a3ab9", ("cocktail", "cocktail:*")),
    Family("sparseloco", "#a61e4d", ("sparseloco*",)),
    Family("diloco", "#9a8a1c", ("diloco:inner=??",)),
    Family("diloco, no momentum", "#3f7d20", ("diloco*momentum=0*",)),
)


class Point(NamedTuple):
    """A mode in a panel."""

    options: tuple[str, ...]
    """Options in which it differs from others of its family, such as "topk 0.1"."""
    fewer: float
    """Reduction of bytes, relative to all-reduce in fp16."""
    above: float
    """Held-out loss above all-reduce's, percent, mean over the seeds."""
    lowest: float
    """The same, minimum over the seeds."""
    highest: float
    """The same, maximum over the seeds."""


def draw(measured: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel for each task. measured: the JSON that loss.py wrote for it."""
    figure = Figure(figsize=(11.6, 5.2), layout="constrained")
    for axes, of_task in zip(figure.subplots(1, len(measured), squeeze=False)[0], measured, strict=True):
        lines = {family: list(_points(family, of_task)) for family in FAMILIES}
        panel = PANELS[of_task["about"]["task"]]
        _prepare(axes, panel, [point for points in lines.values() for point in points])
        for family, points in lines.items():
            _draw_family(axes, family, points)
        _draw_local(axes, of_task)
        _write_labels(axes, lines)
    return figure


def _points(family: Family, measured: Mapping[str, Any]) -> Iterator[Point]:
    """Yield a family's points, fewest bytes first; none of a mode that sends nothing in so few steps."""
    sends = (row for row in measured["rows"] if row["sent"])
    rows = [row for row in sends if any(fnmatchcase(row["mode"], each) for each in family.patterns)]
    options = [set(row["mode"].removeprefix("torch:").partition(":")[2].split(",")) for row in rows]
    common = set.intersection(*options) if len(options) > 1 else set().union(*options)
    for row, of_row in sorted(zip(rows, options, strict=True), key=lambda pair: pair[0]["sent"]):
        above = [100 * share for share in row["above"]]
        differing = tuple(each.replace("=", " ") for each in sorted(of_row - common - {""}))
        yield Point(differing, measured["about"]["fp16_ring_bytes"] / row["sent"], fmean(above), min(above), max(above))


def _prepare(axes: Axes, panel: Panel, points: Sequence[Point]) -> None:
    """Set up axes that include all points, with the goal as a shaded box."""
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    right = 6 * max(panel.fewer, *(point.fewer for point in points))
    bottom = min(-LINEAR, 1.3 * min(point.lowest for point in points))
    axes.set_xlim(0.6 * min(point.fewer for point in points), right)
    axes.set_ylim(bottom, 1.6 * max(panel.above, *(point.highest for point in points)))
    axes.add_patch(Rectangle((panel.fewer, bottom), right - panel.fewer, panel.above - bottom, color=SHADE, lw=0))
    axes.annotate("goal", (right, bottom), (-28, 5), textcoords="offset points", color=GREY, fontsize=9)
    for axis, ticks, limits in ((axes.xaxis, FEWER, axes.get_xlim()), (axes.yaxis, TICKS, axes.get_ylim())):
        shown = [tick for tick in ticks if limits[0] <= tick <= limits[1]]
        axis.set_major_locator(FixedLocator(shown))
        axis.set_minor_locator(NullLocator())
        axis.set_ticklabels([f"{tick:g}" for tick in shown])
    axes.axhline(0, color=GREY, linewidth=1)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GREY)
    axes.set_title(panel.title + ": held-out loss above all-reduce's, %", loc="left", fontsize=11, color=INK, pad=12)
    axes.set_xlabel("times fewer bytes than all-reduce in fp16", fontsize=9.5, color=GREY)


def _draw_family(axes: Axes, family: Family, points: Sequence[Point]) -> None:
    """Draw means, ranges over the seeds, and a line through the means if the points differ in one option only."""
    if len({option.split()[0] for each in points for option in each.options}) == 1:
        axes.plot([each.fewer for each in points], [each.above for each in points], color=family.color, linewidth=0.8)
    for each in points:
        axes.plot(each.fewer, each.above, "o", color=family.color, markersize=5)
        axes.plot([each.fewer] * 2, [each.lowest, each.highest], color=family.color, linewidth=1.4)


def _draw_local(axes: Axes, measured: Mapping[str, Any]) -> None:
    """Draw `local`, which averages the replicas once at the end, as a line, since it sends no bytes in steps."""
    for row in (row for row in measured["rows"] if row["mode"] == "local"):
        above = 100 * fmean(row["above"])
        axes.axhline(above, color=GREY, linewidth=0.8, linestyle=":")
        where = axes.get_xlim()[1], above
        axes.annotate("local", where, (-4, 3), textcoords="offset points", ha="right", color=GREY, fontsize=9)


def _write_labels(axes: Axes, lines: Mapping[Family, Sequence[Point]]) -> None:
    """Write the options beside each point, and the family's name at its first, without covering points or labels."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # computes the size of the panel
    points = [point for family in lines.values() for point in family]
    panel, zero = axes.get_window_extent(), axes.transData.transform((1.0, 0.0))[1]
    taken = [Bbox.from_extents(panel.x0, zero - 1, panel.x1, zero + 1)]  # all-reduce's line
    taken += [_box(axes, point, (-4, -4), 8, 8) for point in points]
    for family, own in lines.items():
        texts = [(own[0], family.name, 9.5)] if own else []
        texts += [(point, ", ".join(point.options), 8.0) for point in own if point.options]
        for point, text, size in texts:
            by, box = _free_position(axes, point, 0.6 * size * len(text), 1.2 * size, taken)
            taken.append(box)
            font: dict[str, Any] = {"color": family.color, "fontsize": size, "va": "bottom"}
            font["fontweight"] = "bold" if text == family.name else "normal"
            axes.annotate(text, (point.fewer, point.above), xytext=by, textcoords="offset points", **font)


def _free_position(
    axes: Axes, point: Point, width: float, height: float, taken: Sequence[Bbox]
) -> tuple[tuple[float, float], Bbox]:
    """Return the offset of a text's lower left corner from its point, in points, and the box that it covers, in pixels.

    It is the nearest position that is free and inside the panel, or the farthest one tried if there is none.
    """
    panel = axes.get_window_extent()
    for by in _around(width, height):
        box = _box(axes, point, by, width, height)
        inside = panel.x0 <= box.x0 and box.x1 <= panel.x1 and panel.y0 <= box.y0 and box.y1 <= panel.y1
        if inside and not any(box.overlaps(other) for other in taken):
            break
    return by, box


def _around(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Yield offsets of a text's lower left corner from its point, nearest first, in points."""
    for gap in range(6, 60, 6):
        right, left, above, below = gap, -gap - width, gap, -gap - height
        yield from ((right, -height / 2), (left, -height / 2), (-width / 2, above), (-width / 2, below))
        yield from ((right, above), (left, above), (right, below), (left, below))


def _box(axes: Axes, point: Point, by: tuple[float, float], width: float, height: float) -> Bbox:
    """Return the box that a text covers, in pixels. by: its offset; by, width, height: in points."""
    x, y = axes.transData.transform((point.fewer, point.above))
    figure = axes.get_figure(root=True)
    assert figure is not None
    scale = figure.dpi / 72
    return Bbox.from_bounds(x + scale * by[0], y + scale * by[1], scale * width, scale * height)
