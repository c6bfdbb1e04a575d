"""What commands report about records, and about the labels of a source."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from acsgd.io.data.formats.labels import Classes, Labels, shown
from acsgd.io.data.sources.base import Label

MAX_SHOWN = 10
"""Number of records of each finding that are named."""


@dataclass
class Finding:
    """Records with something in common."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Descriptions of the first of them."""
    remedy: str = ""
    """Imperative: what to change in the first of them; "" if it may be as it is."""

    def add(self, description: str) -> None:
        """Count a record."""
        self.count += 1
        if len(self.first) < MAX_SHOWN:
            self.first.append(description)

    def lines(self) -> Iterator[str]:
        """Yield the descriptions, and how many more there are."""
        yield from (f"  {each}" for each in self.first)
        if self.count > len(self.first):
            yield f"  ... and {self.count - len(self.first):,} more"


MAX_LABELS = 100
"""Number of labels that are listed."""


class LabelCounts:
    """Counts of the labels that the model can learn, and of others."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._learned = _Range() if not isinstance(labels, Classes) else _Classes(labels)
        self._others: Counter[Label] = Counter()

    @property
    def finding(self) -> str:
        """Name of the records whose labels the model cannot learn."""
        return "label outside the classes" if isinstance(self._labels, Classes) else "label that cannot be learned"

    def add(self, numbers: NDArray[np.float64]) -> None:
        """Count labels that the model can learn."""
        self._learned.add(numbers)

    def add_other(self, label: Label) -> None:
        """Count a label that it cannot learn."""
        self._others[label] += 1

    def lines(self) -> Iterator[str]:
        """Yield lines for the user."""
        yield from self._learned.lines()
        if not self._others:
            return
        yield f"{self.finding}:"
        yield from (f"  {shown(label)}: {count:,}" for label, count in self._others.most_common(MAX_LABELS))
        if (rest := len(self._others) - MAX_LABELS) > 0:
            yield f"  ... and {rest:,} more"
        names = sorted(label for label in self._others if isinstance(label, str))
        if isinstance(self._learned, _Classes) and 0 < len(names) <= MAX_LABELS:
            yield f'to learn all names, set "id2label" in config.json of the model to {self._learned.with_names(names)}'


class _Classes:
    """Number of records of each class."""

    def __init__(self, classes: Classes) -> None:
        self._names = classes.names
        self._counts: Counter[int] = Counter()

    def add(self, numbers: NDArray[np.float64]) -> None:
        self._counts.update(map(int, numbers))

    def lines(self) -> Iterator[str]:
        yield "classes:"
        for number, name in list(self._names.items())[:MAX_LABELS]:
            yield f"  {number} ({name}): {self._counts[number]:,}"
        if (rest := len(self._names) - MAX_LABELS) > 0:
            yield f"  ... and {rest:,} more"

    def with_names(self, names: list[str]) -> str:
        """Return the classes with further names, as in config.json. Those of a model of which no record has one end."""
        known = list(self._names.values()) if self._counts else []
        return json.dumps(dict(enumerate([*known, *names])))


class _Range:
    """Range and mean of numbers."""

    def __init__(self) -> None:
        self._count, self._sum, self._low, self._high = 0, 0.0, math.inf, -math.inf

    def add(self, numbers: NDArray[np.float64]) -> None:
        self._count += len(numbers)
        self._sum += float(numbers.sum())
        self._low = min(self._low, float(numbers.min(initial=math.inf)))
        self._high = max(self._high, float(numbers.max(initial=-math.inf)))

    def lines(self) -> Iterator[str]:
        if self._count:
            yield f"labels from {self._low:g} to {self._high:g}, mean {self._sum / self._count:g}"
