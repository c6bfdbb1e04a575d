"""SVG figures of benchmark results, byte for byte reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG on white, with text as text."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    style = matplotlib.rc_context(
        {
            "svg.hashsalt": "acsgd",  # element ids are hashes; the default salt is random
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.sans-serif": [
                "DejaVu Sans",
                "Helvetica",
                "Arial",
            ],  # the first comes with matplotlib
        }
    )
    with style:
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
