"""Lossless codec: the bits of floating-point numbers in an order in which entropy coding shortens them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integer dtype by the bytes of an element."""


@dataclass(frozen=True)
class BytePlanes:
    """Send the first bytes of all elements, then their second bytes, and so on, entropy-coded.

    Sign and exponent have bytes of their own, of which few values are frequent. The bytes of mantissas are random.
    """

    entropy_coding: ClassVar[bool] = True

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        return (Field(torch.uint8, (dtype.itemsize, math.prod(shape))),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (to_planes(bits_of(x)),)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        (planes,) = fields
        return from_planes(planes).view(dtype).view(shape)

    def error_bound(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64)


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of floating-point numbers as integers of the same size, in the shape of `x`, a view if it can."""
    return x.detach().contiguous().view(_INTEGERS[x.dtype.itemsize])


def to_planes(values: Tensor) -> Tensor:
    """Return the bytes of n integers, uint8 [bytes of an integer, n]. Those of small ones are mostly 0."""
    bits, flat = 8 * values.dtype.itemsize, values.reshape(-1)
    zigzag = (flat << 1) ^ (flat >> (bits - 1))  # the sign is the lowest bit
    return zigzag.view(torch.uint8).view(-1, values.dtype.itemsize).t().contiguous()


def from_planes(planes: Tensor) -> Tensor:
    """Inverse of `to_planes`; returns the integers in one dimension."""
    dtype = _INTEGERS[len(planes)]
    zigzag = planes.t().reshape(-1).view(dtype)
    return ((zigzag >> 1) & torch.iinfo(dtype).max) ^ -(zigzag & 1)
