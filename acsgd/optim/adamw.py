"""AdamW on the fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.codecs.bits import block_size
from acsgd.config.options import OptimConfig
from acsgd.optim.base import Capability, LocalStep, SecondMoments
from acsgd.optim.torch_optimizer import TorchOptimizer
from acsgd.shards.weights import StateTensor, Weight

SMALLEST = 1e-37
"""Smallest product of gradients that counts: smaller ones have fewer bits."""


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        ("second_moments", "no_momentum", "frozen_second_moments", "elementwise")
    )
    averages: ClassVar[bool] = False
    states: ClassVar[tuple[StateTensor, ...]] = (
        StateTensor("step", shape=lambda weight: (), non_negative=True),
        StateTensor("exp_avg"),
        StateTensor("exp_avg_sq", non_negative=True),
    )

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> AdamWOptimizer:
        """Return the optimizer of these weights."""
        return AdamWOptimizer(weights, config)


class AdamWOptimizer(TorchOptimizer):
    """AdamW over one rank's weights."""

    def __init__(self, weights: Sequence[Weight], config: OptimConfig) -> None:
        super().__init__(
            weights,
            config,
            lambda groups: torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True),
        )
        self._keys = {weight.master: weight.key for weight in weights}

    def _update(self, step: int, rate: float, how: LocalStep) -> None:
        for group in self._optimizer.param_groups:
            group["betas"] = (self._config.betas[0] if how.momentum else 0.0, self._config.betas[1])
        if how.frozen and any(self._optimizer.state.values()):  # all steps so far may have been skipped
            self._update_frozen(step, rate, how.replicas)
            return
        if how.shares:
            self._subtract_rest(how.shares)
        self._optimizer.step()

    @torch.no_grad()
    def _subtract_rest(self, shares: Mapping[str, Tensor]) -> None:
        """Subtract from second moments what the next step adds beyond the shares of the squared gradients.

        So a step with shares takes the fused kernel, and one pass more. The second moments after it are those of the
        shares, and not negative: products that would be rounded to less than 24 bits count as 0.
        """
        for group in self._optimizer.param_groups:
            beta2 = group["betas"][1]
            for master in group["params"]:
                state = self._optimizer.state[master]
                if master.grad is None or not master.numel():
                    continue
                if not state:
                    state["step"] = torch.zeros((), device=master.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
                rests = (1 - shares[self._keys[master]]).mul_((1 - beta2) / beta2).unsqueeze(1)
                rows = len(rests)
                size = max(1, block_size(master.device) * rows // master.numel())
                tensors = rests, master.grad.view(rows, -1), state["exp_avg_sq"].view(rows, -1)
                for rest, grad, second in zip(*(x.split(size) for x in tensors), strict=True):
                    second.sub_(torch.threshold_((grad * rest).mul_(grad), SMALLEST, 0.0))

    @torch.no_grad()
    def _update_frozen(self, step: int, rate: float, replicas: int) -> None:
        """Update the masters with frozen second moments and step count.

        Frozen second moments are lower bounds. An element without a gradient before the freeze, such as one of the
        embedding of a rare token, has 0 or nearly 0, and its step would be momentum / eps: thousands of times too long.
        So each second moment grows to what AdamW would have if the present gradient were the first of its element and
        the other replicas had none, as is usual for a rare token. Other elements are rarely affected: their gradient
        would have to exceed `replicas` times the root of the sum of all earlier squares.
        """
        for group in self._optimizer.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for master in group["params"]:
                state = self._optimizer.state[master]
                if master.grad is None or not state:
                    continue
                # counts stay on the device, so that nothing waits for it, in fp64, since fp32 rounds 1 - .999
                count = state["step"].double()
                bias = 1 - beta2**count
                first = (1 - beta2) * bias / (1 - beta2 ** (step + 1)) / replicas**2
                correction = 1 - beta1 ** (step + 1)
                scale, eps = correction / bias.sqrt(), self._config.eps * correction
                tensors = master.detach(), master.grad, state["exp_avg"], state["exp_avg_sq"]
                blocks = zip(*(x.view(-1).split(block_size(x.device)) for x in tensors), strict=True)
                for weight, grad, average, second in blocks:  # a block stays in the CPU cache
                    average.lerp_(grad, 1 - beta1)
                    root = grad.square().mul_(first)
                    torch.maximum(second, root, out=second)
                    torch.sqrt(second, out=root).mul_(scale).add_(eps)
                    if decay:
                        weight.mul_(1 - rate * decay)
                    weight.addcdiv_(average, root, value=-rate)

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return the second moments of some weights, not copied."""
        states = {weight.key: self._optimizer.state.get(weight.master) for weight in weights}
        by_key = {key: state["exp_avg_sq"] for key, state in states.items() if state}
        return SecondMoments(by_key, self._config.betas[1])
