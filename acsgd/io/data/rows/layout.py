"""Layouts: which part of which document lies in which row (data.rows = "pack" and "single").

A layout is a cache entry, made once per host and read from disk, since a corpus may have many documents:

    starts.npy     of each part, position of its first token in the corpus
    lengths.npy    of each part, number of tokens
    offsets.npy    of each row, its first part; and the number of parts
    targets.npy    of each row, number of its labels that are not ignored; empty if all rows have as many as fit
    about.json     "note" and "num_targets"
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from acsgd.io.data.row_spec import LongDocument
from acsgd.io.data.rows.base import count_targets
from acsgd.io.data.rows.objectives import CAUSAL, Objective, longest_part
from acsgd.io.data.sampler import Ints, shuffled
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.files.arrays import Array, ArrayFile, ArrayWriter
from acsgd.io.files.cache import open_cached
from acsgd.io.files.entry import Entry, seal

RowKind = Literal["pack", "single"]

ARRAYS = ("starts.npy", "lengths.npy", "offsets.npy")
TARGETS = "targets.npy"
ABOUT = "about.json"


class RowLayout(NamedTuple):
    """Parts of documents in the order of the rows."""

    starts: Array
    """Position of the first token of each part in the corpus."""
    lengths: Array
    """Number of input tokens of each part; one more token follows as the last label."""
    offsets: Array
    """Index of the first part of each row, and the number of parts."""
    note: str
    """Sentence on the number of rows and on padding."""
    num_targets: int
    """Number of labels of all rows that are not ignored."""
    targets: Array = np.empty(0, np.int64)
    """Number of those of each row; empty if each has some."""


def open_layout(path: Path, make: Callable[[], RowLayout], *, reports_wait: bool = True) -> RowLayout:
    """Return the layout in a cache entry. Called by every process of a host; one of them makes it.

    make: may raise ValueError; reports_wait: see `open_cached`.
    """

    def build(unfinished: Path) -> None:
        unfinished.mkdir()
        layout = make()
        arrays = (layout.starts, layout.lengths, layout.offsets, layout.targets)
        for name, values in zip((*ARRAYS, TARGETS), arrays, strict=True):
            with ArrayWriter(unfinished / name, np.dtype("<i8")) as file:
                file.append(values[:])
        (unfinished / ABOUT).write_text(json.dumps({"note": layout.note, "num_targets": layout.num_targets}))
        seal(unfinished)

    def open_built(path: Path) -> RowLayout:
        entry = Entry(path)
        starts, lengths, offsets, targets = arrays = [ArrayFile(entry, name) for name in (*ARRAYS, TARGETS)]
        for array in arrays:
            array.verify_sample()
        about = entry.file(ABOUT)
        return RowLayout(starts, lengths, offsets, **json.loads(about.read(0, about.size)), targets=targets)

    return open_cached(path, build, open_built, reports_wait=reports_wait)


def make_layout(
    corpus: Corpus, sequence: int, kind: RowKind, long: LongDocument, objective: Objective = CAUSAL
) -> RowLayout:
    """Divide the documents of a corpus among rows of at most `sequence` tokens, as an objective makes them of parts.

    A document of n tokens has n - 1 inputs, each with the next token as label; one without any is left out. kind:
    "pack" puts documents together, best-fit decreasing, and shuffles the rows, so that those at the end are not all of
    one kind; "single" puts one document in a row, in order. long: what is done with a document that is longer than a
    row. Raises ValueError if there is no row, or if `long` is "error" and a document is longer.
    """
    starts, lengths, num_long = parts_of(corpus, sequence, long, objective)
    if not len(starts):
        raise ValueError(
            f"data.rows={kind}: no document of {corpus.name} has at least 2 tokens and fits into a row of "
            f"data.sequence={sequence}; use another source, or data.long=split"
        )
    offsets = np.arange(len(starts) + 1)
    if kind == "pack":
        rows = best_fit(objective.sizes(lengths), sequence)
        rows = shuffled(rows, int(rows.max()) + 1, np.zeros(len(rows), np.uint64))
        starts, lengths, offsets = by_row(starts, lengths, rows)
    targets = targets_of_rows(corpus, starts, lengths, offsets)
    num_targets = int(targets.sum() if len(targets) else round(float(objective.learned(lengths).sum())))
    note = _describe(corpus, sequence, kind, long, objective.mean_sizes(lengths), len(offsets) - 1, num_long)
    if kind == "pack" and len(starts) == len(offsets) - 1:
        note += "; no row has two of them: data.isolate and data.rows=pack have no effect, give a longer data.sequence"
    return RowLayout(starts, lengths, offsets, note, num_targets, targets)


def targets_of_rows(corpus: Corpus, starts: Ints, lengths: Ints, offsets: Ints) -> Ints:
    """Return the number of labels of each row that are not ignored; nothing if all tokens are targets.

    starts, lengths, offsets: see RowLayout.
    """
    if corpus.targets is None:
        return np.empty(0, np.int64)
    order, counts = np.argsort(starts, kind="stable"), np.empty(len(starts), np.int64)
    counts[order] = count_targets(corpus, starts[order], lengths[order])
    return np.add.reduceat(counts, offsets[:-1])


def parts_of(corpus: Corpus, sequence: int, long: LongDocument, objective: Objective) -> tuple[Ints, Ints, int]:
    """Return first token and number of inputs of each part of a document, in order, and the number of long documents.

    long: see `make_layout`. Raises ValueError if it is "error" and a document is longer than a row.
    """
    starts, stops = corpus.spans()
    lengths = stops - starts - 1
    longest = longest_part(objective, sequence)
    is_long = lengths > longest
    if long == "error" and is_long.any():
        first = int(np.argmax(is_long))
        raise ValueError(
            f"data.long=error: document {first + 1} of {corpus.name} has {stops[first] - starts[first]} tokens, but a "
            f"row of data.sequence={sequence} takes at most {longest} + 1; use a longer data.sequence, or "
            "data.long=split, truncate or skip"
        )
    kept = lengths > 0
    if long == "skip":
        kept &= ~is_long
    starts, lengths = starts[kept], lengths[kept]
    if long == "truncate":
        lengths = np.minimum(lengths, longest)
    elif long == "split":
        starts, lengths = _split(starts, lengths, longest)
    return starts, lengths, int(is_long.sum())


def by_row(starts: Ints, lengths: Ints, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Return parts in the order of their rows, and the first part of each row with the number of parts at the end."""
    order = np.argsort(rows, kind="stable")
    return starts[order], lengths[order], np.concatenate([[0], np.cumsum(np.bincount(rows))])


def _split(starts: Ints, lengths: Ints, longest: int) -> tuple[Ints, Ints]:
    """Cut documents into parts of at most `longest` inputs. So every token but the first stays a label."""
    counts = -(-lengths // longest)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    before = (np.arange(len(first)) - first) * longest
    return np.repeat(starts, counts) + before, np.minimum(np.repeat(lengths, counts) - before, longest)


def _describe(
    corpus: Corpus,
    sequence: int,
    kind: RowKind,
    long: LongDocument,
    sizes: NDArray[np.float64],
    num_rows: int,
    num_long: int,
) -> str:
    done = {"split": "split", "truncate": "truncated", "skip": "left out"}
    padding = 1 - sizes.sum() / (num_rows * sequence)
    cut = f"; longer than a row and {done[long]}: {num_long:,}" if num_long else ""
    return (
        f"rows: {corpus.name}: {len(corpus.offsets) - 1:,} documents in {num_rows:,} rows of {sequence} tokens "
        f"(data.rows={kind}), {padding:.2%} padding{cut}"
    )


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """Return the row of each document, rows numbered from 0: at most `capacity` tokens each.

    Best-fit decreasing bin packing (Johnson 1974), for rows of whole documents as in "Fewer Truncations Improve
    Language Modeling" (Ding et al. 2024, arXiv:2404.10830). Documents are placed from the longest to the shortest, each
    in the row with the least free space that is enough. Documents of one length, and rows of one free space, are
    handled together: O(n log n) for n documents, whose constant is that of a sort. lengths: at least 1, at most
    `capacity`.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    rows, num_rows = _OpenRows(), 0
    placed: list[Ints] = [np.empty(0, np.int64)]
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            free, found = rows.take(size)
            if not len(found):
                free, found = capacity, np.arange(num_rows, num_rows - (-count // (capacity // size)))
                num_rows += len(found)
            each = free // size  # after one more document, a row is still the best fit
            full = found[: count // each]
            rest = count % each if len(full) < len(found) else 0
            partial = found[len(full) : len(full) + (rest > 0)]
            placed += [np.repeat(full, each), np.repeat(partial, rest)]
            rows.add(free - each * size, full)
            rows.add(free - rest * size, partial)
            rows.add(free, found[len(full) + len(partial) :])
            count -= len(full) * each + rest
    result = np.empty_like(lengths)
    result[order] = np.concatenate(placed)
    return result


class _OpenRows:
    """Rows by free space."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Ints]] = {}
        self._frees: list[int] = []
        """Keys of the rows, sorted."""

    def add(self, free: int, rows: Ints) -> None:
        """Add rows with a free space."""
        if free and len(rows):
            if free not in self._rows:
                insort(self._frees, free)
            self._rows.setdefault(free, []).append(rows)

    def take(self, size: int) -> tuple[int, Ints]:
        """Remove and return the rows with the least free space that is enough; no rows if there are none."""
        index = bisect_left(self._frees, size)
        if index == len(self._frees):
            return 0, np.empty(0, np.int64)
        free = self._frees.pop(index)
        return free, np.concatenate(self._rows.pop(free))
