"""Read, tokenize and encode the records of a source: steps that overlap, on all cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from acsgd.io.formats.base import Example
from acsgd.io.formats.formats import parts_of, read_each
from acsgd.io.sampling.encode import NONE, Encoded, Encoder
from acsgd.io.sources.base import BadRecord, RecordCounts, Source
from acsgd.read_ahead import read_ahead

BATCH_CHARS = 2**18
"""Characters tokenized at a time by one thread. The tokenizer's working memory is about 200 bytes per character."""
THREADS = min(8, len(os.sched_getaffinity(0)))
"""Batches that are tokenized at the same time. The tokenizers library divides a batch among cores, too, but not a long
text."""


class Part(NamedTuple):
    """A record, or a part of one that is too long to be tokenized at once."""

    where: str
    """Place of the record."""
    example: Example


Batch = list[Part | BadRecord]
"""Consecutive records of a source."""


class EncodedParts(NamedTuple):
    """Consecutive records of a source, with their tokens."""

    parts: Sequence[Part]
    """Those that were encoded."""
    encoded: Encoded
    bad: Sequence[BadRecord]
    """Those that were not, in order."""


def encode_source(
    source: Source, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, counts: RecordCounts
) -> Generator[EncodedParts, None, None]:
    """Yield the records of a source with their tokens, in order, in bounded memory. counts: as of `read_each`.

    The tokens do not depend on the number of threads. Raises ValueError if a record does not suit the task.
    """

    def tokenize(batch: Batch) -> tuple[Batch, Sequence[Any]]:
        with _naming(source):
            return batch, encoder.tokenize(examples) if (examples := _examples(batch)) else ()

    for batch, tokenized in read_ahead(tokenize, _batches(source, tokenizer, counts), THREADS + 1, threads=THREADS):
        with _naming(source):
            encoded = encoder.encode(examples, tokenized) if (examples := _examples(batch)) else NONE
        yield _collect(batch, encoded)


def stop_or_skip(record: BadRecord, source: Source, counts: RecordCounts) -> None:
    """Count a record as skipped. Raises ValueError with its place if such records stop the run (data.on_error)."""
    if source.options.on_error != "skip":
        where, reason, remedy = record
        raise ValueError(f"{source.key}: {where} {reason}; {remedy}, or skip such records with --data.on_error skip")
    counts.skip(record)


def progress(action: str, source: Source, counts: RecordCounts, tokens: int, seconds: float) -> str:
    """Return a sentence on how far a source is encoded. action: "tokenizing"; seconds: since the start."""
    fraction = counts.fraction() if counts.fraction else 0.0
    done = f"{fraction:.0%} of " if fraction else ""
    left = f", {timedelta(seconds=round(seconds / fraction - seconds))} left" if 0 < fraction <= 1 else ""
    return f"{action} {done}{source.name}: {tokens / 1e6:.1f} M tokens, {tokens / seconds / 1e6:.2f} M/s{left}"


def _collect(batch: Batch, encoded: Encoded) -> EncodedParts:
    """Separate what was encoded from what was not."""
    parts: list[Part] = []
    bad: list[BadRecord] = []
    number = 0
    for each in batch:
        if isinstance(each, BadRecord):
            bad.append(each)
            continue
        if error := encoded.refused.get(number):
            bad.append(BadRecord(each.where, error.reason, error.remedy))
        else:
            parts.append(each)
        number += 1
    return EncodedParts(parts, encoded, bad)


@contextlib.contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Name the source in a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source.key}: {source.name}: {error}") from None


def _examples(batch: Batch) -> list[Example]:
    return [part.example for part in batch if isinstance(part, Part)]


def _batches(source: Source, tokenizer: PreTrainedTokenizerBase, counts: RecordCounts) -> Iterator[Batch]:
    """Yield the records of a source, long ones in parts, in lists of at least BATCH_CHARS characters."""
    batch: Batch = []
    chars = 0
    for each in _parts(source, tokenizer, counts):
        batch.append(each)
        chars += 1 + (len(each.example.text) if isinstance(each, Part) else 0)  # empty documents count too
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _parts(source: Source, tokenizer: PreTrainedTokenizerBase, counts: RecordCounts) -> Iterator[Part | BadRecord]:
    for where, example in read_each(source, tokenizer, counts):
        if isinstance(example, BadRecord):
            yield example
        else:
            yield from (Part(where, part) for part in parts_of(example))
