"""Segments of a streamed source: consecutive tokens that make a fixed number of rows.

A segment is a function of the source, the tokenizer, the options of its rows, and the segments before it. It can be
made without these from the position where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from acsgd.io.data.sampler import Ints
from acsgd.io.data.sources.base import RecordCounts, Source
from acsgd.io.data.stream.state import SegmentStart
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode import Encoder
from acsgd.io.data.tokens.pipeline import EncodedParts, encode_source, stop_or_skip
from acsgd.io.data.tokens.tokens import check_token
from acsgd.notes import print_note

GROWTH = 1.125
"""Factor by which the tokens at hand grow before rows are cut again, if they were too few."""


class SegmentCut(NamedTuple):
    """Rows at the beginning of a corpus."""

    rows: int
    """Number of rows."""
    end: int
    """Number of tokens from which they are made."""
    next: int
    """First token of the next segment; before `end` if the last label is the next row's first input."""
    layout: Mapping[str, Ints]
    """Arrays that say which tokens a row has, by name; empty if the corpus suffices."""


Cutter = Callable[[Corpus, bool], SegmentCut | None]
"""Function of the tokens at hand, and whether they are the last ones of the source, that returns the rows of a segment;
None if the tokens are too few. Only the last segment has fewer rows than others. The rows do not depend on the number
of tokens at hand."""


class StreamSegment(NamedTuple):
    """Consecutive rows of a streamed source, in memory."""

    start: SegmentStart
    after: SegmentStart
    """Where the next segment begins."""
    rows: int
    """Number of rows."""
    corpus: Corpus
    layout: Mapping[str, Ints]
    """See SegmentCut."""
    format: str
    """Name of the format of the records."""


def read_segments(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder,
    cut: Cutter,
    position: SegmentStart,
    *,
    vocab_size: int,
) -> Iterator[StreamSegment]:
    """Yield the segments of a source from a position on. Holds the tokens of one segment and its records.

    encoder: a new one. Raises ValueError if a record cannot be read, or has a token of `vocab_size` or above.
    """
    counts = RecordCounts(position.records, position.skipped, format=position.format, cursor=position.cursor)
    encoder.state = position.encoder
    tokens, enough = _Tokens(source, encoder, position), 0.0
    reported, unknown = set[str](), 0
    for part in encode_source(source, tokenizer, encoder, counts):
        skipped = counts.skipped
        if unread := counts.unread.keys() - reported:
            print_note(f"{source.key}: {source.name}: {counts.unread_summary()}")
            reported |= unread
        if counts.unknown.bit_length() > unknown.bit_length():
            print_note(f"{source.key}: {source.name}: {counts.unknown_summary()}")
            unknown = counts.unknown
        for record in part.bad:
            stop_or_skip(record, source, counts)
        _report_skipped(source, counts, before=skipped)
        check_token(int(part.encoded.tokens.max(initial=0)), source, tokenizer, vocab_size)
        tokens.append(part, skipped)
        while tokens.begin_segment and len(tokens) >= enough:
            if (found := cut(tokens.corpus(), False)) is None:
                enough = GROWTH * len(tokens)
                break
            yield tokens.take(found, counts.format)
            enough = 0.0
    if not tokens.begin_segment:
        raise ValueError(f"{source.key}: {source.name} ends before the place where a sequence began; restore it")
    while (found := cut(tokens.corpus(), True)) is not None:
        yield tokens.take(found, counts.format)


def _report_skipped(source: Source, counts: RecordCounts, *, before: int) -> None:
    """Print a sentence when the number of skipped records has reached another power of two. before: their number."""
    if counts.skipped.bit_length() > before.bit_length():
        print_note(f"{source.key}: {source.name}: {counts.summary()}")


class _Tokens:
    """Tokens at hand: those read and not yet in a segment."""

    def __init__(self, source: Source, encoder: Encoder, position: SegmentStart) -> None:
        self._source = source
        self._encoder = encoder
        self._drop = position.offset
        """Number of tokens at the beginning that belong to earlier segments."""
        self._before = position.tokens - position.offset
        """Number of tokens of the source before those at hand."""
        self._tokens, self._targets, self._types = _Pieces(np.uint32), _Pieces(np.bool_), _Pieces(np.uint32)
        self._ends = np.empty(0, np.int64)
        self._labels = _Pieces(np.float64)
        self._marks: list[tuple[int, SegmentStart]] = []
        """Records, each with the index of its first token among the tokens at hand, which may be below 0."""

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def begin_segment(self) -> bool:
        """Whether the first token at hand is the first of a segment."""
        return not self._drop

    def append(self, part: EncodedParts, skipped: int) -> None:
        """Add the tokens of the next records. skipped: number of records skipped before."""
        encoded, start = part.encoded, len(self._tokens)
        if part.mark is not None:
            cursor, records, form, state = part.mark
            self._marks.append((start, SegmentStart(cursor, records, skipped, form, state)))
        self._tokens.append(encoded.tokens)
        self._targets.append(encoded.targets)
        self._types.append(np.empty(0) if encoded.types is None else encoded.types)
        self._ends = np.concatenate([self._ends, start + encoded.ends])
        self._labels.append(encoded.labels)
        if self._drop and len(self) >= self._drop:
            self._remove(self._drop)
            self._drop = 0

    def corpus(self, end: int | None = None) -> Corpus:
        """Return the tokens at hand, or those before `end`, a document that is cut there included."""
        tokens, targets, types = self._tokens.array(), self._targets.array()[:end], self._types.array()[:end]
        ends = self._ends if end is None else self._ends[self._ends <= end]
        if end is not None and not len(self._labels) and ends[-1:].sum() != end:
            ends = np.append(ends, end)
        labels = self._labels.array()[: len(ends)]
        return Corpus(
            self._source.name,
            "",
            tokens[:end],
            np.concatenate([np.zeros(1, np.int64), ends]),
            None if targets.all() else targets,
            self._encoder.overlap,
            labels if len(labels) else None,
            types=types if len(types) else None,
            before=self._before,
        )

    def take(self, cut: SegmentCut, form: str) -> StreamSegment:
        """Remove the tokens of a segment, and return it. form: of its records."""
        corpus, start = self.corpus(cut.end), self._position(0)
        after = self._position(cut.next)
        self._remove(cut.next)
        return StreamSegment(start, after, cut.rows, corpus, cut.layout, form)

    def _position(self, index: int) -> SegmentStart:
        """Return the position of a token at hand."""
        first, mark = max((each for each in self._marks if each[0] <= index), key=lambda each: each[0])
        return replace(mark, offset=index - first, tokens=self._before + index)

    def _remove(self, count: int) -> None:
        """Remove tokens from the beginning, with the documents that end there."""
        for pieces in (self._tokens, self._targets, self._types):
            pieces.remove(count)
        gone = int((self._ends <= count).sum())
        self._ends = self._ends[gone:] - count
        self._labels.remove(min(gone, len(self._labels)))
        self._before += count
        kept = max((place for place, (first, _) in enumerate(self._marks) if first <= count), default=0)
        self._marks = [(first - count, mark) for first, mark in self._marks[kept:]]


class _Pieces:
    """An array that grows at its end and shrinks at its beginning."""

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype
        self._pieces: list[NDArray[Any]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, values: NDArray[Any]) -> None:
        self._pieces.append(values.astype(self._dtype, copy=False))
        self._length += len(values)

    def array(self) -> NDArray[Any]:
        """Return all values."""
        self._pieces = [np.concatenate([np.empty(0, self._dtype), *self._pieces])]
        return self._pieces[0]

    def remove(self, count: int) -> None:
        """Remove values from the beginning."""
        self._pieces = [self.array()[count:].copy()]
        self._length = len(self._pieces[0])
