"""Which rows of a table travel in which message: those that the first micro-batches need first.

M micro-batches of a replica; n = rows that they use, each once; G groups of consecutive micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.pp.schedules.rows import MAX_GROUPS, UseOrder


class MicroGroups(NamedTuple):
    """The groups of the micro-batches of a step, in the order in which a stage uses their rows."""

    first: list[int]
    """By micro-batch, its group in the order of the forwards."""
    last: list[int]
    """By micro-batch, its group in the order in which micro-batches are completed."""
    completed: dict[int, int]
    """By the micro-batch that completes it, each of the latter groups."""

    @classmethod
    def of(cls, order: UseOrder, width: int) -> MicroGroups:
        """Return the groups of `width` micro-batches each."""
        micros = range(len(order.first))
        first, last = ([each.index(micro) // width for micro in micros] for each in order)
        return cls(first, last, {micro: last[micro] for micro in (*order.last[width - 1 :: width], order.last[-1])})


class RowGroup(NamedTuple):
    """Rows of one message."""

    group: int
    """Number of groups of micro-batches before that which needs the rows first, or uses them last."""
    rows: slice
    """In the order of messages."""

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start


class RowGroups(NamedTuple):
    """The rows that a batch uses, and when. All of its tensors are in host memory."""

    ids: Tensor
    """int64 [n]: their indices in the table, by group of the first use."""
    by_end: Tensor
    """int64 [n]: their positions in `ids`, by group of the last use."""
    parts: list[RowGroup]
    """Messages of rows, in the order of `ids`."""
    end_parts: list[RowGroup]
    """Messages of gradients, in the order of `by_end`."""

    @classmethod
    def pack(cls, tokens: Tensor, micros: MicroGroups) -> Tensor:
        """Return the request for the rows of a batch, int64 [n]: index, and groups of the first and the last use.

        tokens: [M, tokens of a micro-batch].
        """
        ids, inverse = tokens.unique(return_inverse=True)
        starts, ends = (torch.tensor(each, device=ids.device) for each in (micros.first, micros.last))
        flat = inverse.flatten()
        first, last = (x[:, None].expand_as(inverse).flatten() for x in (starts, ends))
        first = torch.full_like(ids, MAX_GROUPS).scatter_reduce(0, flat, first, "amin")
        last = torch.full_like(ids, -1).scatter_reduce(0, flat, last, "amax")
        by_start = first.argsort(stable=True)
        return (first << 48 | last << 32 | ids)[by_start]

    @classmethod
    def unpack(cls, request: Tensor) -> RowGroups:
        """Return the rows of a request."""
        first, last, ids = request >> 48, (request >> 32) & 0xFFFF, request & 0xFFFFFFFF
        by_end = last.argsort(stable=True)
        return cls(ids, by_end, _parts(first), _parts(last[by_end]))


def _parts(groups: Tensor) -> list[RowGroup]:
    """Return the messages of rows whose groups are given in ascending order."""
    found, sizes = (each.tolist() for each in groups.unique_consecutive(return_counts=True))
    parts, start = [], 0
    for group, size in zip(found, sizes, strict=True):
        parts.append(RowGroup(group, slice(start, start + size)))
        start += size
    return parts
