"""The batch of a step, which the loader makes and the pipeline trains on.

Shapes: M micro-batches of the replica, B sequences per micro-batch, T tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from acsgd.layers.lengths import Lengths


@dataclass(frozen=True)
class Batch:
    """One replica's part of the global batch of a step. Created on the host."""

    inputs: Mapping[str, Tensor] | None
    """Inputs of the model by name, as the task declares them: {"input_ids": int64 [M, B, T]}, with DOCUMENTS where they
    are isolated, and PREFIXES where data.objective has them; None on stages that do not need them."""
    labels: Tensor | None
    """Labels as the task declares them: for language modelling the next token of each of the "input_ids", or IGNORED,
    int64 [M, B, T]; None on stages that do not need them."""
    sample_ids: Tensor
    """Sample ids, int64 [M, B], always on the host. A sequence has the same id in every epoch."""
    micro_ids: range
    """Indices of the micro-batches in the global batch."""
    upcoming_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Sample ids of the replica's next batch, int64 [M, B], on the host; used to prefetch cache entries."""
    num_tokens: int = 0
    """Number of input tokens, without padding; 0 on stages that need neither inputs nor labels."""
    longest_rows: Sequence[Lengths] | None = None
    """Longest row of each micro-batch, without padding; None on stages that need neither inputs nor labels."""
    checksum: int = 0
    """Checksum of segments of streamed sources, equal on all ranks that read these; 0 on others, and without any."""
    wait_s: float = 0.0
    """Time for which training waited for the batch to be read, seconds."""
    upcoming: Batch | None = None
    """The batch of the next step, always on the host; None at the end, and of a batch that is read alone."""

    def to(self, device: torch.device) -> Batch:
        """Return the batch with inputs and labels on `device`."""
        inputs = None if self.inputs is None else {name: x.to(device) for name, x in self.inputs.items()}
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, inputs=inputs, labels=labels)
