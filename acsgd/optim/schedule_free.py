from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from acsgd.codecs.bits import block_size, in_blocks
from acsgd.config.options import OptimConfig
from acsgd.optim.base import Capability
from acsgd.optim.torch_optimizer import TorchOptimizer
from acsgd.shards.weights import StateTensor, Weight


@dataclass(frozen=True)
class ScheduleFreeAdamW:
    """AdamW with averaged weights in place of a learning-rate schedule (Defazio et al. 2024, arXiv:2405.15682,
    algorithm 1).

    Adam's steps without momentum change z. The masters are x, the average of all z, each with the square of its
    learning rate. Forward and backward use y = (1 - beta_1) z + beta_1 x; evaluations and checkpoints have x.
    Decoupled weight decay is that of y.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset(("elementwise",))
    averages: ClassVar[bool] = True
    states: ClassVar[tuple[StateTensor, ...]] = (
        StateTensor("step", shape=lambda weight: (), non_negative=True),
        StateTensor("rate_sum", shape=lambda weight: (), non_negative=True),
        StateTensor("z"),
        StateTensor("exp_avg_sq", non_negative=True),
    )

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> ScheduleFreeOptimizer:
        """Return the optimizer of these weights."""
        return ScheduleFreeOptimizer(weights, config)


class ScheduleFreeOptimizer(TorchOptimizer):
    """Schedule-free AdamW over one rank's masters. Sets no parameters."""

    def __init__(self, weights: Sequence[Weight], config: OptimConfig) -> None:
        weights = [weight._replace(param=weight.master) for weight in weights]
        super().__init__(weights, config, lambda groups: _ScheduleFree(groups, config))

    @torch.no_grad()
    def copy_trained(self, weight: Weight, out: Tensor) -> None:
        """Copy y, which before the first step is x."""
        average = weight.master.detach()
        if not (state := self._optimizer.state.get(weight.master)):
            out.copy_(average)
            return
        for x, z, y in _blocks(average, state["z"], out):
            y.copy_(torch.lerp(x, z, 1 - self._config.betas[0]))


class _ScheduleFree(torch.optim.Optimizer):
    """Steps of `ScheduleFreeAdamW` for averages x."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, {})
        self._betas, self._eps = config.betas, config.eps

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's takes a closure
        """Update all averages that have a gradient."""
        for group in self.param_groups:
            for average in group["params"]:
                if average.grad is not None:
                    self._update(average, group["lr"], group["weight_decay"])

    def _update(self, average: Tensor, rate: float, decay: float) -> None:
        assert average.grad is not None
        state, (beta1, beta2) = self.state[average], self._betas
        if not state:
            state["step"], state["rate_sum"] = (torch.zeros((), device=average.device) for _ in range(2))
            state["z"], state["exp_avg_sq"] = average.clone(), torch.zeros_like(average)
        # counts and sums stay on the device, so that nothing waits for it
        state["step"] += 1
        state["rate_sum"] += rate**2
        share = rate**2 / state["rate_sum"].clamp_min(torch.finfo(torch.float32).tiny)  # rates may be 0 at the start
        scale = (1 - beta2 ** state["step"].double()).rsqrt().float()  # fp32 rounds 1 - .999
        for x, grad, z, second in _blocks(average, average.grad, state["z"], state["exp_avg_sq"]):
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            if decay:  # of y
                z.mul_(1 - rate * decay * (1 - beta1)).add_(x, alpha=-rate * decay * beta1)
            z.addcdiv_(grad, torch.sqrt(second).mul_(scale).add_(self._eps), value=-rate)
            x.lerp_(z, share)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Divide tensors of one size into blocks, of which those of all tensors stay in the cache of a CPU."""
    return in_blocks(block_size(tensors[0].device) // len(tensors), *(tensor.view(-1) for tensor in tensors))
