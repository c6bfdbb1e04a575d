"""Numbers that users type: valid ranges of options, declared in the type of the field, and sizes with units.

A range: Annotated[int, Range(1, 10)].
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Numbers that a numeric option may have. NaN is in no range."""

    low: float
    high: float
    above: bool = False
    """Whether `low` itself is excluded."""
    below: bool = False
    """Whether `high` itself is excluded."""

    def __contains__(self, value: float) -> bool:
        is_above = value > self.low if self.above else value >= self.low
        return is_above and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"greater than {self.low:.15g}" if self.above else f"at least {self.low:.15g}"
        high = f"less than {self.high:.15g}" if self.below else f"at most {self.high:.15g}"
        return f"{low}, {high}"


COUNT = Range(1, 10**12)
"""Range of numbers of steps, which cost nothing until they are made."""
COUNT_OR_NONE = Range(0, 10**12)
PORT = Range(1, 65535)


@functools.cache
def ranges_of(kind: type) -> dict[str, Range]:
    """Return the ranges that the fields of a dataclass declare, by name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {field.name: _range(hints[field.name]) for field in dataclasses.fields(kind)}
    return {name: each for name, each in found.items() if each}


def out_of_range(options: Any) -> Iterator[str]:
    """Yield "name=value must be ..." for each field of a dataclass instance that is outside its declared range."""
    for name, valid in ranges_of(options.__class__).items():
        value = getattr(options, name)
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        for each in values:
            if not isinstance(each, str) and each not in valid:
                entry = f" contains {each}, which" if isinstance(value, tuple) else f"={each}"
                yield f"{name}{entry} must be {valid}"


def _range(hint: Any) -> Range | None:
    """Return the range in a type such as tuple[Annotated[int, Range(...)], ...] | None."""
    if typing.get_origin(hint) is typing.Annotated:
        return next((each for each in hint.__metadata__ if isinstance(each, Range)), None)
    return next(filter(None, map(_range, typing.get_args(hint))), None)


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Units of sizes, bytes."""


def parse_size(text: str, *, option: str, example: str) -> int:
    """Return a number of bytes. Raises ValueError that names the option and gives an example."""
    number, unit = re.fullmatch(r"([0-9.]*)(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    if unit not in UNITS or not re.fullmatch(r"\d+(\.\d+)?", number) or float(number) == 0:
        raise ValueError(f"{option} {text} is not a size; give a number with a unit, such as {example}")
    return int(float(number) * UNITS[unit])
