"""Uniform levels between minus and plus a scale: the quantiser of AQ-SGD, for 1 to 8 bits.

Source of the levels and of the bit stream: AQ-SGD (arXiv 2206.01299) and its code. Unlike there, a tensor that is all
zeros, tiny or huge decodes without NaN, 1 bit is of use, and rounding may be stochastic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire
from acsgd.codecs.bits import packed_bytes
from acsgd.codecs.layout import Dims, Layout, check_dims, decode_blocks, encode_blocks, layout_of
from acsgd.codecs.scales import Measure, divisor, from_wire, measure, scale_fields, to_wire

ROUND = 1.5 * 2.0**23
"""Added to |v| < 2**22 it leaves no digits behind the point: v rounded half to even sits in the low bits of the sum."""


@dataclass(frozen=True)
class FixPoint:
    """Round x / s to multiples of 2**(1 - bits) in [-1, 1); s is a scale per channel, token, group or tensor.

    With f = bits - 1: code = clip(round_half_even(x / s * 2**f), -2**f, 2**f - 1) + 2**f, and it decodes to
    (code - 2**f) / 2**f * s. Zero is a level; plus s is none, so the largest positive element loses one step. At 1 bit
    the levels are -s and s, where s is the mean magnitude, which minimises the squared error.

    The fastest codec, and the one of AQ-SGD. At 2 bits and more, `lloyd` has a smaller error in as many bytes.
    """

    bits: int = 8
    """Per element, 1 to 8."""
    scale: Literal["max", "l2"] = "max"
    """s = the largest magnitude, or twice the root mean square, which clips what is larger: better for 2 and 3 bits
    on bell-shaped data, very bad where there are outliers. No difference at 1 bit."""
    dims: Dims = "channel"
    """Which elements share a scale: an index of the last dimension, a vector along it, all, or `group` neighbours."""
    group: int = 0
    """Elements that share a scale, where dims is "group"; each scale is 2 bytes."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """"stochastic": up or down at random, so that the expectation is x. Larger errors than nearest, but they average
    out over time. The randomness comes from the data: the same x always gives the same bytes, another x others."""

    def __post_init__(self) -> None:
        check_dims(self.bits, self.dims, self.group)
        if self.rounding == "stochastic" and self.scale != "max":
            raise ValueError("rounding=stochastic is unbiased only with scale=max, since scale=l2 clips")

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        layout = self._layout(shape)
        return Field(torch.uint8, (packed_bytes(layout.numel, self.bits),)), *scale_fields(layout)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Raises NotFiniteError."""
        shape, flat = tuple(x.shape), x.detach().reshape(-1)
        layout = self._layout(shape)
        size = measure(flat, layout, self._measure, shape)
        stochastic = self.rounding == "stochastic"
        scales = to_wire(self._scale(size), up=stochastic)
        codes_of = partial(self._draw_codes, draw=_randomness(size)) if stochastic else self._nearest_codes
        return encode_blocks(flat, layout, self.bits, divisor(self._steps(*scales)), codes_of), *scales

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor; exact in fp32, so it is the same on every device."""
        stream, half, exponent = fields
        steps = self._steps(half, exponent)
        return decode_blocks(stream, self._layout(shape), self.bits, steps, dtype, self._values).view(shape)

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        return layout_of(shape, self.dims, self.group)

    @property
    def _zero(self) -> float:
        """The code that stands for 0; at 1 bit it would lie between the two that exist."""
        return 0.5 if self.bits == 1 else 2.0 ** (self.bits - 1)

    @property
    def _measure(self) -> Measure:
        if self.bits == 1 and self.rounding == "nearest":
            return "mean"
        return "max" if self.scale == "max" else "rms"

    def _scale(self, size: Tensor) -> Tensor:
        """Return s; for stochastic rounding such that the largest element, of either sign, lies on a level."""
        if self.bits == 1:
            return size
        if self.rounding == "stochastic":
            return size * (self._zero / (self._zero - 1))
        return size if self.scale == "max" else 2 * size

    def _steps(self, half: Tensor, exponent: Tensor) -> Tensor:
        """Return the distance between neighbouring levels, fp32[scales]."""
        return from_wire(half, exponent) / self._zero

    def _nearest_codes(self, rows: Tensor, steps: Tensor) -> Tensor:
        if self.bits == 1:
            return (rows >= 0).view(torch.uint8)
        lowest = ROUND
        rounded = torch.addcdiv(rows.new_full((), lowest + self._zero), rows, steps)
        return rounded.clamp_(lowest, lowest + 2**self.bits - 1).view(torch.int32).to(torch.uint8)

    def _draw_codes(self, rows: Tensor, steps: Tensor, draw: torch.Generator) -> Tensor:
        lifted = torch.empty_like(rows).uniform_(generator=draw).add_(self._zero).addcdiv_(rows, steps)
        return lifted.clamp_(0, 2**self.bits - 1).to(torch.int32).to(torch.uint8)

    def _values(self, codes: Tensor) -> Tensor:
        return codes.float().sub_(self._zero)


def _randomness(size: Tensor) -> torch.Generator:
    """Return a generator seeded by the bits of the measured magnitudes.

    A codec has neither state nor rank, and must not draw from torch's own generator, on which dropout depends.
    """
    return torch.Generator(size.device).manual_seed(int(size.view(torch.int32).sum()))
