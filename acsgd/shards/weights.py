"""A parameter of a layer, and the per-parameter state that persists between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

MIN_ROW = 8
"""Minimum elements of a row, where a weight is divided by rows, or has statistics by row."""


class Weight(NamedTuple):
    """A parameter of a layer on this rank."""

    key: str
    """Name in the Hugging Face model; of a tied parameter, the first."""
    param: nn.Parameter
    """Used in forward and backward, in the dtype of the run."""
    master: nn.Parameter
    """What the optimizer updates, with its gradient, which is fp32: an fp32 master weight, or `param` itself if that is
    fp32, unless masters are averages or in host memory, or in a run without masters."""
    is_copy: bool = False
    """Whether this is a copy of a tied parameter, and another rank has the original."""
    is_tied: bool = False
    """Whether several layers use the parameter."""
    has_remote_lookups: bool = False
    """Whether other ranks look up its rows, and send the gradients of these after their last backward of a step."""
    is_hidden_matrix: bool = False
    """Whether it is one of `hidden_matrices`, which some optimizers update in another way."""

    @property
    def grad_bytes(self) -> int:
        """Size of the gradient of the master."""
        return self.master.numel() * torch.float32.itemsize


def as_own_master(param: nn.Parameter) -> nn.Parameter:
    """Return a parameter as its own master: autograd casts its gradients to fp32, and sums them so. Changes it."""
    param.grad_dtype = torch.float32
    return param


def in_reduction_order(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Return weights as data-parallel modes get them, which reduce the first ones last.

    Those with remote lookups come first, since their gradients are complete last.
    """
    return tuple(sorted(weights, key=lambda weight: not weight.has_remote_lookups))


def weight_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a weight."""
    return tuple(weight.shape)


class StateTensor(NamedTuple):
    """One kind of tensor, fp32 and finite, that an optimizer keeps per weight from its first update on."""

    name: str
    """Name in checkpoints."""
    shape: Callable[[Tensor], tuple[int, ...] | None] = weight_shape
    """Shape of the tensor of a weight; None if this weight has no such tensor."""
    non_negative: bool = False
    """Whether no value is less than 0."""
    of_hidden_matrices: bool | None = None
    """Whether only hidden matrices have it; False = only all other weights; None = both."""
    itemsize: Callable[[Tensor], int] = lambda weight: 4
    """Bytes of an element in memory, where it may be quantized."""

    def shape_for(self, weight: Tensor, *, is_hidden_matrix: bool) -> tuple[int, ...] | None:
        """Return the shape of the tensor of a weight; None if this weight has no such tensor."""
        return self.shape(weight) if self.of_hidden_matrices in (None, is_hidden_matrix) else None

    def nbytes(self, weight: Tensor, *, is_hidden_matrix: bool) -> int:
        """Return the memory of the tensor of a weight, which may be on the meta device."""
        shape = self.shape_for(weight, is_hidden_matrix=is_hidden_matrix)
        return 0 if shape is None else math.prod(shape) * self.itemsize(weight)


WeightState = dict[str, dict[str, Tensor]]
"""Per-parameter state that persists between steps: name ("exp_avg") -> key of the parameter -> tensor."""


def part_of(state: WeightState, keys: Collection[str]) -> WeightState:
    """Return the part of a state that belongs to some weights, not copied."""
    part = {name: {key: tensor for key, tensor in by_key.items() if key in keys} for name, by_key in state.items()}
    return {name: by_key for name, by_key in part.items() if by_key}
