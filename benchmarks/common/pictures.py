"""Pictures of what benchmarks measure: SVG files that are equal, byte for byte, where the numbers are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG on white, its letters as text."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    style = matplotlib.rc_context(
        {
            "svg.hashsalt": "acsgd",  # ids in the file are hashes with this salt, by default a random one
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],  # matplotlib brings the first and measures by it
        }
    )
    with style:
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
