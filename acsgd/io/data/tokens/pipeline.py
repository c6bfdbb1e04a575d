"""Read, tokenize and encode the records of a source: steps that overlap, on all cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from acsgd.io.data.formats.base import Example
from acsgd.io.data.formats.formats import parts_of, read_each
from acsgd.io.data.sources.base import BadRecord, RecordCounts, Source
from acsgd.io.data.tokens.encode import NONE, Encoded, Encoder, EncoderState
from acsgd.io.files.read_ahead import read_ahead
from acsgd.shards.tokenizer import unknown_tokens

BATCH_CHARS = 2**18
"""Characters tokenized at a time by one thread. The tokenizer's working memory is about 200 bytes per character."""
THREADS = min(8, len(os.sched_getaffinity(0)))
"""Batches that are tokenized at the same time. The tokenizers library divides a batch among cores, too, but not a long
text."""


class RecordPart(NamedTuple):
    """A record, or a part of one that is too long to be tokenized at once."""

    where: str
    """Place of the record."""
    example: Example


class RecordMark(NamedTuple):
    """What is known where a record begins, from which a streamed source can be read and encoded again."""

    cursor: Any
    """See RecordCounts."""
    records: int
    """Number of records before."""
    format: str
    """Name of their format; empty if it is not known yet."""
    encoder: EncoderState = None
    """State of the encoder."""


class RecordBatch(NamedTuple):
    """Consecutive records of a source."""

    parts: Sequence[RecordPart | BadRecord]
    mark: RecordMark | None
    """Of the first one; None if it begins within a record."""

    @property
    def examples(self) -> list[Example]:
        """Those that can be encoded."""
        return [part.example for part in self.parts if isinstance(part, RecordPart)]


class EncodedParts(NamedTuple):
    """Consecutive records of a source, with their tokens."""

    parts: Sequence[RecordPart]
    """Those that were encoded."""
    encoded: Encoded
    bad: Sequence[BadRecord]
    """Those that were not, in order."""
    mark: RecordMark | None
    """Of the first record; None if it is the rest of a record."""


def encode_source(
    source: Source, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, counts: RecordCounts
) -> Generator[EncodedParts, None, None]:
    """Yield the records of a source with their tokens, in order, in bounded memory. counts: see `read_each`.

    The tokens do not depend on the number of threads. Raises ValueError if a record does not suit the task.
    """

    def tokenize(batch: RecordBatch) -> tuple[RecordBatch, Sequence[Any]]:
        with _naming(source):
            return batch, encoder.tokenize(examples) if (examples := batch.examples) else ()

    unknown = unknown_tokens(tokenizer)
    for batch, tokenized in read_ahead(tokenize, _batches(source, tokenizer, counts), THREADS + 1, threads=THREADS):
        mark = batch.mark and batch.mark._replace(encoder=encoder.state)
        with _naming(source):
            encoded = encoder.encode(examples, tokenized) if (examples := batch.examples) else NONE
        counts.unknown += int(np.isin(encoded.tokens, unknown).sum())
        yield _collect(batch.parts, encoded, mark)


def stop_or_skip(record: BadRecord, source: Source, counts: RecordCounts) -> None:
    """Count a record as skipped. Raises ValueError with its place if such records stop the run (data.on_error)."""
    if source.options.on_error != "skip":
        problem = f"{record.where} {record.reason}; {record.remedy}"
        raise ValueError(f"{source.key}: {problem}, or skip such records with --data.on_error skip")
    counts.skip(record)


def progress(action: str, source: Source, counts: RecordCounts, tokens: int, seconds: float) -> str:
    """Return a sentence on how far a source is encoded. action: "tokenizing"; seconds: since the start."""
    fraction = counts.fraction() if counts.fraction else 0.0
    done = f"{fraction:.0%} of " if fraction else ""
    left = f", {timedelta(seconds=round(seconds / fraction - seconds))} left" if 0 < fraction <= 1 else ""
    return f"{action} {done}{source.name}: {tokens / 1e6:.1f} M tokens, {tokens / seconds / 1e6:.2f} M/s{left}"


def _collect(batch: Sequence[RecordPart | BadRecord], encoded: Encoded, mark: RecordMark | None) -> EncodedParts:
    """Separate what was encoded from what was not."""
    parts: list[RecordPart] = []
    bad: list[BadRecord] = []
    number = 0
    for each in batch:
        if isinstance(each, BadRecord):
            bad.append(each)
            continue
        if number not in encoded.refused:
            parts.append(each)
        elif error := encoded.refused[number]:
            bad.append(BadRecord(each.where, error.reason, error.remedy, error.label))
        number += 1
    return EncodedParts(parts, encoded, bad, mark)


@contextlib.contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Name the source in a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source.key}: {source.name}: {error}") from None


def _batches(source: Source, tokenizer: PreTrainedTokenizerBase, counts: RecordCounts) -> Iterator[RecordBatch]:
    """Yield the records of a source, long ones in parts, in lists of at least BATCH_CHARS characters."""
    parts: list[RecordPart | BadRecord] = []
    chars = 0
    mark: RecordMark | None = _mark(counts)
    for part, is_last in _parts(source, tokenizer, counts):
        parts.append(part)
        chars += 1 + (len(part.example.text) if isinstance(part, RecordPart) else 0)  # empty documents count too
        if chars >= BATCH_CHARS:
            yield RecordBatch(parts, mark)
            parts, chars, mark = [], 0, _mark(counts) if is_last else None
    if parts:
        yield RecordBatch(parts, mark)


def _mark(counts: RecordCounts) -> RecordMark:
    """Return the mark of the next record."""
    return RecordMark(counts.cursor, counts.records, counts.format)


def _parts(
    source: Source, tokenizer: PreTrainedTokenizerBase, counts: RecordCounts
) -> Iterator[tuple[RecordPart | BadRecord, bool]]:
    """Yield each record, a long one in parts, and whether it is the last part of its record."""
    for where, example in read_each(source, tokenizer, counts):
        if isinstance(example, BadRecord):
            yield example, True
            continue
        parts = parts_of(example)
        part = next(parts)
        for following in parts:
            yield RecordPart(where, part), False
            part = following
        yield RecordPart(where, part), True
