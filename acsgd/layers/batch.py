"""The batch of a step, which the loader makes and the pipeline trains on, and the lengths of its rows.

Shapes: M micro-batches of the replica, B sequences per micro-batch, T tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
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


@dataclass(frozen=True)
class Batch:
    """One replica's part of the global batch of a step, on the host."""

    inputs: Mapping[str, Tensor] | None
    """Inputs of the model by name, as the task declares them: {"input_ids": int64 [M, B, T]}, with DOCUMENTS where they
    are isolated, and PREFIXES where data.objective has them; None on stages that do not need them."""
    labels: Tensor | None
    """Labels as the task declares them: for language modelling the next token of each of the "input_ids", or IGNORED,
    int64 [M, B, T]; None on stages that do not need them."""
    sample_ids: Tensor
    """Sample ids, int64 [M, B]. A sequence has the same id in every epoch."""
    micro_ids: range
    """Indices of the micro-batches in the global batch."""
    upcoming_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Sample ids of the replica's next batch, int64 [M, B]; used to prefetch cache entries."""
    num_tokens: int = 0
    """Number of input tokens, without padding; 0 on stages that need neither inputs nor labels."""
    longest_rows: Sequence[Lengths] | None = None
    """Longest row of each micro-batch, without padding; None on stages that need neither inputs nor labels."""
    checksum: int = 0
    """Checksum of segments of streamed sources, equal on all ranks that read these; 0 on others, and without any."""
    wait_s: float = 0.0
    """Time for which training waited for the batch to be read, seconds."""
    upcoming: Batch | None = None
    """The batch of the next step; None at the end, and of a batch that is read alone."""
