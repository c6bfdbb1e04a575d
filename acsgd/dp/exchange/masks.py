"""Coordinates that are exchanged in a step: the same on all replicas, without a message.

n = number of coordinates.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from acsgd.seeds import mix_seed

Sampling = Literal["rolling", "shuffled", "random"]
"""Order in which coordinates are sampled.

rolling   evenly spaced, shifted by one in each step; costs nothing.
shuffled  without replacement, in a new random order each time all have been sampled.
random    independently in each step. As for shuffled, a step costs a permutation of n numbers.
"""
MAX_DENOMINATOR = 1 << 20
"""Largest denominator to which fractions are rounded, so that all arithmetic is exact."""


def sample_coordinates(
    n: int, fraction: float, step: int, sampling: Sampling, *, seed: int, device: torch.device
) -> Tensor | slice:
    """Return an index of the coordinates of a step, in ascending order: int64 on `device`, or a slice.

    fraction: in (0, 1]; exact to within one coordinate per step.
    """
    ratio = Fraction(fraction).limit_denominator(MAX_DENOMINATOR)
    if ratio == 1:
        return slice(0, n)
    if sampling == "rolling":
        return _rolling(n, ratio, step, device)
    count = round(ratio * n)
    if sampling == "random":
        return _permutation(n, seed, step)[:count].sort().values.to(device)
    past, first = divmod(step * count, max(1, n))
    orders = torch.cat([_permutation(n, seed, past), _permutation(n, seed, past + 1)])
    return orders[first : first + count].unique().to(device)  # across two permutations a few may occur twice


def _rolling(n: int, ratio: Fraction, step: int, device: torch.device) -> Tensor | slice:
    """Return each i for which floor(ratio * (i + step)) increases from i to i + 1."""
    p, q = ratio.numerator, ratio.denominator
    past = step % q
    first, end = p * past // q + 1, p * (past + n) // q + 1
    if p == 1:
        return slice(first * q - 1 - past, n, q)
    increases = torch.arange(first, end, device=device)
    return (increases * q + (p - 1)) // p - 1 - past


def _permutation(n: int, seed: int, number: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(mix_seed(seed, number)))
