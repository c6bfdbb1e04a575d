"""Files of rows and columns: CSV, TSV, Parquet and Arrow. The names of the columns are the fields of the records."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from acsgd.io.data.sources.base import BadRecord, RecordCounts, SourceRecord
from acsgd.io.data.sources.text import excerpt, fraction_read, not_utf8, open_text, reading

MAX_CELL_CHARS = 2**27
"""Maximum length of a cell of CSV, characters."""
BATCH_ROWS = 256
"""Rows of Parquet that are read at a time."""


def read_csv(path: Path, name: str, key: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
    """Yield the rows of a file with a header. Cells may be quoted, and then contain newlines."""
    yield from _read_delimited(path, name, key, counts, delimiter=",", quoting=csv.QUOTE_MINIMAL)


def read_tsv(path: Path, name: str, key: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
    """Yield the rows of a file with a header whose cells are separated by tabs. Quotes are characters as others."""
    yield from _read_delimited(path, name, key, counts, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_columns(
    path: Path, name: str, key: str, counts: RecordCounts, columns: Sequence[str]
) -> Iterator[SourceRecord | BadRecord]:
    """Yield the rows of a file like `read_tsv`'s, but without a header. columns: names of its columns."""
    yield from _read_delimited(path, name, key, counts, columns, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_parquet(path: Path, name: str, key: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
    """Yield the rows of a Parquet file."""
    import pyarrow.parquet as pq  # takes a third of a second

    with reading(path, key=key), arrow_errors(name, key, "Parquet"), pq.ParquetFile(path) as file:
        total = max(1, file.metadata.num_rows)
        counts.fraction = lambda: counts.records / total
        yield from rows_of(file.iter_batches(BATCH_ROWS), name, counts)


def read_arrow(path: Path, name: str, key: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
    """Yield the rows of an Arrow file or stream, as `datasets` writes it."""
    import pyarrow as pa

    with reading(path, key=key), arrow_errors(name, key, "Arrow"), pa.OSFile(str(path)) as file:
        # not memory-mapped: if a corrupt file has a buffer beyond its end, the process would be killed by SIGBUS
        counts.fraction = lambda: 0.0 if file.closed else file.tell() / max(1, file.size())
        yield from rows_of((part for batch in batches_of(file) for part in sliced(batch)), name, counts)


def batches_of(file: Any) -> Iterator[Any]:
    """Yield the record batches of an open Arrow file or stream. Raises ArrowException."""
    import pyarrow as pa

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    opened = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
    yield from map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened


def _read_delimited(
    path: Path, name: str, key: str, counts: RecordCounts, columns: Sequence[str] = (), **dialect: Any
) -> Iterator[SourceRecord | BadRecord]:
    csv.field_size_limit(MAX_CELL_CHARS)
    with open_text(path, key=key) as file:
        counts.fraction = partial(fraction_read, file)
        rows = _delimited_rows(file, dialect)
        header = columns or _header(rows, name, key, dialect["delimiter"])
        for counts.records, (line, row) in enumerate(rows, start=1):
            where = f"{name}, line {line}"
            if isinstance(row, str):
                yield BadRecord(where, f"is not valid CSV ({row})", "correct its quotes")
            elif error := not_utf8(dialect["delimiter"].join(row)):
                yield BadRecord(where, *error)
            elif len(row) != len(header):
                yield BadRecord(where, f"has {len(row)} columns, not {len(header)}", "correct the row")
            else:
                yield SourceRecord(dict(zip(header, row, strict=True)), where)


def _header(rows: Iterator[tuple[int, list[str] | str]], name: str, key: str, delimiter: str) -> list[str]:
    """Return the first row. Raises ValueError unless it names the columns, each once.

    A first column without a name is the index that pandas writes, and called as pandas calls it.
    """
    _, header = next(rows, (1, []))
    if isinstance(header, list) and (error := not_utf8(delimiter.join(header))):
        raise ValueError(f"{key}: {name}, line 1 {'; '.join(error)}")
    if isinstance(header, list) and len(header) > 1 and not header[0]:
        header = ["Unnamed: 0", *header[1:]]
    if isinstance(header, str) or not header or not all(header) or max(Counter(header).values()) > 1:
        found = header if isinstance(header, str) else excerpt(", ".join(header)) or "nothing"
        raise ValueError(f"{key}: {name}, line 1 must name the columns, each once, but has: {found}; write a header")
    if len(header) == 1 and (other := next((each for each in ";\t" if each in header[0]), "")):
        raise ValueError(
            f"{key}: {name}, line 1 has one column, {excerpt(header[0])!r}: they are separated by {other!r}; write the "
            f"table with {delimiter!r} between them"
        )
    return header


def _delimited_rows(file: TextIO, dialect: dict[str, Any]) -> Iterator[tuple[int, list[str] | str]]:
    """Yield line number and cells of each row that is not blank, or the reason why it cannot be read."""
    rows = csv.reader(file, strict=True, **dialect)
    while True:
        line = rows.line_num + 1
        try:
            if row := next(rows):
                yield line, row
        except csv.Error as error:
            yield line, str(error)
        except StopIteration:
            return


def rows_of(batches: Iterable[Any], name: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
    """Yield the rows of Arrow record batches."""
    for batch in batches:
        for fields in _fields_of(batch):
            counts.records += 1
            where = f"{name}, row {counts.records}"
            if fields is None:
                yield BadRecord(where, "is not UTF-8", "write its text as UTF-8")
            else:
                yield SourceRecord(fields, where)


def _fields_of(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yield the fields of each row of a record batch, None for a row that is not UTF-8. Raises ArrowException."""
    try:
        batch.validate(full=True)  # offsets of a corrupt file lead out of its buffers
        yield from (row_of(fields, batch.schema) for fields in batch.to_pylist())
    except ValueError as error:
        if not _is_not_utf8(error):
            raise
        if batch.num_rows == 1:
            yield None
        else:
            for index in range(batch.num_rows):
                yield from _fields_of(batch.slice(index, 1))


def row_of(fields: Mapping[str, Any], schema: Any | None) -> dict[str, Any]:
    """Return the fields of a row as they were before Arrow stored them. schema: None = not known.

    Arrow adds a null to a struct for each field that others have, and `datasets` stores what differs in type as JSON.
    """
    return {name: _restored(value, schema and schema.field(name).type) for name, value in fields.items()}


def _restored(value: Any, kind: Any) -> Any:
    import pyarrow as pa

    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind} if kind and pa.types.is_struct(kind) else {}
        return {name: _restored(each, kinds.get(name)) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_restored(each, getattr(kind, "value_type", None)) for each in value]
    return json.loads(value) if isinstance(value, str) and isinstance(kind, pa.JsonType) else value


def _is_not_utf8(error: ValueError) -> bool:
    """Whether an error of Arrow, or of Python while it reads from Arrow, is about bytes that are not UTF-8."""
    return isinstance(error, UnicodeDecodeError) or "UTF8" in str(error)


def sliced(batch: Any) -> Iterator[Any]:
    """Cut a record batch, which may have millions of rows, without a copy."""
    yield from (batch.slice(start, BATCH_ROWS) for start in range(0, batch.num_rows, BATCH_ROWS))


@contextlib.contextmanager
def arrow_errors(name: str, key: str, kind: str) -> Iterator[None]:
    """Turn an error of Arrow about the content of a file into a ValueError that names the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError) as error:  # ValueError: the name of a column, a date after 9999
        if isinstance(error, OSError) and error.errno:  # of the file, not of its content
            raise OSError(error.errno, os.strerror(error.errno)) from None
        problem = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"{key}: {name} is not valid {kind} ({problem}); write or download it again") from None
