"""Read the examples of a source. To add a format, write a class that satisfies `Format` and a line in FORMATS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from acsgd.io.formats.base import Example, Format, FormatError, Segment
from acsgd.io.formats.text import Text
from acsgd.io.sources.base import BadRecord, Record, RecordCounts, Source
from acsgd.io.sources.pieces import pieces_of

FORMATS: Mapping[str, Format] = {"text": Text()}
"""Formats by name."""


def read_examples(source: Source, counts: RecordCounts | None = None) -> Iterator[Example]:
    """Yield the examples of a source in order, in bounded memory. counts: updated in place.

    A long text is yielded in parts. Raises ValueError that names file and line if a record is unreadable and the
    source does not skip such records.
    """
    counts = counts or RecordCounts()
    for record in source.records(counts):
        example = record if isinstance(record, BadRecord) else _example(record, FORMATS["text"])
        if not isinstance(example, BadRecord):
            yield from _parts(example)
        elif source.on_error == "skip":
            counts.skip(example)
        else:
            where, reason, remedy = example
            raise ValueError(
                f"{source.key}: {where} {reason}; {remedy}, or skip such records with --data.on_error skip"
            )


def _example(record: Record, form: Format) -> Example | BadRecord:
    """Make an example of a record, or return why there is none."""
    try:
        example = form.example(record)
        example.text.encode()
    except FormatError as error:
        return BadRecord(record.where, error.reason, error.remedy)
    except UnicodeEncodeError:
        return BadRecord(record.where, "has a lone surrogate, which is not valid text", "write the whole pair")
    return example


def _parts(example: Example) -> Iterator[Example]:
    """Cut a long example into parts that are tokenized one at a time."""
    parts = [Segment(piece, is_target) for text, is_target in example.segments for piece in pieces_of(text)]
    if len(parts) == len(example.segments):
        yield example
        return
    for part in parts[:-1]:
        yield example._replace(segments=(part,), ends_document=False)
    yield example._replace(segments=(parts[-1],))
