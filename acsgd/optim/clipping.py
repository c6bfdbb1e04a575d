"""Gradient norm and clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from acsgd.shards.weights import Weight


def squared_norm(weights: Sequence[Weight]) -> float:
    """Return the squared norm of the masters' gradients; tied copies are not counted again. Waits for the device."""
    grads = [w.master.grad for w in weights if w.master.grad is not None and not w.is_copy]
    if not grads:
        return 0.0
    norms = torch.stack(torch._foreach_norm(grads))
    return float(norms.double().square().sum())


def clip_factor(norm: float, clip: float) -> float:
    """Return the factor that clips gradients of this norm to `clip`, as in torch's clip_grad_norm_."""
    return 1.0 if math.isinf(clip) else min(1.0, clip / (norm + 1e-6))


def scale_gradients_(weights: Sequence[Weight], factor: float) -> None:
    """Multiply the masters' gradients by `factor`, in place."""
    grads = [weight.master.grad for weight in weights if weight.master.grad is not None]
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)
