"""Rows of a streamed source: a fixed number of rows from the first tokens at hand, in an order that is shuffled within
each segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from acsgd.errors import RunError
from acsgd.io.data.row_spec import LongDocument
from acsgd.io.data.rows.base import Row, Rows, describe_empty
from acsgd.io.data.rows.layout import ARRAYS, RowKind, RowLayout, best_fit, by_row, parts_of, targets_of_rows
from acsgd.io.data.rows.objectives import Objective
from acsgd.io.data.sampler import Ints, order_key, shuffled
from acsgd.io.data.sources.base import TEXT
from acsgd.io.data.stream.segment_cache import SegmentCache
from acsgd.io.data.stream.segment_files import OpenSegment
from acsgd.io.data.stream.segments import Cutter, SegmentCut
from acsgd.io.data.stream.state import StreamState
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.ends import TextEnds
from acsgd.io.files.arrays import Array
from acsgd.notes import print_note

OPEN = 4
"""Number of segments that are kept open, if as many are not read at a time."""


class _Current(NamedTuple):
    """A segment that is read."""

    epoch: int
    segment: OpenSegment
    rows: Rows
    order: Ints
    """Order in which its rows are trained on."""


class StreamedRows:
    """Rows of a streamed source, read in the order of training.

    The n-th row of the run is in segment n // `window`, at a place drawn from the seed and the segment. After the last
    row of the source, its first segment follows, in another order.

    name: of the source; version: differs if its rows differ; make: returns the rows of a segment, or raises ValueError;
    seed, source: of the order, see `order_key`; span: number of consecutive segments that are read at a time.
    """

    is_streamed = True
    mean_targets = 0.0
    """Not known."""

    def __init__(
        self,
        name: str,
        version: str,
        cache: SegmentCache,
        make: Callable[[OpenSegment], Rows],
        window: int,
        *,
        seed: int,
        source: int,
        span: int = 1,
    ) -> None:
        self.cache = cache
        self.ends = TextEnds()
        """How the learned texts of the segments read so far end."""
        self.format = ""
        """Format of the records; empty before the first segment is read."""
        self._name = name
        self._num_empty: dict[int, int] = {}
        """Number of rows without a target of each segment read so far, by its index."""
        self._num_read = 0
        """Number of rows of these segments."""
        self._version = version
        self._make = make
        self._window = window
        self._seed = seed
        self._source = source
        self._num_open = OPEN * span
        self._current: dict[tuple[int, int], _Current] = {}
        """Segments read last, by epoch and index."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the source, and, of what is read so far, on its format and on rows without targets."""
        how = f"data.sources: {self._name}: tokenized during training, shuffled within {self._window:,} sequences"
        formats = [f'data.sources: {self._name}: format "{self.format}"'] if self.format not in ("", TEXT) else []
        return (how, *formats, *describe_empty(self._name, sum(self._num_empty.values()), self._num_read))

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts."""
        return (self._version,)

    def num_empty(self, rows: range) -> int:
        """Return 0."""
        return 0

    def __len__(self) -> int:
        return 0

    def read(self, index: int, epoch: int = 0) -> Row:
        """Read the row with the number `index` in the run, counted from 0, waiting until it is tokenized."""
        place, current = self._locate(index)
        return current.rows.read(int(current.order[place]), current.epoch)

    def look_ahead(self, index: int) -> None:
        """Read the segment of a row before training, waiting until it is tokenized: then `ends` and `format` are known.

        Raises RunError as `SegmentCache.segment`, and if the first segment of the source has no target.
        """
        self._locate(index)

    def checksum(self, index: int) -> int:
        """Return the checksum of the segment with a row, equal on all hosts, waiting until it is tokenized."""
        return self._locate(index)[1].segment.about.checksum

    def state(self, index: int) -> StreamState:
        """Return what a checkpoint records if the next row is `index`."""
        total = self.cache.total
        segment, position = self.cache.position((index % total if total else index) // self._window)
        return StreamState(segment, position, total)

    def restore(self, state: StreamState) -> None:
        """Read on from what a checkpoint records."""
        self.cache.restore(state.segment, state.position, state.rows)

    def close(self, *, wait: bool = True) -> None:
        """Stop to tokenize. wait: see SegmentCache."""
        self.cache.close(wait=wait)

    def _locate(self, index: int) -> tuple[int, _Current]:
        """Return the place of a row in the order of its segment, and the segment."""
        while True:
            total = self.cache.total
            epoch, position = divmod(index, total) if total else (0, index)
            number, place = divmod(position, self._window)
            if current := self._current.get((epoch, number)):
                return place, current
            segment = self.cache.segment(number)
            if segment is not None and place < segment.about.rows:
                return place, self._enter(epoch, number, segment)
            # the source ends before the row, which is one of the next epoch

    def _enter(self, epoch: int, number: int, segment: OpenSegment) -> _Current:
        """Draw the order of a segment."""
        count = -(-(self.cache.total or 0) // self._window)
        key = np.repeat(order_key(self._seed, self._source, np.array([epoch * count + number])), segment.about.rows)
        order = shuffled(np.arange(segment.about.rows), segment.about.rows, key)
        try:
            current = _Current(epoch, segment, self._make(segment), order)
        except ValueError as error:  # training goes on already: it is an error of this rank's host, not of its start
            raise RunError(str(error)) from None
        self._current = {**dict([*self._current.items()][1 - self._num_open :]), (epoch, number): current}
        self.ends = TextEnds.union([self.ends, current.rows.ends])
        self.format = segment.about.format
        if number not in self._num_empty:
            self._count(number, current.rows)
        return current

    def _count(self, number: int, rows: Rows) -> None:
        """Count rows without targets; print a sentence when their number has reached another power of two."""
        before, is_first = sum(self._num_empty.values()), not self._num_read
        self._num_read += len(rows)
        self._num_empty[number] = found = rows.num_empty(range(len(rows)))
        if (before + found).bit_length() > before.bit_length() and self.cache.writes and not is_first:
            print_note(self.notes[-1])


def cut_concat(rows: int, sequence: int) -> Cutter:
    """Return the cutter of rows as `ConcatRows` has them."""

    def cut(corpus: Corpus, is_last: bool) -> SegmentCut | None:
        number = min(rows, max(0, len(corpus.tokens) - 1) // sequence)
        if not number or (number < rows and not is_last):
            return None
        return SegmentCut(number, number * sequence + 1, number * sequence, {})

    return cut


def cut_examples(rows: int) -> Cutter:
    """Return the cutter of rows of one example each."""

    def cut(corpus: Corpus, is_last: bool) -> SegmentCut | None:
        number = min(rows, len(corpus.offsets) - 1)
        if not number or (number < rows and not is_last):
            return None
        end = int(corpus.offsets[number : number + 1][0])
        return SegmentCut(number, end, end, {})

    return cut


def cut_documents(rows: int, sequence: int, kind: RowKind, long: LongDocument, objective: Objective) -> Cutter:
    """Return the cutter of rows of whole documents. Arguments: see `make_layout`; "pack" packs each segment alone."""

    def cut(corpus: Corpus, is_last: bool) -> SegmentCut | None:
        starts, lengths, _ = parts_of(corpus, sequence, long, objective)
        sizes = objective.sizes(lengths)
        # parts that fill the rows without any padding are enough, or more
        enough = rows if kind == "single" else int(np.searchsorted(np.cumsum(sizes), rows * sequence)) + 1
        if not len(sizes) or (enough >= len(sizes) and not is_last):
            return None
        of_part = fill(sizes[:enough], sequence, rows) if kind == "pack" else np.arange(min(rows, len(sizes)))
        number = len(of_part)
        last = number - 1
        after = int(starts[number]) if number < len(starts) else len(corpus.tokens)
        layout = by_row(starts[:number], lengths[:number], of_part)
        end = int(starts[last] + lengths[last]) + 1
        return SegmentCut(int(of_part.max()) + 1, end, after, dict(zip(ARRAYS, layout, strict=True)))

    return cut


def fill(sizes: Ints, capacity: int, rows: int) -> Ints:
    """Return the row of each of the first parts, as many as best-fit decreasing puts into at most `rows` rows.

    If one more part needs more than one more row, which is rare, parts that follow have the rest of the rows alone.
    There are enough of them if the sizes amount to `rows` full rows.
    """
    if (placed := best_fit(sizes, capacity)).max() < rows:
        return placed
    low, high = 0, len(sizes)  # the first `low` parts fit, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if best_fit(sizes[:middle], capacity).max() < rows else (low, middle)
    placed = best_fit(sizes[:low], capacity)
    return np.concatenate([placed, np.arange(int(placed.max(initial=-1)) + 1, rows)[: len(sizes) - low]])


def layout_of(arrays: Mapping[str, Array], corpus: Corpus) -> RowLayout:
    """Return the layout of a segment from the arrays of its cut."""
    starts, lengths, offsets = (arrays[name][:] for name in ARRAYS)
    targets = targets_of_rows(corpus, starts, lengths, offsets)
    return RowLayout(starts, lengths, offsets, note="", num_targets=int(targets.sum()), targets=targets)
