"""Sums over all ranks of a step, and the global gradient norm: across stages, after the reduction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.shards.base import Weight
from acsgd.topology import Groups, together


def squared_norm(weights: Sequence[Weight]) -> Tensor:
    """Return the squared norm of a rank's gradients as one fp64 number; tied copies are counted once."""
    grads = [w.master.grad for w in weights if w.master.grad is not None and w.copy_of is None]
    if not grads:
        return torch.zeros(1, dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(grads))
    return norms.double().square().sum().reshape(1).cpu()


def sum_over_ranks(per_replica: Tensor, per_stage: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Sum `per_replica` over all ranks, and `per_stage`, which replicas share already, over the pipeline.

    Both are 1-D, fp64, on the host, and equal on every rank afterwards. One small message round per axis.
    """
    with together("summing loss and bytes", groups.dp):
        dist.all_reduce(per_replica, group=groups.dp)
    both = torch.cat([per_replica, per_stage])
    with together("agreeing on loss and gradient norm", groups.pp):
        dist.all_reduce(both, group=groups.pp)
    return both[: len(per_replica)], both[len(per_replica) :]


def clip_factor(norm: float, clip: float) -> float:
    """Return what gradients of this norm are multiplied by, as torch's clip_grad_norm_ does it."""
    return 1.0 if math.isinf(clip) else min(1.0, clip / (norm + 1e-6))


def scale_gradients_(weights: Sequence[Weight], factor: float) -> None:
    """Multiply the masters' gradients in place."""
    if factor != 1.0:
        grads = [weight.master.grad for weight in weights if weight.master.grad is not None]
        torch._foreach_mul_(grads, factor)
