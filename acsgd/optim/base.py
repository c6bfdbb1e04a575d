"""What data-parallel modes ask of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor


class LocalStep(NamedTuple):
    """How the optimizer makes a step in which each replica has gradients of its own."""

    momentum: bool = True
    """Whether AdamW's first moment is used; else the gradient takes its place."""
    frozen: bool = False
    """Whether AdamW's second moment stays what it is."""
    shares: Mapping[str, Tensor] = MappingProxyType({})
    """By key, [rows], how much of the squares of gradients AdamW's second moments are made of; empty = all of all."""


class SecondMoments(NamedTuple):
    """AdamW's, of some weights; to be changed in place."""

    by_key: Mapping[str, Tensor]
    """None of weights without a step yet."""
    decay: float
    """What one step leaves of them, beta_2."""
