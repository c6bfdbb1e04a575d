"""Picture of network.py: step time against the rate of the links, a line per form."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from benchmarks.pipeline.network_ranks import UNTIED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.pipeline.network import Cell

INK, GRID, COLORS = "#1f2933", "#e4e8ec", ("#5b6672", "#b4530a", "#1f5fbf", "#0b7a6b", "#7a3fb0", "#c2255c")
MARKERS = dict(zip(COLORS, "oP^vDX", strict=True))


def draw(cells: Sequence[Cell]) -> Figure:
    """Draw step time against rate, a panel per delay."""
    from matplotlib.figure import Figure

    delays = sorted({cell.delay_s for cell in cells})
    figure = Figure(figsize=(10.4, 5.0), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(delays), sharey=True)
    compute_s = statistics.median(seconds for cell in cells for seconds in cell.compute_s)
    for axes, delay_s in zip(panels, delays, strict=True):
        axes.set_title(f"{delay_s * 1e3:g} ms of delay", color=INK, fontsize=11)
        _draw_panel(axes, sorted((c for c in cells if c.delay_s == delay_s), key=lambda cell: cell.mbit), compute_s)
    panels[0].set_ylabel(f"seconds per step, {cells[0].stages} stages (dashed: bound)")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _draw_panel(axes: Axes, cells: Sequence[Cell], compute_s: float) -> None:
    """Draw a line per form, and its bound. cells: in the order of their rates.

    A form of the untied model has the color of the tied one with the same codecs, and a dotted line.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    tied = dict.fromkeys(cell.form for cell in cells if cell.form != cell.untied_form)
    colors = {f"{form}{end}": color for form, color in zip(tied, cycle(COLORS), strict=False) for end in ("", UNTIED)}
    for form in dict.fromkeys(cell.form for cell in cells):
        drawn, color = [cell for cell in cells if cell.form == form], colors[form]
        rates, label = [cell.mbit for cell in drawn], form.replace("/", " / ")
        if form in tied:
            axes.plot(rates, [max(compute_s, cell.traffic_s) for cell in drawn], "--", color=color, linewidth=1)
        line = f"{MARKERS[color]}-" if form in tied else "s:"
        axes.plot(rates, [cell.seconds for cell in drawn], line, color=color, label=label, markersize=6)
    axes.axhline(compute_s, color=INK, linewidth=0.8, label="compute")
    rates = sorted({cell.mbit for cell in cells})
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s of every host, up and down")
    axes.set_xticks(rates, [f"{rate:.3g}" for rate in rates])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.8)
