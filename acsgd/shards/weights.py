"""One parameter of a layer, and named state of several."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Weight(NamedTuple):
    """One parameter of a layer on this rank, under its Hugging Face name."""

    key: str
    param: nn.Parameter
    """Takes part in forward and backward, in the dtype of the run."""
    master: nn.Parameter
    """fp32; holds the gradient and is what the optimizer updates. The same object as `param` in an fp32 run."""
    copy_of: str | None = None
    """The key of which this is a second, tied copy, held because the first lies on another rank."""
    is_tied: bool = False
    """Whether another rank may hold a copy of it, or it is one."""


WeightState = dict[str, dict[str, Tensor]]
"""What is remembered of parameters between steps: name -> key of the parameter -> tensor."""
