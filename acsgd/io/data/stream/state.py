"""Where streamed sources are read on, as checkpoints record it. Needs no code that reads them, nor transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from acsgd.io.files.fields import Natural


@dataclass(frozen=True)
class SegmentStart:
    """Where a segment begins: a token after the beginning of a record."""

    cursor: Any = None
    """Where the record begins, as of RecordCounts; None = at the beginning of the source."""
    records: Natural = 0
    """Number of records before it."""
    skipped: Natural = 0
    """Number of those that were skipped as unreadable."""
    format: str = ""
    """Format of the records; empty = not known yet."""
    encoder: list[Any] | None = None
    """State of the encoder at the beginning of the record."""
    offset: Natural = 0
    """Number of tokens from there to the segment."""
    tokens: Natural = 0
    """Number of tokens of the source before the segment."""


@dataclass(frozen=True)
class StreamState:
    """What a checkpoint records of a streamed source: where to read on."""

    segment: Natural
    """Index of a segment, at or before the one that the next step trains on."""
    position: SegmentStart
    """Where it begins."""
    rows: Natural | None = None
    """Number of rows of the source; None if its end was not read yet."""
