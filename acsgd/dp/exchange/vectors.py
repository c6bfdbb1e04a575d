"""Vectors without a tensor of their length: sparse ones, and updates that are computed where they are read.

An exchange changes no state, since its step may be dropped after it. A tensor of all that it computes from this state
would need memory, which on a CPU takes longer to get from the system than to fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.bits import block_size
from acsgd.codecs.message import PackedCodec


class SparseVector(NamedTuple):
    """A vector [n], fp32, of which all elements but k are 0."""

    n: int
    positions: Tensor
    """Ascending positions of these elements, int64 [k]."""
    values: Tensor
    """fp32 [k]."""


class CodedVector(NamedTuple):
    """A vector [n] as a message, which is decoded in blocks where it is read."""

    n: int
    codec: PackedCodec
    message: Tensor

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of elements, and their values, fp32, which may be overwritten."""
        return self.codec.decoded_blocks(self.message, self.n)


class CodedVectors(NamedTuple):
    """A vector [n] as messages of its parts."""

    parts: Sequence[CodedVector]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of elements, and their values, fp32, which may be overwritten."""
        start = 0
        for part in self.parts:
            for block, values in part.blocks():
                yield slice(start + block.start, start + block.stop), values
            start += part.n


Vector = Tensor | SparseVector | CodedVectors


def add_to(x: Tensor, added: Vector | CodedVector, alpha: float = 1) -> None:
    """Add `alpha` times a vector [n] to another one, in place."""
    if isinstance(added, SparseVector):
        x.index_add_(0, added.positions, added.values, alpha=alpha)
    elif isinstance(added, Tensor):
        x.add_(added, alpha=alpha)
    else:
        for block, values in added.blocks():
            x[block].add_(values, alpha=alpha)


def dense(x: Vector) -> Tensor:
    """Return a vector [n] as a tensor."""
    if isinstance(x, SparseVector):
        return x.values.new_zeros(x.n).index_copy_(0, x.positions, x.values)
    if isinstance(x, CodedVectors):
        return torch.cat([part.codec.decode(part.message, part.n) for part in x.parts])
    return x


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
