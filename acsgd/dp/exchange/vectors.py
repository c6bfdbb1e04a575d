"""Vectors without a tensor of their length: sparse ones, and updates that are computed where they are read.

An exchange changes no state, since its step may be dropped after it. A tensor of all that it computes from this state
would need memory that takes longer to get from the system than to fill.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.bits import block_size


class SparseVector(NamedTuple):
    """A vector [n], fp32, of which all elements but k are 0."""

    n: int
    positions: Tensor
    """Ascending positions of these elements, int64 [k]."""
    values: Tensor
    """fp32 [k]."""


def add_to(x: Tensor, added: Tensor | SparseVector, alpha: float = 1) -> None:
    """Add `alpha` times a vector [n] to another one, in place."""
    if isinstance(added, SparseVector):
        _, positions, values = added
        x.index_copy_(0, positions, x.index_select(0, positions).add_(values, alpha=alpha))
    else:
        x.add_(added, alpha=alpha)


def dense(x: Tensor | SparseVector) -> Tensor:
    """Return a vector [n] as a tensor."""
    return x if isinstance(x, Tensor) else x.values.new_zeros(x.n).index_copy_(0, x.positions, x.values)


class UpdateSum:
    """An update, local - shared, plus what messages have omitted of earlier ones: [n], computed where it is read."""

    def __init__(self, local: Tensor, shared: Tensor, residual: Tensor) -> None:
        self._local = local
        self._shared = shared
        self.residual = residual
        self.sent: SparseVector | None = None
        """What the message of the sum decodes to."""

    @property
    def device(self) -> torch.device:
        return self.residual.device

    def __len__(self) -> int:
        return len(self.residual)

    def __getitem__(self, index: slice) -> Tensor:
        """Return elements of the sum, fp32, a new tensor."""
        return (self._local[index] - self._shared[index]).add_(self.residual[index])

    def store_residual(self) -> None:
        """Replace the residual, in place, by the sum without what was sent."""
        size = block_size(self.device)
        blocks = (x.split(size) for x in (self._local, self._shared, self.residual))
        for local, shared, residual in zip(*blocks, strict=True):
            residual.add_(local - shared)
        if self.sent is not None:
            add_to(self.residual, self.sent, -1)
