"""Best-fit decreasing bin packing (Johnson 1974), for rows of whole documents as in "Fewer Truncations Improve Language
Modeling" (Ding et al. 2024, arXiv:2404.10830)."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from acsgd.io.data.sampler import Ints


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """Return the row of each document, rows numbered from 0: at most `capacity` tokens each.

    Documents are placed from the longest to the shortest, each in the row with the least free space that is enough.
    Documents of one length, and rows of one free space, are handled together: O(n log n) for n documents, whose
    constant is that of a sort. lengths: at least 1, at most `capacity`.
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
