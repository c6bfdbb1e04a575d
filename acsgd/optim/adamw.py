"""AdamW on the fp32 masters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.codecs.bits import block_size
from acsgd.config.options import OptimConfig
from acsgd.optim.base import Capability, LocalStep, SecondMoments
from acsgd.optim.torch_optimizer import TorchOptimizer
from acsgd.shards.weights import StateTensor, Weight


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        ("second_moments", "no_momentum", "frozen_second_moments", "elementwise")
    )
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
        frozen = how.frozen and any(self._optimizer.state.values())  # all steps so far may have been skipped
        if frozen or how.shares:
            self._update_variant(step, rate, how, frozen=frozen)
        else:
            self._optimizer.step()

    @torch.no_grad()
    def _update_variant(self, step: int, rate: float, how: LocalStep, *, frozen: bool) -> None:
        """Update the masters with frozen second moments and step count, or with those that accumulate shares.

        Frozen second moments are lower bounds. An element without a gradient before the freeze, such as one of the
        embedding of a rare token, has 0 or nearly 0, and its step would be momentum / eps: thousands of times too long.
        So each second moment grows to what AdamW would have if the present gradient were the first of its element and
        the other replicas had none, as is usual for a rare token. Other elements are rarely affected: their gradient
        would have to exceed `replicas` times the root of the sum of all earlier squares.
        """
        for group in self._optimizer.param_groups:
            beta1, beta2 = group["betas"]
            for master in group["params"]:
                state = self._optimizer.state[master]
                if master.grad is None or (frozen and not state):
                    continue
                if not state:
                    state["step"] = torch.zeros((), device=master.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
                if not frozen:
                    state["step"] += 1
                # counts stay on the device, so that nothing waits for it, in fp64, since fp32 rounds 1 - .999
                count = state["step"].double()
                first = (1 - beta2) * (1 - beta2**count) / (1 - beta2 ** (step + 1)) / how.replicas**2
                correction = 1 - beta1 ** (step + 1 if frozen else count)
                shares = None if frozen else how.shares[self._keys[master]]
                for weight, grad, average, second, share in _blocks(master, state, shares):
                    average.lerp_(grad, 1 - beta1)
                    if share is None:
                        torch.maximum(second, grad.square().mul_(first), out=second)
                    else:
                        second.lerp_((grad * share).mul_(grad), 1 - beta2)
                    root = denominator(second, beta2, count, self._config.eps)
                    weight.mul_(1 - rate * group["weight_decay"])
                    weight.addcdiv_(average, root.mul_(correction), value=-rate)

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return the second moments of some weights, not copied."""
        states = {weight.key: self._optimizer.state.get(weight.master) for weight in weights}
        by_key = {key: state["exp_avg_sq"] for key, state in states.items() if state}
        return SecondMoments(by_key, self._config.betas[1])


def _blocks(
    master: Tensor, state: Mapping[str, Tensor], shares: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]:
    """Split a master, its gradient, its moments and the shares of its rows [rows] into blocks: [n, width], and [n, 1].

    A block stays in the CPU cache. Without shares, n is a number of elements.
    """
    assert master.grad is not None
    rows = master.numel() if shares is None else len(shares)
    if not master.numel():
        return
    tensors = (x.view(rows, -1) for x in (master.detach(), master.grad, state["exp_avg"], state["exp_avg_sq"]))
    size = max(1, block_size(master.device) * rows // master.numel())
    split = zip(*(x.split(size) for x in tensors), strict=True)
    of_rows = itertools.repeat(None) if shares is None else shares.unsqueeze(1).split(size)
    for (weight, grad, average, second), share in zip(split, of_rows, strict=False):
        yield weight, grad, average, second, share


def denominator(second_moment: Tensor, beta2: float, steps: int | Tensor, eps: float) -> Tensor:
    """Return sqrt(bias-corrected second moment) + eps, a new tensor. steps: number of gradients accumulated in it."""
    return (second_moment / (1 - beta2**steps)).sqrt_().add_(eps)
