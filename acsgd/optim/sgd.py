from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from acsgd.config.options import OptimConfig
from acsgd.config.ranges import Range
from acsgd.optim.base import Capability, LocalStep
from acsgd.optim.torch_optimizer import TorchOptimizer, decay_
from acsgd.shards.weights import StateTensor, Weight

DECOUPLED = "decoupled_weight_decay"
"""Name in a parameter group."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum and decoupled weight decay (Loshchilov and Hutter 2019,
    arXiv:1711.05101, algorithm 1)."""

    momentum: Annotated[float, Range(0, 1, below=True)] = 0.9
    """Decay rate of the sum of gradients that is subtracted from the weights. 0 = no momentum, no state."""
    nesterov: bool = False
    """Whether the gradient is taken ahead of the momentum (Nesterov 1983)."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset(("elementwise",))
    averages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true needs a momentum above 0")

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (StateTensor("momentum_buffer"),) if self.momentum else ()

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> SGDOptimizer:
        """Return the optimizer of these weights."""
        return SGDOptimizer(weights, config, self)


class SGDOptimizer(TorchOptimizer):
    """SGD over one rank's weights."""

    def __init__(self, weights: Sequence[Weight], config: OptimConfig, options: SGD) -> None:
        def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            # torch's weight decay would be added to the gradient, and so to the momentum
            groups = [{**group, "weight_decay": 0.0, DECOUPLED: group["weight_decay"]} for group in groups]
            return torch.optim.SGD(groups, momentum=options.momentum, nesterov=options.nesterov)

        super().__init__(weights, config, make)

    def _update(self, step: int, rate: float, how: LocalStep) -> None:
        for group in self._optimizer.param_groups:
            decay_(group["params"], rate * group[DECOUPLED])
        self._optimizer.step()
