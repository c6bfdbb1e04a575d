"""The figure of elastic_run.py: loss and number of replicas over time, and the recovery from each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.runs.elastic_run import Change, Curve

INK, GREY, GRID = "#1f2933", "#5b6672", "#e4e8ec"
ELASTIC, CALM, ENDED, JOINED = "#1f5fbf", "#f0a35e", "#b4530a", "#2f855a"


def draw(elastic: Curve, calm: Curve, changes: Sequence[Change]) -> Figure:
    """Draw three plots, one above the other, over the time of the elastic run."""
    figure = Figure(figsize=(10.4, 6.8), layout="constrained")
    loss, replicas, recovery = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1.8))
    loss.plot(elastic.seconds, calm.losses, color=CALM, linewidth=5, label="three hosts that stay, step by step")
    loss.plot(elastic.seconds, elastic.losses, color=ELASTIC, linewidth=1.4, label="hosts that come and go")
    loss.set_ylabel("loss")
    loss.legend(frameon=False, fontsize=9, labelcolor=INK)
    times = [0.0, *(change.at_s for change in changes), elastic.seconds[-1]]
    counts = [3, *(change.replicas for change in changes)]
    replicas.stairs(counts, times, fill=True, color=ELASTIC, alpha=0.25)
    replicas.set(ylabel="replicas", yticks=(0, 1, 2, 3), ylim=(0, 3.4))
    _draw_recoveries(recovery, changes)
    for axes in (loss, replicas, recovery):
        if axes is not recovery:
            for change in changes:
                axes.axvline(change.at_s, color=_color(change), linewidth=0.8, alpha=0.6)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=9, labelcolor=GREY)
        axes.yaxis.label.set_color(GREY)
        for spine in axes.spines.values():
            spine.set_visible(False)
    recovery.set_xlabel("seconds since the first step", color=GREY)
    return figure


def _draw_recoveries(axes: Axes, changes: Sequence[Change]) -> None:
    width = changes[-1].at_s / 60
    seconds = [change.recovery_s for change in changes]
    axes.bar([change.at_s for change in changes], seconds, width, color=[_color(change) for change in changes])
    for change in changes:
        text = f"{change.name} {change.recovery_s:.2f} s"
        place = (change.at_s, change.recovery_s)
        options = {"ha": "center", "va": "bottom", "rotation": "vertical", "color": INK, "fontsize": 8}
        axes.annotate(text, place, (0, 4), textcoords="offset points", **options)
    axes.set(ylabel="recovery, s", ylim=(0, 3 * max(seconds)))


def _color(change: Change) -> str:
    return JOINED if change.name == "join" else ENDED
