"""The norm of gradients, and its limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from acsgd.shards.weights import Weight


def squared_norm(weights: Sequence[Weight]) -> Tensor:
    """Return the squared norm of a rank's gradients: fp64 [1], on the host; tied copies are counted once."""
    grads = [w.master.grad for w in weights if w.master.grad is not None and w.copy_of is None]
    if not grads:
        return torch.zeros(1, dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(grads))
    return norms.double().square().sum().reshape(1).cpu()


def clip_factor(norm: float, clip: float) -> float:
    """Return what gradients of this norm are multiplied by, as torch's clip_grad_norm_ does it."""
    return 1.0 if math.isinf(clip) else min(1.0, clip / (norm + 1e-6))


def scale_gradients_(weights: Sequence[Weight], factor: float) -> None:
    """Multiply the masters' gradients in place."""
    if factor != 1.0:
        grads = [weight.master.grad for weight in weights if weight.master.grad is not None]
        torch._foreach_mul_(grads, factor)
