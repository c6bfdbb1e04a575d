"""Rows of the segments of streamed sources: a fixed number of rows from the first tokens at hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from acsgd.io.data.rows.best_fit import best_fit
from acsgd.io.data.rows.layout import ARRAYS, LongDocument, RowKind, RowLayout, by_row, parts_of
from acsgd.io.data.rows.objectives import Objective
from acsgd.io.data.sampler import Ints
from acsgd.io.data.stream.segments import Cutter, SegmentCut
from acsgd.io.data.tokens.tokens import Corpus
from acsgd.io.files.arrays import Array


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
    """Return the cutter of rows of whole documents. Arguments as of `make_layout`; "pack" packs each segment alone."""

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


def layout_of(arrays: Mapping[str, Array]) -> RowLayout:
    """Return the layout of a segment from the arrays of its Cut."""
    starts, lengths, offsets = (arrays[name] for name in ARRAYS)
    return RowLayout(starts, lengths, offsets, note="", num_targets=0)
