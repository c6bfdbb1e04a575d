"""Rows that another rank has opened: a rank that needs no tokens opens no source, and does not wait for its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from acsgd.io.data.rows.base import Rows


@dataclass(frozen=True)
class DescribedRows:
    """Rows of which only the properties are known. They cannot be read."""

    length: int
    values: Sequence[Any]
    """Fingerprint."""
    notes: tuple[str, ...]
    mean_targets: float
    """Mean number of labels of a row that are not IGNORED."""
    is_streamed: bool = False

    def fingerprint(self) -> tuple[object, ...]:
        """Return the fingerprint of the rows that were opened."""
        return tuple(self.values)

    def __len__(self) -> int:
        return self.length

    def read(self, index: int, epoch: int = 0) -> NoReturn:
        """Raise AssertionError."""
        raise AssertionError("this rank needs no tokens")


def describe(rows: Sequence[Rows]) -> str:
    """Return a description of rows, for `described`."""
    found = (
        DescribedRows(len(each), each.fingerprint(), each.notes, each.mean_targets, each.is_streamed) for each in rows
    )
    return json.dumps([asdict(each) for each in found])


def described(text: str) -> list[DescribedRows]:
    """Return the rows that a text describes."""
    return [DescribedRows(**{**fields, "notes": tuple(fields["notes"])}) for fields in json.loads(text)]
