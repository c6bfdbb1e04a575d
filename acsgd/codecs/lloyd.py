"""Levels fitted to the data of each tensor: the least squared error that so many bits per element can have.

Source: Lloyd, "Least squares quantization in PCM" (1982), on a histogram.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from acsgd.codecs.base import Field, Wire
from acsgd.codecs.bits import packed_bytes
from acsgd.codecs.fixpoint import ROUND
from acsgd.codecs.layout import Dims, Layout, check_dims, decode_blocks, encode_blocks, layout_of
from acsgd.codecs.scales import TINIEST, divisor, from_wire, measure, scale_fields, to_wire

HALF = 2048
"""Cells between 0 and s: x / s is first rounded to a multiple of 1 / HALF, its cell, and a table has the code."""
CELLS = 2 * HALF + 1
SMOOTHING = 65
"""Cells over which the histogram is averaged before it is cut for the first time."""
ROUNDS = 10
"""Of improving the levels; 40 instead of 10 take at most 2 % off the error."""


@dataclass(frozen=True)
class Lloyd:
    """Round x / s to the nearest of 2**bits levels that are fitted to the tensor; s = the largest magnitude.

    The levels travel with it, as fp16, 2**(bits + 1) bytes. They make the error of the whole tensor small, so where
    scales differ, those that are large count for more. Zero is a level only if the data ask for one.

    Relative errors, with fixpoint's for as many bits (benchmarks/codecs/speed.py, 512 x 1024, a scale per channel):

        bits     normal        Laplace       Student t, 3    rectified normal
        2        .347 .481     .426 .607     .575 .720       .209 .471
        3        .188 .239     .233 .340     .297 .506       .102 .230
        4        .097 .119     .118 .175     .143 .306       .050 .114
        8        .0059 .0074   .0071 .0111   .0087 .0218     .0032 .0071

    At 1 bit `fixpoint` is as good, except where most elements have the same sign. It is 1.7 times as fast, in both
    directions. The levels cost little beside thousands of elements, and too much beside a few.
    """

    entropy_coding: ClassVar[bool] = False

    bits: int = 4
    """Per element, 1 to 8."""
    dims: Dims = "channel"
    """Which elements share a scale: an index of the last dimension, a vector along it, all, or `group` neighbours."""
    group: int = 0
    """Elements that share a scale, where dims is "group"; each scale is 2 bytes."""

    def __post_init__(self) -> None:
        check_dims(self.bits, self.dims, self.group)

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        layout = layout_of(shape, self.dims, self.group)
        stream = Field(torch.uint8, (packed_bytes(layout.numel, self.bits),))
        return stream, *scale_fields(layout), Field(torch.float16, (2**self.bits,))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Raises NotFiniteError."""
        shape, flat = tuple(x.shape), x.detach().reshape(-1)
        layout = layout_of(shape, self.dims, self.group)
        half, exponent = to_wire(measure(flat, layout, "max", shape))
        scales = from_wire(half, exponent)
        levels = fit_levels(_histogram(flat, layout, scales), 2**self.bits).half()
        codes_of = partial(_codes, table=code_of_cell(levels))
        return encode_blocks(flat, layout, self.bits, divisor(scales / HALF), codes_of), half, exponent, levels

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor; one product per element in fp32, so it is the same on every device."""
        stream, half, exponent, levels = fields
        scales, values_of = from_wire(half, exponent), partial(values, levels=levels.float())
        layout = layout_of(shape, self.dims, self.group)
        return decode_blocks(stream, layout, self.bits, scales, dtype, values_of).view(shape)


def fit_levels(histogram: Tensor, count: int) -> Tensor:
    """Return `count` ascending levels in [-1, 1], float64, for numbers of which histogram[i] lie at i / HALF - 1.

    Each round puts every level at the mean of the numbers that are nearest to it, which never makes the squared error
    larger. At first, the levels are as dense as the cube root of the histogram, the best for many levels (Panter and
    Dite 1951).
    """
    position = torch.arange(CELLS, dtype=torch.float64, device=histogram.device)
    mass = functional.pad(histogram.cumsum(0), (1, 0))
    moment = functional.pad((histogram * position).cumsum(0), (1, 0))
    edges = _first_edges(histogram, count)
    for _ in range(ROUNDS):
        inside, middle = mass[edges].diff(), (edges[1:] + edges[:-1] - 1) / 2
        levels = torch.where(inside > 0, moment[edges].diff() / inside, middle)
        edges = torch.cat([edges[:1], ((levels[1:] + levels[:-1]) / 2).long() + 1, edges[-1:]])
    return levels / HALF - 1


def _first_edges(histogram: Tensor, count: int) -> Tensor:
    """Return count + 1 ascending cells, from 0 to CELLS: level i has the cells from edges[i] to edges[i + 1]."""
    smooth = functional.avg_pool1d(histogram.view(1, 1, -1), SMOOTHING, 1, SMOOTHING // 2).flatten()
    density = smooth.pow(1 / 3).cumsum(0)
    share = torch.arange(1, count, dtype=torch.float64, device=histogram.device) / count
    return functional.pad(functional.pad(torch.searchsorted(density, share * density[-1]), (1, 0)), (0, 1), value=CELLS)


def _histogram(flat: Tensor, layout: Layout, scales: Tensor) -> Tensor:
    """Return how many elements lie in each cell, by every so-manieth row, float64[CELLS].

    An element counts with the square of its scale, as its error does. Counted in whole numbers, whose sum does not
    depend on the order in which a GPU adds.
    """
    counts = torch.zeros(CELLS, dtype=torch.int64, device=flat.device)
    if not layout.numel:
        return counts.double()
    weights = (scales / scales.max().clamp(min=TINIEST)).square().mul(2**20).long().clamp(min=1)
    rows, divisors, weight = layout.sample(flat, divisor(scales / HALF), weights)
    counts.index_add_(0, cells(rows, divisors).view(-1), weight.expand_as(rows).reshape(-1))
    every = layout.sample_stride
    if every > 1:  # the largest element of every scale is known, and rare as it is, its error may be the largest
        counts[[0, -1]] += weights.sum() // (2 * every)
    return counts.double()


def cells(rows: Tensor, divisors: Tensor) -> Tensor:
    """Return the cell of each element, 0 to CELLS - 1, int32."""
    rounded = torch.addcdiv(rows.new_full((), ROUND + HALF), rows, divisors).clamp_(ROUND, ROUND + CELLS - 1)
    return rounded.view(torch.int32).bitwise_and_(4 * HALF - 1)  # the digits of ROUND lie above


def code_of_cell(levels: Tensor) -> Tensor:
    """Return the code of each cell, uint8[CELLS]."""
    exact = levels.double()
    position = torch.arange(CELLS, dtype=torch.float64, device=levels.device) / HALF - 1
    return torch.bucketize(position, (exact[1:] + exact[:-1]) / 2).to(torch.uint8)


def values(codes: Tensor, levels: Tensor) -> Tensor:
    """Return the level of each code, fp32, in the shape of the codes."""
    return levels.index_select(0, codes.view(-1).int()).view(codes.shape)


def _codes(rows: Tensor, divisors: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, cells(rows, divisors).view(-1))
