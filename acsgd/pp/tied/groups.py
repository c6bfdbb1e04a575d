"""Which rows of a table travel in which message: those that the first micro-batches need first.

M micro-batches of a replica; n = rows that they use, each once; G groups of consecutive micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.pp.schedules.actions import Action
from acsgd.pp.schedules.rows import MAX_GROUPS


class UseOrder(NamedTuple):
    """When the stages of a rank that look up rows of a table run each micro-batch."""

    starts: tuple[int, ...]
    """By micro-batch, its position in the order of the first forward."""
    ends: tuple[int, ...]
    """By micro-batch, its position in the order of the last backward."""
    last_actions: dict[Action, int]
    """Last backward of each micro-batch, with its position."""

    @classmethod
    def of(cls, actions: Sequence[Action], stages: Collection[int]) -> UseOrder:
        """Return the order of a step. actions: of the rank, in training; stages: those that look up rows."""
        own = [action for action in actions if action.stage in stages and action.is_compute]
        first = list(dict.fromkeys(action.micro for action in own))
        completing = [action for action in own if action.operation.completes]
        last = {action.micro: action for action in completing}
        ordered = sorted(last.values(), key=completing.index)
        ends = {action.micro: position for position, action in enumerate(ordered)}
        starts = {micro: position for position, micro in enumerate(first)}
        micros = range(len(first))
        return cls(
            tuple(starts[micro] for micro in micros),
            tuple(ends[micro] for micro in micros),
            {action: ends[action.micro] for action in ordered},
        )


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
    """The rows that a batch uses, and when."""

    ids: Tensor
    """int64 [n]: their indices in the table, by group of the first use."""
    by_end: Tensor
    """int64 [n]: their positions in `ids`, by group of the last use."""
    parts: list[RowGroup]
    """Messages of rows, in the order of `ids`."""
    end_parts: list[RowGroup]
    """Messages of gradients, in the order of `by_end`."""

    @classmethod
    def pack(cls, tokens: Tensor, order: UseOrder, width: int) -> Tensor:
        """Return the request for the rows of a batch, int64 [n]: index, and groups of the first and the last use.

        tokens: [M, tokens of a micro-batch]; width: micro-batches per group.
        """
        ids, inverse = tokens.unique(return_inverse=True)
        starts, ends = (torch.tensor(each, device=ids.device) // width for each in (order.starts, order.ends))
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
