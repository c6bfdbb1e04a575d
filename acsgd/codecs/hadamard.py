"""Quantization of small rotated groups, in which outliers are spread; groups with large scales get more bits.

For data without a cache, which is sent once. Source: TAH-Quant (arXiv:2506.01352): tiles along the token, a Hadamard
rotation, 3 or 4 bits per tile. Here the scale of a tile is one byte instead of two numbers, and also determines its
number of bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire, rounding_bound
from acsgd.codecs.bits import packed_bytes
from acsgd.codecs.layout import CodedStream, ScaleLayout, ValuesOf, encode_blocks
from acsgd.codecs.lloyd import HALF_BINS, bin_codes, bin_of, fit_levels, level_lookup
from acsgd.codecs.scales import as_divisors, measure

BIN_RANGE = 8.0
"""Range of the histogram bins, root mean squares; the outermost level of 8 bits is at 5."""
SCALES_PER_OCTAVE = 8
"""Resolution of the scales: at most 4.4 % rounding error, over 31 octaves below the largest scale."""
MAX_SCALE = 2.0**119
"""Larger scales are clipped to this number, so that a decoded element, a sum of up to 1024 levels / 32, is finite."""


@dataclass(frozen=True)
class Hadamard:
    """Rotate groups of neighbours, divide by their root mean square, round to the optimal levels for a normal variable.

    The `fraction` of the groups with the largest scales has `bits` bits per element, the others `low`. Rotated elements
    are sums of many, so they are nearly normal for any data. The rotation is a matrix product, whose rounding differs
    between devices: two ends that need bit-identical results need the same kind of device.

    With bits=4,low=4 (4.13 bits per element) the relative error is .089 to .097 on normal, Laplace, Student t and
    rectified data, also where every token or channel has its own magnitude (benchmarks/codecs/speed.py). A scale per
    channel cannot follow tokens: there, and on Student t with 3 degrees, `lloyd` has .14 and `fixpoint` .26 to .31. On
    normal and rectified data `lloyd` is as good or better; with dims=group,group=64 (4.25 bits) it is about as robust.
    Fewer bits for small groups help only where groups differ in magnitude: with tokens of different magnitude,
    bits=5,low=3,fraction=0.5 turns .097 into .059 in the same bytes. The slowest codec: a quarter of the speed of
    `fixpoint`.
    """

    entropy_coding: ClassVar[bool] = False
    encodes_nan: ClassVar[bool] = False
    RENAMED: ClassVar[dict[str, str]] = {"share": "fraction"}

    bits: int = 4
    """Bits per element of the groups with the larger scales, 1 to 8."""
    low: int = 3
    """Bits per element of the other groups, 1 to `bits`."""
    fraction: float = 0.8
    """Fraction of the groups that have `bits` bits, 0 to 1."""
    group: int = 64
    """Group size, elements: a power of two from 2 to 1024. Each group costs a scale of 1 byte."""

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
        """Return the largest scale, a code of each scale, and a bit stream per part."""
        shape = tuple(x.shape)
        layout = self._layout(self._groups(shape))
        rows = layout.rows(x.detach().reshape(-1))
        size = measure(rows.view(-1), layout, "rms")
        largest = size.amax().view(1) if len(size) else size.new_zeros(1)
        scale_codes = _scale_codes(size, largest)
        scales, streams = as_divisors(_scales(scale_codes, largest)), []
        for (part, bits), groups in zip(self._parts(layout.scales), self._split(scale_codes), strict=True):
            codes_of = partial(_codes, bits=bits)
            streams.append(encode_blocks(rows.index_select(0, groups).view(-1), part, bits, scales[groups], codes_of))
        return largest, scale_codes, *streams

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        largest, scale_codes, *streams = fields
        count, scales = self._groups(shape), _scales(scale_codes, largest)
        rows = torch.empty(count, self.group, dtype=dtype, device=scale_codes.device)
        parts = zip(self._parts(count), self._split(scale_codes), streams, strict=True)
        for (part, bits), groups, stream in parts:
            levels_of = level_lookup(_normal_values(bits, stream.device), bits)
            values_of = partial(_values, levels_of=levels_of, group=self.group)
            decoded = CodedStream(stream, part, bits, scales[groups], values_of).decode(dtype)
            rows.index_copy_(0, groups, decoded.view(-1, self.group))
        return rows.view(-1)[: math.prod(shape)].view(shape)

    def error_bound(self, x: Tensor) -> Tensor:
        """The norm of the error of the element's rotated group, which bounds the error of each element.

        A rotated element is off by half the widest gap between levels and a histogram bin, or by what lies beyond the
        outermost level. Rotations keep norms.
        """
        shape = tuple(x.shape)
        layout = self._layout(self._groups(shape))
        size = measure(layout.rows(x.detach().reshape(-1)).view(-1), layout, "rms")
        largest = size.amax().view(1) if len(size) else size.new_zeros(1)
        scales = _scales(_scale_codes(size, largest), largest).double()
        low, root = normal_levels(self.low), math.sqrt(self.group)
        widest_gap = max(float(normal_levels(bits).diff().max()) for bits in (self.low, self.bits))
        inside = root * scales * (widest_gap / 2 + BIN_RANGE / HALF_BINS)
        beyond = (root * size.double() - scales * float(low.max())).clamp(min=0)
        rounding = root * size.double() * self.group * torch.finfo(torch.float32).eps  # of the matrix products
        bound = layout.per_element(inside + beyond + rounding)[: x.numel()].view(shape)
        return rounding_bound(x, bound)

    def _groups(self, shape: tuple[int, ...]) -> int:
        """Return the number of groups; the last one is padded with zeros."""
        return -(-math.prod(shape) // self.group)

    def _layout(self, groups: int) -> ScaleLayout:
        return ScaleLayout(groups * self.group, self.group, by_column=False)

    def _parts(self, groups: int) -> tuple[tuple[ScaleLayout, int], tuple[ScaleLayout, int]]:
        """Return the layout and the bits of the groups with the larger scales, and of the others."""
        large = round(self.fraction * groups)
        return (self._layout(large), self.bits), (self._layout(groups - large), self.low)

    def _split(self, scale_codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the groups of both parts. Depends only on data that both ends have."""
        order = torch.sort(scale_codes, descending=True, stable=True).indices
        large = round(self.fraction * len(scale_codes))
        return order[:large], order[large:]


def _scale_codes(size: Tensor, largest: Tensor) -> Tensor:
    """Return scales as steps of 1 / SCALES_PER_OCTAVE octaves, uint8: 255 is the largest; 0 is a scale of 0."""
    octaves = torch.log2(size) - torch.log2(largest)
    steps = (octaves * SCALES_PER_OCTAVE).round_().add_(255).clamp_(0, 255)
    return torch.where(size > 0, steps, 0).to(torch.uint8)


def _scales(scale_codes: Tensor, largest: Tensor) -> Tensor:
    """Return the scales of codes, fp32."""
    clipped = largest.nan_to_num(0.0).clamp_(0.0, MAX_SCALE)
    return _relative_scales(largest.device)[scale_codes.int()] * clipped


def _codes(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    rotated = (rows / scales) @ _rotation(rows.shape[1], rows.device)
    bins = bin_of(rotated, rows.new_full((), BIN_RANGE / HALF_BINS))
    return _normal_codes(bits, rows.device).index_select(0, bins.view(-1))


def _values(stream: Tensor, count: int, levels_of: ValuesOf, group: int) -> Tensor:
    return (levels_of(stream, count).view(-1, group) @ _rotation(group, stream.device).T).view(-1)


@lru_cache
def normal_levels(bits: int) -> Tensor:
    """Return the levels, float64[2**bits], with the least squared error for a standard normal variable."""
    position = torch.linspace(-BIN_RANGE, BIN_RANGE, 2 * HALF_BINS + 1, dtype=torch.float64)
    return fit_levels((position.square() / -2).exp(), 2**bits) * BIN_RANGE


@lru_cache
def _normal_values(bits: int, device: torch.device) -> Tensor:
    """Return these levels in fp32 on a device."""
    return normal_levels(bits).float().to(device)


@lru_cache
def _normal_codes(bits: int, device: torch.device) -> Tensor:
    """Return the code of each index of `bin_of` for a standard normal variable, uint8[INDICES]."""
    return bin_codes(normal_levels(bits) / BIN_RANGE).to(device)


@lru_cache
def _relative_scales(device: torch.device) -> Tensor:
    """Return the scale of each code relative to the largest, fp32[256]. On the host, since exp2 of devices differs."""
    powers = (2.0 ** ((code - 255) / SCALES_PER_OCTAVE) for code in range(1, 256))
    return torch.tensor([0.0, *powers], device=device)


@lru_cache
def _rotation(size: int, device: torch.device) -> Tensor:
    """Return an orthonormal matrix of +-1 / sqrt(size): a Hadamard matrix with the signs of some rows changed.

    It spreads every single outlier evenly. The signs (a Rudin-Shapiro sequence) make it also spread a constant, which
    the plain Hadamard matrix would turn into an outlier.
    """
    index = torch.arange(size)
    signs = 1 - 2 * (_popcount(index & index >> 1) % 2)
    hadamard = 1 - 2 * (_popcount(index[:, None] & index) % 2)
    return (signs[:, None] * hadamard / math.sqrt(size)).to(device)


def _popcount(numbers: Tensor) -> Tensor:
    """Return the number of ones in the binary form of numbers below 1024."""
    return sum((numbers >> place & 1 for place in range(10)), torch.zeros_like(numbers))
