"""Small groups, rotated so that outliers spread, some with fewer bits: for data that are seen once.

Source: TAH-Quant (arXiv 2506.01352): tiles along the token, a Hadamard rotation, 3 or 4 bits by tile. Here a tile's
scale is one byte instead of two numbers, and says also how many bits the tile has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire
from acsgd.codecs.bits import packed_bytes
from acsgd.codecs.layout import Layout, decode_blocks, encode_blocks
from acsgd.codecs.lloyd import HALF, cells, code_of_cell, fit_levels, values
from acsgd.codecs.scales import divisor, measure

REACH = 8.0
"""Cells reach so many times the root mean square; the outermost level of 8 bits is at 5."""
PER_OCTAVE = 8
"""Scales are rounded to so many per factor of two, at most 4.4 % off, and cover 31 factors of two below the largest."""


@dataclass(frozen=True)
class Hadamard:
    """Rotate groups of neighbours, divide by their root mean square, round to the best levels for a normal variable.

    A share of the groups, those with the largest scales, has `bits` bits per element and the rest `low`. Rotated
    values are sums of many, so they are nearly normal whatever the data are. The rotation is a matrix product, whose
    rounding differs between devices: two ends that must agree to the last bit need the same kind of device.

    With bits=4,low=4 (4.13 bits per element) the relative error is .089 to .097 on normal, Laplace, Student t and
    rectified data, also where every token or channel has a scale of its own (benchmarks/codecs/speed.py). A scale per
    channel cannot follow tokens: there, and on Student t with 3 degrees, `lloyd` has .14 and `fixpoint` .26 to .31.
    On normal and rectified data `lloyd` is as good or better; with dims=group,group=64 (4.25 bits) it is about as
    robust. Fewer bits for small groups pay only where groups differ: where tokens do, bits=5,low=3,fraction=0.5 turns
    .097 into .059 in the same bytes; elsewhere it costs. The slowest codec, a quarter of the speed of `fixpoint`.
    """

    entropy_coding: ClassVar[bool] = False
    RENAMED: ClassVar[dict[str, str]] = {"share": "fraction"}

    bits: int = 4
    """Per element of the groups with the larger scales, 1 to 8."""
    low: int = 3
    """Per element of the other groups, 1 to bits."""
    fraction: float = 0.8
    """Of groups that have `bits` bits, 0 to 1."""
    group: int = 64
    """Neighbours that are rotated together, a power of two from 2 to 1024; each group costs one byte more."""

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.bits <= 8:
            raise ValueError(f"bits={self.bits} and low={self.low} are not 1 <= low <= bits <= 8; use bits=4,low=3")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction} is outside 0 to 1; use 0.8 if in doubt")
        if self.group not in (1 << power for power in range(1, 11)):
            raise ValueError(f"group={self.group} is not a power of two from 2 to 1024; use 64 if in doubt")

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        groups = self._groups(shape)
        streams = (Field(torch.uint8, (packed_bytes(part.numel, bits),)) for part, bits in self._parts(groups))
        return Field(torch.float32, (1,)), Field(torch.uint8, (groups,)), *streams

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Raises NotFiniteError."""
        shape = tuple(x.shape)
        layout = self._whole(self._groups(shape))
        rows = layout.rows(x.detach().reshape(-1))
        size = measure(rows.view(-1), layout, "rms", shape)
        largest = size.amax().view(1) if len(size) else size.new_zeros(1)
        octaves = _scale_codes(size, largest)
        scales, streams = divisor(_scales(octaves, largest)), []
        for (part, bits), chosen in zip(self._parts(layout.scales), self._choose(octaves), strict=True):
            codes_of = partial(_codes, bits=bits)
            streams.append(encode_blocks(rows.index_select(0, chosen).view(-1), part, bits, scales[chosen], codes_of))
        return largest, octaves, *streams

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        largest, octaves, *streams = fields
        groups, scales = self._groups(shape), _scales(octaves, largest)
        rows = torch.empty(groups, self.group, dtype=dtype, device=octaves.device)
        parts = zip(self._parts(groups), self._choose(octaves), streams, strict=True)
        for (part, bits), chosen, stream in parts:
            values_of = partial(_values, bits=bits)
            decoded = decode_blocks(stream, part, bits, scales[chosen], dtype, values_of)
            rows.index_copy_(0, chosen, decoded.view(-1, self.group))
        return rows.view(-1)[: math.prod(shape)].view(shape)

    def _groups(self, shape: tuple[int, ...]) -> int:
        """Return how many groups there are; the last is filled up with zeros."""
        return -(-math.prod(shape) // self.group)

    def _whole(self, groups: int) -> Layout:
        return Layout(groups * self.group, self.group, by_column=False)

    def _parts(self, groups: int) -> tuple[tuple[Layout, int], tuple[Layout, int]]:
        """Return the layout and the bits of the groups with the larger scales, and of the rest."""
        large = round(self.fraction * groups)
        return (self._whole(large), self.bits), (self._whole(groups - large), self.low)

    def _choose(self, octaves: Tensor) -> tuple[Tensor, Tensor]:
        """Return the groups of both parts, from what both ends know."""
        order = torch.sort(octaves, descending=True, stable=True).indices
        large = round(self.fraction * len(octaves))
        return order[:large], order[large:]


def _scale_codes(size: Tensor, largest: Tensor) -> Tensor:
    """Return sizes as steps of 1 / PER_OCTAVE octaves, uint8: 255 is the largest, 0 stands for 0."""
    octaves = torch.log2(size) - torch.log2(largest)
    steps = (octaves * PER_OCTAVE).round_().add_(255).clamp_(0, 255)
    return torch.where(size > 0, steps, 0).to(torch.uint8)


def _scales(octaves: Tensor, largest: Tensor) -> Tensor:
    """Return the sizes that codes stand for, fp32; from a table made by the host, as exp2 differs between devices."""
    table = torch.tensor([0.0, *(2.0 ** ((code - 255) / PER_OCTAVE) for code in range(1, 256))], device=largest.device)
    return table[octaves.int()] * largest


def _codes(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    rotated = (rows / scales) @ _rotation(rows.shape[1], rows.device)
    table = code_of_cell(normal_levels(bits).to(rows.device) / REACH)
    return table.index_select(0, cells(rotated, rows.new_full((), REACH / HALF)).view(-1))


def _values(codes: Tensor, bits: int) -> Tensor:
    return values(codes, normal_levels(bits).float().to(codes.device)) @ _rotation(codes.shape[1], codes.device).T


@lru_cache
def normal_levels(bits: int) -> Tensor:
    """Return the levels, float64[2**bits], with the least squared error for a normal variable of variance 1."""
    position = torch.linspace(-REACH, REACH, 2 * HALF + 1, dtype=torch.float64)
    return fit_levels((position.square() / -2).exp(), 2**bits) * REACH


@lru_cache
def _rotation(size: int, device: torch.device) -> Tensor:
    """Return an orthonormal matrix of +-1 / sqrt(size): Hadamard's, with the signs of some rows changed.

    Every single outlier spreads evenly. So does, thanks to the signs (those of Rudin and Shapiro), a constant, which
    Hadamard's own matrix would turn into an outlier.
    """
    index = torch.arange(size)
    signs = 1 - 2 * (_ones(index & index >> 1) % 2)
    hadamard = 1 - 2 * (_ones(index[:, None] & index) % 2)
    return (signs[:, None] * hadamard / math.sqrt(size)).to(device)


def _ones(numbers: Tensor) -> Tensor:
    """Count the ones in the binary form of numbers below 1024."""
    return sum((numbers >> place & 1 for place in range(10)), torch.zeros_like(numbers))
