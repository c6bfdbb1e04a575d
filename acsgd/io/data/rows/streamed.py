"""Rows of a streamed source, in an order that is shuffled within each segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from acsgd.errors import RunError
from acsgd.io.data.rows.base import Row, Rows
from acsgd.io.data.sampler import Ints, order_key, shuffled
from acsgd.io.data.stream.segment_cache import SegmentCache
from acsgd.io.data.stream.segment_files import OpenSegment
from acsgd.io.data.stream.segments import SegmentStart
from acsgd.io.files.fields import Natural

OPEN = 4
"""Number of segments that are kept open, if as many are not read at a time."""


@dataclass(frozen=True)
class StreamState:
    """What a checkpoint records of a streamed source: where to read on."""

    segment: Natural
    """Index of a segment, at or before the one that the next step trains on."""
    position: SegmentStart
    """Where it begins."""
    rows: Natural | None = None
    """Number of rows of the source; None if its end was not read yet."""


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
    seed, source: of the order, as of `order_key`; span: number of consecutive segments that are read at a time.
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
        self.notes = (f"data.sources: {name}: tokenized during training, shuffled within {window:,} sequences",)
        self.cache = cache
        self._version = version
        self._make = make
        self._window = window
        self._seed = seed
        self._source = source
        self._num_open = OPEN * span
        self._current: dict[tuple[int, int], _Current] = {}
        """Segments read last, by epoch and index."""

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts."""
        return (self._version,)

    def __len__(self) -> int:
        return 0

    def read(self, index: int, epoch: int = 0) -> Row:
        """Read the row with the number `index` in the run, counted from 0, waiting until it is tokenized."""
        place, current = self._locate(index)
        return current.rows.read(int(current.order[place]), current.epoch)

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
        """Stop to tokenize. wait: as of SegmentCache."""
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
        return current
