"""Optimizers of torch over the weights of one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from acsgd.config.options import OptimConfig
from acsgd.optim.base import PLAIN_STEP, LocalStep, SecondMoments
from acsgd.optim.schedule import learning_rate
from acsgd.shards.weights import Weight, WeightState

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Returns an optimizer of parameter groups, which have a learning rate and a weight decay."""


class TorchOptimizer:
    """An optimizer of torch over one rank's masters. Norms and biases have no weight decay."""

    def __init__(self, weights: Sequence[Weight], config: OptimConfig, make: Make) -> None:
        self._config = config
        self._rounded = [weight for weight in weights if weight.master is not weight.param]
        matrices = [weight.master for weight in weights if weight.master.dim() > 1]
        vectors = [weight.master for weight in weights if weight.master.dim() <= 1]  # norms and biases
        groups = [
            {"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay},
            {"params": vectors, "lr": config.lr, "weight_decay": 0.0},
        ]
        # all may be frozen, or looked up on another rank
        self._optimizer = make([group for group in groups if group["params"]] or groups[:1])

    def step(self, step: int, how: LocalStep = PLAIN_STEP) -> None:
        """Update masters and parameters of step `step`, counted from 0, with the gradients of the masters."""
        rate = learning_rate(step, self._config)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._update(step, rate, how)
        if self._rounded:
            with torch.no_grad():
                torch._foreach_copy_([w.param for w in self._rounded], [w.master for w in self._rounded])

    def _update(self, step: int, rate: float, how: LocalStep) -> None:
        """Update the masters. The groups have the learning rate already."""
        self._optimizer.step()

    @torch.no_grad()
    def copy_trained(self, weight: Weight, out: Tensor) -> None:
        """Copy the values of the master."""
        out.copy_(weight.master)

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return no second moments."""
        return SecondMoments({}, 0.0)

    def state_of(self, weights: Sequence[Weight]) -> WeightState:
        """Return the state of some weights, not copied; empty before the first step."""
        state: WeightState = defaultdict(dict)
        for weight in weights:
            for name, tensor in self._optimizer.state[weight.master].items():
                if isinstance(tensor, Tensor):
                    state[name][weight.key] = tensor
        return dict(state)

    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        """Load a copy of what `state_of` returned for a weight of the same key."""
        self._optimizer.state[weight.master] = {
            # fused optimizers keep their step count where the weights are
            name: by_key[weight.key].to(weight.master.device, copy=True)
            for name, by_key in state.items()
            if weight.key in by_key
        }


@torch.no_grad()
def decay_(params: Sequence[Tensor], fraction: float) -> None:
    """Apply decoupled weight decay, in place, to the parameters that have a gradient.

    fraction: learning rate times weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).
    """
    updated = [param for param in params if param.grad is not None]
    if fraction and updated:
        torch._foreach_mul_(updated, 1 - fraction)
