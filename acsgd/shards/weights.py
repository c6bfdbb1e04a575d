"""A parameter of a layer, and the type of per-parameter state."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Weight(NamedTuple):
    """A parameter of a layer on this rank."""

    key: str
    """Hugging Face name."""
    param: nn.Parameter
    """Used in forward and backward, in the dtype of the run."""
    master: nn.Parameter
    """fp32 master weight with the gradient; updated by the optimizer. The same object as `param` in an fp32 run."""
    copy_of: str | None = None
    """Key of the tied original, if this is a copy because the original is on another rank."""
    is_tied: bool = False
    """Whether the parameter is tied to another one, as original or copy."""


WeightState = dict[str, dict[str, Tensor]]
"""Per-parameter state that persists between steps: name ("exp_avg") -> key of the parameter -> tensor."""
