"""Lengths of the rows of a micro-batch, and tensors that are cut to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from acsgd.layers.description import BATCH

MULTIPLE = 8
"""Lengths are rounded up to a multiple of this, since matrix units compute whole tiles."""


class Lengths(NamedTuple):
    """Tokens per row of a micro-batch, named by the symbols of shapes."""

    sequence: int
    """Of the inputs; of an encoder-decoder, of those of its encoder."""
    target: int = 0
    """Of the inputs of a decoder after an encoder; 0 = the model has none."""

    def rounded_up(self, full: Lengths) -> Lengths:
        """Return the lengths, rounded up to a multiple of MULTIPLE, at least one and at most those of `full`."""
        return Lengths(
            *(
                min(limit, max(MULTIPLE, -(-length // MULTIPLE) * MULTIPLE))
                for length, limit in zip(self, full, strict=True)
            )
        )


def longest(rows: Iterable[Lengths]) -> Lengths:
    """Return the lengths that rows have room in."""
    return Lengths(*map(max, zip(*rows, strict=True)))


def cut(x: Tensor, sizes: Sequence[str], lengths: Lengths) -> Tensor:
    """Return a tensor without what lies behind `lengths`, contiguous. sizes: symbols of its axes."""
    return x[tuple(slice(None if size == BATCH else getattr(lengths, size)) for size in sizes)].contiguous()
