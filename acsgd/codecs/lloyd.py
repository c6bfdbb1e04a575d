"""Quantization with levels fitted to each tensor, which minimize the squared error for a given number of bits.

Source: Lloyd, "Least squares quantization in PCM" (1982), applied to a histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from acsgd.codecs.base import Field, Wire, rounding_bound
from acsgd.codecs.bits import has_numpy, has_values, packed_bytes, unpack_bits
from acsgd.codecs.fixpoint import ROUND_OFFSET
from acsgd.codecs.layout import CodedStream, Dims, ScaleLayout, ValuesOf, check_dims, encode_blocks, layout_of
from acsgd.codecs.scales import MIN_SCALE, as_divisors, decode_scales, encode_scales, measure, scale_fields

HALF_BINS = 2048
"""Histogram bins between 0 and s. x / s is rounded to a multiple of 1 / HALF_BINS, and a table maps bins to codes."""
BINS = 2 * HALF_BINS + 1
INDICES = 4 * HALF_BINS
"""Entries of tables by bin. Those past BINS take NaN: a GPU must not find an index outside of a table."""
SMOOTHING = 65
"""Width of the moving average of the histogram that the initial levels are derived from, bins."""
ITERATIONS = 10
"""Lloyd iterations. 40 reduce the error by at most another 2 %."""
_LEVELS_OF_BYTE = {2: torch.complex128, 4: torch.int64}
"""Dtypes as large as the fp32 levels of a byte, by bits per code."""


@dataclass(frozen=True)
class Lloyd:
    """Round x / s to the nearest of 2**bits levels that are fitted to the tensor; s is the largest magnitude.

    The levels are sent as fp16, 2**(bits + 1) bytes. They minimize the squared error of the whole tensor, so groups
    with large scales have more weight. Zero is a level only if the data favour it.

    Relative errors, lloyd and fixpoint, 512 x 1024 elements with a scale per channel (benchmarks/codecs/speed.py):

        bits     normal        Laplace       Student t, 3    rectified normal
        2        .347 .481     .426 .607     .575 .720       .209 .471
        3        .188 .239     .233 .340     .297 .506       .102 .230
        4        .097 .119     .118 .175     .143 .306       .050 .114
        8        .0059 .0074   .0071 .0111   .0087 .0218     .0032 .0071

    At 1 bit `fixpoint` is as good, except where most elements have the same sign. `fixpoint` is 1.7 times as fast in
    both directions. The bytes of the levels matter only for small tensors.
    """

    entropy_coding: ClassVar[bool] = False
    encodes_nan: ClassVar[bool] = False

    bits: int = 4
    """Bits per element, 1 to 8."""
    dims: Dims = "channel"
    """Elements that share a scale: an index of the last dimension ("channel"), a vector along it ("token"), the whole
    "tensor", or "group" = `group` neighbours."""
    group: int = 0
    """Group size of dims=group, elements. Each group costs a scale of 2 bytes."""

    def __post_init__(self) -> None:
        check_dims(self.bits, self.dims, self.group)

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        layout = layout_of(shape, self.dims, self.group)
        stream = Field(torch.uint8, (packed_bytes(layout.numel, self.bits),))
        return stream, *scale_fields(layout), Field(torch.float16, (2**self.bits,))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the bit stream, the scales and their exponent, and the levels."""
        flat, layout = x.detach().reshape(-1), layout_of(tuple(x.shape), self.dims, self.group)
        half, exponent = encode_scales(measure(flat, layout, "max"))
        scales = decode_scales(half, exponent)
        levels = fit_levels(_histogram(flat, layout, scales), 2**self.bits).half()
        codes_of = partial(_codes, table=bin_codes(levels))
        divisors = as_divisors(scales / HALF_BINS)
        return encode_blocks(flat, layout, self.bits, divisors, codes_of), half, exponent, levels

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the decoded tensor, finite. Computed with one fp32 product per element: the same on every device."""
        return self._stream(fields, shape).decode(dtype).view(shape)

    def decoded_blocks(self, fields: tuple[Tensor, ...], shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
        return self._stream(fields, shape).blocks()

    def _stream(self, fields: tuple[Tensor, ...], shape: tuple[int, ...]) -> CodedStream:
        stream, half, exponent, levels = fields
        finite = levels.float().nan_to_num_(0.0).clamp_(-1.0, 1.0)
        layout = layout_of(shape, self.dims, self.group)
        return CodedStream(stream, layout, self.bits, decode_scales(half, exponent), level_lookup(finite, self.bits))

    def error_bound(self, x: Tensor) -> Tensor:
        """The distance to the nearest fitted level, and one histogram bin."""
        _, half, exponent, fitted = self.encode(x)
        layout, levels = layout_of(tuple(x.shape), self.dims, self.group), fitted.double()
        s = layout.per_element(decode_scales(half, exponent).double())
        exact = x.double().reshape(-1)
        codes = torch.bucketize(exact / as_divisors(s), (levels[1:] + levels[:-1]) / 2)
        beyond = (exact.abs() - s).clamp(min=0)  # elements that the rounded scale clips
        bound = (exact - s * levels[codes]).abs() + s / HALF_BINS + beyond
        return rounding_bound(x, bound.view(x.shape))


def fit_levels(histogram: Tensor, count: int) -> Tensor:
    """Return the `count` levels that minimize the squared error of a distribution: ascending, in [-1, 1], float64.

    Each iteration moves every level to the mean of the numbers nearest to it, which never increases the squared error.
    The density of the initial levels is the cube root of the histogram, which is optimal for many levels (Panter and
    Dite 1951).

    Args:
        histogram: Weights of the numbers i / HALF_BINS - 1, float64[BINS].
    """
    if not has_values(histogram):
        return histogram[:count]
    position = torch.arange(BINS, dtype=torch.float64, device=histogram.device)
    mass = functional.pad(histogram.cumsum(0), (1, 0))
    moment = functional.pad((histogram * position).cumsum(0), (1, 0))
    edges = _initial_edges(mass, count)
    if not has_numpy(histogram):
        return _moved_levels(edges, mass, moment, torch.where) / HALF_BINS - 1
    moved = _moved_levels(edges.numpy(), mass.numpy(), moment.numpy(), numpy.where)  # in a third of the time
    return torch.from_numpy(moved / HALF_BINS - 1)


def _moved_levels(edges: Any, mass: Any, moment: Any, where: Callable[..., Any]) -> Any:
    """Return the levels of `fit_levels`, bins, float64 [count]. All are tensors, or all arrays; changes the edges."""
    for _ in range(ITERATIONS):
        masses, moments = mass[edges], moment[edges]
        inside, middle = masses[1:] - masses[:-1], (edges[1:] + edges[:-1] - 1) / 2
        levels = where(inside > 0, (moments[1:] - moments[:-1]) / (inside + (inside <= 0)), middle)
        edges[1:-1] = (levels[1:] + levels[:-1]) / 2  # rounded down
        edges[1:-1] += 1
    return levels


def _initial_edges(mass: Tensor, count: int) -> Tensor:
    """Return count + 1 ascending bins, from 0 to BINS; level i has the bins from edges[i] to edges[i + 1].

    mass: cumulative sums of the histogram, [BINS + 1].
    """
    padded = torch.cat([mass.new_zeros(SMOOTHING // 2), mass, mass[-1:].expand(SMOOTHING // 2)])
    smooth = (padded[SMOOTHING:] - padded[:-SMOOTHING]).clamp_(min=0)
    density = smooth.pow(1 / 3).cumsum(0)
    quantiles = torch.arange(1, count, dtype=torch.float64, device=mass.device) / count
    edges = torch.searchsorted(density, quantiles * density[-1])
    return functional.pad(functional.pad(edges, (1, 0)), (0, 1), value=BINS)


def _histogram(flat: Tensor, layout: ScaleLayout, scales: Tensor) -> Tensor:
    """Return the histogram of x / s of a sample of the rows, float64[BINS].

    An element has the weight of its squared scale, like its squared error. Weights are integers, so that the sum does
    not depend on the order in which a GPU adds.
    """
    indices = torch.zeros(INDICES, dtype=torch.int64, device=flat.device)
    counts = indices[:BINS]
    if not layout.numel:
        return counts.double()
    weights = (scales / scales.max().clamp(min=MIN_SCALE)).square().mul(2**20).long().clamp(min=1)
    rows, divisors, weight = layout.sample(flat, as_divisors(scales / HALF_BINS), weights)
    indices.index_add_(0, bin_of(rows, divisors).view(-1), weight.expand_as(rows).reshape(-1))
    stride = layout.sample_stride
    if stride > 1:  # the sample may miss the largest element of each scale, whose error may be the largest
        for end in (counts[:1], counts[-1:]):
            end += weights.sum() // (2 * stride)
    return counts.double()


def bin_of(rows: Tensor, divisors: Tensor) -> Tensor:
    """Return the histogram bin of each element, int32, 0 to BINS - 1; of NaN, any number below INDICES."""
    rounded = rows.div(divisors).add_(ROUND_OFFSET + HALF_BINS)
    rounded.clamp_(ROUND_OFFSET, ROUND_OFFSET + BINS - 1)
    return rounded.view(torch.int32).bitwise_and_(INDICES - 1)  # removes the bits of ROUND_OFFSET


def bin_codes(levels: Tensor) -> Tensor:
    """Return the code of each index that `bin_of` returns, uint8[INDICES]; 0 for those of NaN alone."""
    exact = levels.double()
    position = torch.arange(BINS, dtype=torch.float64, device=levels.device) / HALF_BINS - 1
    codes = torch.bucketize(position, (exact[1:] + exact[:-1]) / 2).to(torch.uint8)
    return functional.pad(codes, (0, INDICES - BINS))


def level_lookup(levels: Tensor, bits: int) -> ValuesOf:
    """Return a function that returns the levels of a block's codes. levels: fp32[2**bits].

    Where a byte holds whole codes, it is looked up by byte: half as many look-ups or fewer, and no codes are separated.
    """
    if bits not in _LEVELS_OF_BYTE:
        return partial(_levels_of_codes, bits=bits, levels=levels)
    every_byte = torch.arange(256, device=levels.device).to(torch.uint8)
    codes = unpack_bits(every_byte, bits, 256 * 8 // bits)
    return partial(_levels_of_bytes, table=levels.index_select(0, codes.int()).view(_LEVELS_OF_BYTE[bits]))


def _levels_of_codes(stream: Tensor, count: int, bits: int, levels: Tensor) -> Tensor:
    return levels.index_select(0, unpack_bits(stream, bits, count).int())


def _levels_of_bytes(stream: Tensor, count: int, table: Tensor) -> Tensor:
    return table.index_select(0, stream.int()).view(torch.float32)[:count]


def _codes(rows: Tensor, divisors: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, bin_of(rows, divisors).view(-1))
