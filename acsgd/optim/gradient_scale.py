"""Scaling of gradients: clipping by the global norm, the fp16 loss scale, and the division by the target tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from acsgd.config.options import Config
from acsgd.errors import NonFiniteError
from acsgd.io.files.fields import Natural, Positive
from acsgd.shards.weights import Weight


def squared_norm(weights: Sequence[Weight]) -> Tensor:
    """Return the squared norm of the masters' gradients, fp64 on their device; tied copies are not counted again."""
    grads = [w.master.grad for w in weights if w.master.grad is not None and not w.is_copy]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(grads))
    return norms.double().square().sum()


def clip_factor(norm: float, clip: float) -> float:
    """Return the factor that clips gradients of this norm to `clip`, as in torch's clip_grad_norm_."""
    return 1.0 if math.isinf(clip) else min(1.0, clip / (norm + 1e-6))


def scale_gradients_(weights: Sequence[Weight], factor: float) -> None:
    """Multiply the masters' gradients by `factor`, in place."""
    grads = [weight.master.grad for weight in weights if weight.master.grad is not None]
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)


GROWTH_STEPS = 2000
"""Number of consecutive steps without overflow after which the loss scale doubles, as in torch.amp.GradScaler."""
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-10, 2.0**24


@dataclass(frozen=True)
class LossScale:
    """Factor on the loss before backward, which keeps small gradients from underflow in fp16.

    Dynamic (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2): halved when gradients overflow, doubled after
    GROWTH_STEPS steps without overflow. Constant 1 in fp32 and bf16.
    """

    value: Positive = 1.0
    good_steps: Natural = 0
    """Number of steps since the value last changed."""
    dynamic: bool = False

    @classmethod
    def of(cls, config: Config, saved: LossScale | None = None) -> LossScale:
        """Return the loss scale a run starts with. saved: that of the checkpoint; used if both runs are fp16."""
        if config.model.dtype != "fp16":
            return cls()
        return saved if saved and saved.dynamic else cls(config.optim.loss_scale, dynamic=True)

    def after(self, *, overflowed: bool) -> LossScale:
        """Return the loss scale of the next step. Raises NonFiniteError for an overflow at the smallest scale."""
        if not self.dynamic:
            return self
        if overflowed and self.value <= SMALLEST_SCALE:
            raise NonFiniteError(
                f"gradients overflow fp16 even at a loss scale of {self.value:g}; use --model.dtype bf16, or a smaller "
                "optim.lr"
            )
        if overflowed:
            return replace(self, value=self.value / 2, good_steps=0)
        if self.good_steps + 1 == GROWTH_STEPS:
            return replace(self, value=max(self.value, min(self.value * 2, LARGEST_SCALE)), good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


@dataclass(frozen=True)
class GradientScale:
    """Conversion from the loss and gradients that backward leaves to those of the mean over labels, the targets.

    The number of labels of the global batch is known only at the end of a step. So stages divide the summed
    loss by `max_targets`, the number without any masked token, and backward starts from `loss_scale`.
    """

    loss_scale: float
    max_targets: int
    """Labels of the global batch, if none is ignored."""

    @classmethod
    def of(cls, max_targets: int, loss_scale: LossScale) -> GradientScale:
        """Return the scale of one step."""
        return cls(loss_scale.value, max_targets)

    def mean_loss(self, loss: float, targets: float) -> float:
        """Return the mean over `targets` tokens of a loss that was divided by `max_targets`; NaN over none."""
        return loss * (self.max_targets / targets) if targets else math.nan

    def factors(self, targets: float, replica_targets: Sequence[float], *, local: bool) -> list[float]:
        """Return for each replica the factor from its gradients to those of a mean over target tokens.

        targets: of the global batch; replica_targets: of each replica's part of it, or of that of its domain. local:
        whether each replica, or domain, steps on its own gradients, hence the mean over its own targets; else gradients
        are summed over all replicas.
        """
        counts = replica_targets if local else [targets] * len(replica_targets)
        return [self.max_targets / max(1.0, count) / self.loss_scale for count in counts]
