from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from acsgd.config.options import OptimConfig
from acsgd.config.ranges import Range
from acsgd.optim.base import Capability
from acsgd.optim.torch_optimizer import TorchOptimizer
from acsgd.shards.weights import StateTensor, Weight


def _row_shape(weight: Tensor) -> tuple[int, ...] | None:
    return (*weight.shape[:-1], 1) if weight.dim() > 1 else None


def _column_shape(weight: Tensor) -> tuple[int, ...] | None:
    return (*weight.shape[:-2], 1, weight.shape[-1]) if weight.dim() > 1 else None


def _vector_shape(weight: Tensor) -> tuple[int, ...] | None:
    return None if weight.dim() > 1 else tuple(weight.shape)


@dataclass(frozen=True)
class Adafactor:
    """Second moments of a matrix as row and column means (Shazeer and Stern 2018, arXiv:1804.04235); torch's own.

    Nearly no state, no momentum. The step of a weight is min(learning rate, 1 / sqrt(step)) times the root mean square
    of the weight, so optim.lr is relative: 0.01 is usual.
    """

    decay: Annotated[float, Range(-1, 0, above=True)] = -0.8
    """Exponent of the step number in the decay rate of second moments, 1 - step**decay."""
    clip: Annotated[float, Range(1, 10**6)] = 1.0
    """Largest root mean square of the update of a weight, before it is multiplied by the step."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    states: ClassVar[tuple[StateTensor, ...]] = (
        StateTensor("step", shape=lambda weight: (), non_negative=True),
        StateTensor("row_var", _row_shape, non_negative=True),
        StateTensor("col_var", _column_shape, non_negative=True),
        StateTensor("variance", _vector_shape, non_negative=True),
    )

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> TorchOptimizer:
        """Return the optimizer of these weights."""
        return TorchOptimizer(
            weights, config, lambda groups: torch.optim.Adafactor(groups, beta2_decay=self.decay, d=self.clip)
        )
