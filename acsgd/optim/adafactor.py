from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from acsgd.config.options import OptimConfig
from acsgd.config.ranges import Range
from acsgd.optim.base import Capability
from acsgd.optim.torch_optimizer import TorchOptimizer
from acsgd.shards.weights import StateTensor, Weight, WeightState

EPS = torch.finfo(torch.float32).eps
"""Its square is the smallest second moment that is divided by."""
MIN_RMS = 1e-3
"""Smallest root mean square of a weight that its step is relative to."""


def _row_shape(weight: Tensor) -> tuple[int, ...] | None:
    return (*weight.shape[:-1], 1) if weight.dim() > 1 else None


def _column_shape(weight: Tensor) -> tuple[int, ...] | None:
    return (*weight.shape[:-2], 1, weight.shape[-1]) if weight.dim() > 1 else None


def _vector_shape(weight: Tensor) -> tuple[int, ...] | None:
    return None if weight.dim() > 1 else tuple(weight.shape)


@dataclass(frozen=True)
class Adafactor:
    """Second moments of a matrix as row and column means (Shazeer and Stern 2018, arXiv:1804.04235), as torch's.

    Nearly no state, no momentum. The step of a weight is min(learning rate, 1 / sqrt(step)) times the root mean square
    of the weight, so optim.lr is relative: 0.01 is usual.
    """

    decay: Annotated[float, Range(-1, 0, above=True)] = -0.8
    """Exponent of the step number in the decay rate of second moments, 1 - step**decay."""
    clip: Annotated[float, Range(1, 10**6)] = 1.0
    """Largest root mean square of the update of a weight, before it is multiplied by the step."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    averages: ClassVar[bool] = False
    states: ClassVar[tuple[StateTensor, ...]] = (
        StateTensor("step", shape=lambda weight: (), non_negative=True),
        StateTensor("row_var", _row_shape, non_negative=True),
        StateTensor("col_var", _column_shape, non_negative=True),
        StateTensor("variance", _vector_shape, non_negative=True),
    )

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> AdafactorWeights:
        """Return the optimizer of these weights."""
        return AdafactorWeights(weights, config, lambda groups: AdafactorOptimizer(groups, self))


class AdafactorWeights(TorchOptimizer):
    """Adafactor over one rank's weights. Step counts are in host memory."""

    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        super().load_state_of(weight, state)
        of_weight = self._optimizer.state[weight.master]
        of_weight |= {"step": of_weight["step"].cpu()} if of_weight else {}


class AdafactorOptimizer(torch.optim.Optimizer):
    """torch.optim.Adafactor bit for bit, without its two waits for the device per weight, which read norms."""

    def __init__(self, groups: list[dict[str, Any]], options: Adafactor) -> None:
        super().__init__(groups, {})
        self._options = options

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's takes a closure
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"], group["weight_decay"])

    def _update(self, param: Tensor, grad: Tensor, rate: float, weight_decay: float) -> None:
        state = self.state[param]
        if not state:
            shapes = {"row_var": _row_shape(param), "col_var": _column_shape(param), "variance": _vector_shape(param)}
            state["step"] = torch.zeros(())
            state |= {name: grad.new_zeros(shape) for name, shape in shapes.items() if shape is not None}
        state["step"] += 1
        step = state["step"].item()
        # scalars of the device are float64, as the numbers of Python that torch computes with
        size = _rms(param).clamp(min=MIN_RMS) * min(rate, 1 / step**0.5)
        if weight_decay:
            param.mul_(1 - rate * weight_decay)
        update = _second_moment(state, grad, step**self._options.decay)
        update.clamp_(min=EPS * EPS).rsqrt_().mul_(grad)
        excess = (_rms(update) / self._options.clip).clamp(min=1.0)
        param.addcmul_(update, (size / excess).neg().to(param.dtype))


def _rms(x: Tensor) -> Tensor:
    """Return the root mean square of a tensor, float64 []."""
    return x.norm(2).double() / x.numel() ** 0.5


def _second_moment(state: dict[str, Tensor], grad: Tensor, fraction: float) -> Tensor:
    """Accumulate a fraction of the squared gradient in the state, in place; return the second moment, a new tensor."""
    if grad.dim() <= 1:
        return state["variance"].lerp_(grad * grad, fraction).clone()
    row, column = state["row_var"], state["col_var"]
    row.lerp_(grad.norm(dim=-1, keepdim=True).square_().div_(grad.shape[-1]), fraction)
    column.lerp_(grad.norm(dim=-2, keepdim=True).square_().div_(grad.shape[-2]), fraction)
    return (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=EPS))
