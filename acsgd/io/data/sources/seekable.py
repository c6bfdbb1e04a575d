"""Readers of files that can begin at any record: JSON lines, Parquet and Arrow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

from acsgd.io.data.sources.base import BadRecord, RecordCounts, SourceRecord
from acsgd.io.data.sources.json_records import MAX_RECORD_CHARS, SKIPPED_CHARS, parse_object
from acsgd.io.data.sources.tables import BATCH_ROWS, arrow_errors, batches_of, rows_of, sliced
from acsgd.io.data.sources.text import LineError, decompressed, decompression_errors, excerpt

BOM = "\ufeff"


class FilePlace(NamedTuple):
    """A place between two records of a file."""

    record: int = 0
    """Number of records, or lines, before it."""
    byte: int = 0
    """Number of bytes before it, decompressed; 0 in Parquet and Arrow."""


Found = tuple[SourceRecord | BadRecord, FilePlace]
"""A record, and the place after it."""


def json_lines_from(file: BinaryIO, name: str, key: str, place: FilePlace) -> Iterator[Found]:
    """Yield the object of each line after a place. Of a compressed file, what lies before is decompressed, too."""
    number, byte = place
    with decompression_errors(name, key=key):
        lines = decompressed(file, name)
        if lines is file:
            file.seek(byte)
        else:
            _skip(lines, byte)
        while line := lines.readline(MAX_RECORD_CHARS + 1):
            number += 1
            byte += len(line)
            where = f"{name}, line {number}"
            if len(line) > MAX_RECORD_CHARS and not line.endswith(b"\n"):
                byte += _skip_line(lines)
                reason = f"has more than {MAX_RECORD_CHARS} bytes: {excerpt(line[:1000].decode(errors='replace'))}"
                yield BadRecord(where, reason, "split the record"), FilePlace(number, byte)
                continue
            text = line.decode(errors="surrogateescape")
            fields = parse_object(text.removeprefix(BOM) if number == 1 else text)
            if isinstance(fields, LineError):
                yield BadRecord(where, *fields), FilePlace(number, byte)
            elif fields is not None:
                yield SourceRecord(fields, where), FilePlace(number, byte)


def parquet_from(file: BinaryIO, name: str, key: str, place: FilePlace) -> Iterator[Found]:
    """Yield the rows after a place. Row groups before it are not read, and at most one is read in part."""
    import pyarrow.parquet as pq  # takes a third of a second

    with arrow_errors(name, key, "Parquet"), pq.ParquetFile(file) as opened:
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        groups = [group for group, end in enumerate(ends) if end > place.record]
        if not groups:
            return
        counts = RecordCounts(records=ends[groups[0]] - sizes[groups[0]])
        for record in rows_of(opened.iter_batches(BATCH_ROWS, row_groups=groups), name, counts):
            if counts.records > place.record:
                yield record, FilePlace(counts.records)


def arrow_from(file: BinaryIO, name: str, key: str, place: FilePlace) -> Iterator[Found]:
    """Yield the rows after a place. What lies before it is read, since the sizes of its batches are, but not parsed."""
    start, counts = 0, RecordCounts(records=place.record)
    with arrow_errors(name, key, "Arrow"):
        for batch in batches_of(file):
            rest = batch.slice(min(batch.num_rows, max(0, place.record - start)))
            start += batch.num_rows
            for record in rows_of(sliced(rest), name, counts):
                yield record, FilePlace(counts.records)


SEEKABLE: Mapping[str, Callable[[BinaryIO, str, str, FilePlace], Iterator[Found]]] = {
    ".jsonl": json_lines_from,
    ".jsonl.zst": json_lines_from,
    ".jsonl.gz": json_lines_from,
    ".parquet": parquet_from,
    ".arrow": arrow_from,
}
"""Ending of a file name -> reader, called with the open file, its name, the configuration key, and where to begin."""


def _skip(file: BinaryIO, count: int) -> None:
    """Read and discard bytes."""
    while count and (skipped := len(file.read(min(count, SKIPPED_CHARS)))):
        count -= skipped


def _skip_line(file: BinaryIO) -> int:
    """Read and discard the rest of a line; return its length, bytes."""
    skipped = 0
    while line := file.readline(SKIPPED_CHARS):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped
