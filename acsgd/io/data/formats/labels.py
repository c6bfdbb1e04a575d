"""Labels as numbers: classes of a model, or values of a regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from acsgd.io.data.formats.base import FormatError
from acsgd.io.data.sources.base import Label
from acsgd.io.data.sources.text import excerpt
from acsgd.model_classes import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_VALUE = float(np.finfo(np.float32).max)
HELP = "acsgd data check --task classification lists all labels"


class Labels(Protocol):
    """What the labels of records may be."""

    @property
    def key(self) -> str:
        """What the numbers depend on besides the labels; part of the cache key of tokens."""
        ...

    @property
    def dtype(self) -> type[np.generic]:
        """Type of the numbers in rows."""
        ...

    def number_of(self, label: Label) -> float:
        """Return a label as a number. Raises FormatError, with the label, if the model cannot learn it."""
        ...

    def describe(self, number: float) -> str:
        """Return a number with its name, if it has one."""
        ...


class Classes:
    """Classes of a model, by number or by name ("id2label" in its config.json)."""

    dtype = np.int64

    def __init__(self, config: PreTrainedConfig) -> None:
        self.names = {int(number): str(name) for number, name in (config.id2label or {}).items()}
        """Names by number."""
        self._numbers = {name: number for number, name in self.names.items()}

    @property
    def key(self) -> str:
        """See Labels."""
        return str(self.names)

    def number_of(self, label: Label) -> float:
        """Return the number of a class. Raises FormatError if the model does not have it."""
        number = self._numbers.get(label) if isinstance(label, str) else label
        if number in self.names:
            assert number is not None
            return float(number)
        if isinstance(label, str):
            known, field = f"the classes of the model are {excerpt(', '.join(self._numbers))}", '"id2label"'
        else:
            known, field = f"the model has the classes 0 to {len(self.names) - 1}", '"num_labels"'
        remedy = f"correct it, or set {field} in config.json of the model ({HELP})"
        raise FormatError(f"has the label {shown(label)}, but {known}", remedy, label=label)

    def describe(self, number: float) -> str:
        """Return the number of a class with its name."""
        return f"{number:g} ({self.names.get(int(number))})"


class RegressionLabels:
    """Values of a regression."""

    key = "values"
    dtype = np.float32

    def number_of(self, label: Label) -> float:
        """Return a value. Raises FormatError unless it is a finite number of fp32 other than IGNORED."""
        if isinstance(label, str):
            raise FormatError(f"has the label {shown(label)}, which is not a number", "correct it", label=label)
        if not abs(label) <= MAX_VALUE:
            reason = f"has the label {shown(label)}, which is not finite in fp32"
            raise FormatError(reason, "correct it, or scale all labels", label=label)
        if label == IGNORED:
            reason = f"has the label {IGNORED}, which means that there is none"
            raise FormatError(reason, "shift or scale all labels", label=label)
        return float(label)

    def describe(self, number: float) -> str:
        """Return a number."""
        return f"{number:g}"


def shown(label: Label) -> str:
    """Return a label for a message."""
    if isinstance(label, str):
        return f'"{excerpt(label)}"'
    return excerpt(str(label)) if isinstance(label, int) else f"{label:g}"
