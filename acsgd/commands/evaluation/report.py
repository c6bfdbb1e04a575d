"""Results of an evaluation, as a table or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class EvaluationReport:
    """Results of an evaluation."""

    model: str
    data: str
    task: str
    count: int
    """Number of sequences or examples."""
    unit: str
    """What is counted: "sequences" or "examples"."""
    scores: Mapping[str, float]
    """Metrics by name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; null for a metric that is not defined."""
        scores = {name: value if math.isfinite(value) else None for name, value in self.scores.items()}
        return {"model": self.model, "data": self.data, "task": self.task, self.unit: self.count, "metrics": scores}

    def show(self, *, as_json: bool) -> None:
        """Print the results on standard output."""
        if as_json:
            print(json.dumps(self.to_dict(), indent=2, allow_nan=False))
            return
        console = Console(soft_wrap=True)
        console.print(Text(f"{self.model} ({self.task}) on {self.data}, {self.count:,} {self.unit}"))
        table = Table("metric", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("value", justify="right")
        for name, value in self.scores.items():
            table.add_row(name, f"{value:.4f}")
        console.print(table)
