from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from acsgd.config.options import OptimConfig
from acsgd.config.ranges import Range
from acsgd.optim.base import Capability
from acsgd.optim.torch_optimizer import TorchOptimizer, decay_
from acsgd.shards.weights import StateTensor, Weight


@dataclass(frozen=True)
class Lion:
    """Sign of an interpolation of momentum and gradient (Chen et al. 2023, arXiv:2302.06675, algorithm 2).

    Half the state of AdamW. Its steps are longer: 3 to 10 times smaller optim.lr, and as many times larger
    optim.weight_decay (section 5 of the paper).
    """

    beta1: Annotated[float, Range(0, 1, below=True)] = 0.9
    """Share of the momentum in the interpolation."""
    beta2: Annotated[float, Range(0, 1, below=True)] = 0.99
    """Decay rate of the momentum."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset(("elementwise",))
    averages: ClassVar[bool] = False
    states: ClassVar[tuple[StateTensor, ...]] = (StateTensor("exp_avg"),)

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> TorchOptimizer:
        """Return the optimizer of these weights."""
        return TorchOptimizer(weights, config, lambda groups: LionOptimizer(groups, self))


class LionOptimizer(torch.optim.Optimizer):
    """Lion, which torch does not have."""

    def __init__(self, groups: list[dict[str, Any]], options: Lion) -> None:
        super().__init__(groups, {})
        self._options = options

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's takes a closure
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            decay_(group["params"], group["lr"] * group["weight_decay"])
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            grads = [param.grad for param in params]
            momenta = [self._momentum(param) for param in params]
            updates = torch._foreach_lerp(momenta, grads, 1 - self._options.beta1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(params, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1 - self._options.beta2)

    def _momentum(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        momentum: torch.Tensor = state["exp_avg"]
        return momentum
