"""Files of plain text, each one document."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from acsgd.io.sources.base import TEXT, BadRecord, Record, RecordCounts
from acsgd.io.sources.pieces import joined, parts_of
from acsgd.io.sources.text import fraction_read, not_utf8, open_text


def read_text(path: Path, name: str, key: str, counts: RecordCounts) -> Iterator[Record | BadRecord]:
    """Yield the lines that are not UTF-8, then the text without them in pieces of at least PIECE_CHARS characters."""
    # in a separate pass, since a line may be longer than a piece and unreadable at its end
    unreadable: set[int] = set()
    with open_text(path, key=key) as file:
        counts.fraction = partial(fraction_read, file)
        for number, part in parts_of(file):
            counts.records = number
            if number not in unreadable and (error := not_utf8(part)):
                yield BadRecord(f"{name}, line {number}", *error)
                unreadable.add(number)
    with open_text(path, key=key) as file:
        counts.fraction = partial(fraction_read, file)
        pieces = joined(part for line, part in parts_of(file) if line not in unreadable)
        piece = next(pieces, None)
        while piece is not None:
            following = next(pieces, None)
            yield Record({TEXT: piece}, name, ends_document=following is None)
            piece = following
