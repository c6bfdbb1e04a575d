"""Which coordinates of a unit are looked at in a step: the same on all replicas, without a message.

n = coordinates, from 0 to n - 1.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from acsgd.seeds import mix_seed

Draw = Literal["rolling", "shuffled", "random"]
"""rolling: evenly spaced, one further in each step. shuffled: each comes once, in an order drawn anew each time, before
any comes again. random: drawn anew in every step. Rolling costs nothing, the others a permutation of n numbers."""
FINEST = 1 << 20
"""Shares are fractions with a denominator of at most this, so that all arithmetic is exact."""


def chosen(n: int, share: float, step: int, draw: Draw, *, seed: int, device: torch.device) -> Tensor | slice:
    """Return an index of the coordinates of a step, in ascending order: int64 on `device`, or a slice.

    share: in (0, 1]. In each step it is met to within one coordinate, and over time, by each coordinate, exactly.
    """
    ratio = Fraction(share).limit_denominator(FINEST)
    if ratio == 1:
        return slice(0, n)
    if draw == "rolling":
        return _rolling(n, ratio, step, device)
    count = round(ratio * n)
    if draw == "random":
        return _order(n, seed, step)[:count].sort().values.to(device)
    past, first = divmod(step * count, max(1, n))
    orders = torch.cat([_order(n, seed, past), _order(n, seed, past + 1)])
    return orders[first : first + count].unique().to(device)  # where one order ends, few may come twice


def _rolling(n: int, ratio: Fraction, step: int, device: torch.device) -> Tensor | slice:
    """Return each i for which the whole part of ratio * (i + step) grows by one from i to i + 1."""
    p, q = ratio.numerator, ratio.denominator
    past = step % q
    first, end = p * past // q + 1, p * (past + n) // q + 1
    if p == 1:
        return slice(first * q - 1 - past, n, q)
    parts = torch.arange(first, end, device=device)
    return (parts * q + (p - 1)) // p - 1 - past


def _order(n: int, seed: int, number: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(mix_seed(seed, number)))
