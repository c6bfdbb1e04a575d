"""Uniform levels between minus and plus a scale: the quantiser of AQ-SGD, for 1 to 8 bits.

Source of the levels and of the bit stream: AQ-SGD (arXiv 2206.01299) and its code. Unlike there, a tensor that is all
zeros, tiny or huge decodes without NaN, 1 bit is of use, and rounding may be stochastic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire
from acsgd.codecs.bits import pack_bits, packed_bytes, stream_of, unpack_bits
from acsgd.codecs.cache_update import add_saturated
from acsgd.codecs.kernels import Levels, kernels_for
from acsgd.codecs.layout import Dims, Layout, check_dims, decode_blocks, encode_blocks, layout_of
from acsgd.codecs.scales import TINIEST, Measure, divisor, from_wire, measure, scale_fields, to_wire

CodesOf = Callable[[Tensor, Tensor], Tensor]
"""fp32 [rows, width] and the divisors beside them -> codes uint8, as many."""
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

    RENAMED: ClassVar[dict[str, str]] = {"reach": "clip", "means": "centroids", "squeeze": "entropy_coding"}

    bits: int = 8
    """Per element, 1 to 8."""
    scale: Literal["max", "l2"] = "max"
    """s = the largest magnitude, or `clip` times the root mean square, which clips what is larger: better for 2 and 3
    bits on bell-shaped data, very bad where there are outliers. No difference at 1 bit."""
    clip: float = 2.0
    """With scale=l2: s in root mean squares. Large, beside many levels, it makes the levels equally far apart whatever
    the range of the data; most codes are then the same few, which `entropy_coding` makes short."""
    dims: Dims = "channel"
    """Which elements share a scale: an index of the last dimension, a vector along it, all, or `group` neighbours."""
    group: int = 0
    """Elements that share a scale, where dims is "group"; each scale is 2 bytes."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """"stochastic": up or down at random, so that the expectation is x. Larger errors than nearest, but they average
    out over time. The randomness comes from the data: the same x always gives the same bytes, another x others."""
    centroids: bool = False
    """Whether what is not 0 decodes to about the mean of what was rounded to its code, which lies nearer to 0 than the
    level: a share of a step, fitted to the tensor, 2 bytes. With wide levels a third of the error goes."""
    entropy_coding: bool = False
    """Whether messages pass an entropy coder (codecs/entropy.py): shorter where levels are not equally frequent."""

    def __post_init__(self) -> None:
        check_dims(self.bits, self.dims, self.group)
        if not 0 < self.clip <= 2**16:
            raise ValueError(f"clip={self.clip} must lie between 0 and 65536 root mean squares; 2 is usual")
        if self.rounding == "stochastic" and self.scale != "max":
            raise ValueError("rounding=stochastic is unbiased only with scale=max, since scale=l2 clips")
        if self.centroids and (self.rounding == "stochastic" or self.bits == 1):
            raise ValueError(
                "centroids=true needs rounding=nearest and bits=2 or more; 1 bit always decodes to the mean"
            )

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        layout = self._layout(shape)
        stream = Field(torch.uint8, (packed_bytes(layout.numel, self.bits),))
        return stream, *scale_fields(layout), *([Field(torch.float16, (1,))] if self.centroids else [])

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Raises NotFiniteError."""
        shape, flat = tuple(x.shape), x.detach().reshape(-1)
        layout = self._layout(shape)
        levels, codes_of, fields = self._prepare(flat, layout, shape)
        if self.rounding == "nearest" and (kernels := kernels_for(layout, x.device, x.dtype)):
            return kernels.encode(flat, levels), *fields
        return encode_blocks(flat, layout, self.bits, divisor(levels.steps), codes_of), *fields

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor; exact in fp32, so it is the same on every device."""
        stream, *rest = fields
        layout = self._layout(shape)
        levels = self._levels(layout, *rest)
        if kernels := kernels_for(layout, stream.device, dtype):
            return kernels.decode(stream, levels, dtype).view(shape)
        values_of = partial(self._values, inwards=levels.inwards)
        return decode_blocks(stream, layout, self.bits, levels.steps, dtype, values_of).view(shape)

    def encode_update(self, x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        """See acsgd.codecs.difference; done block by block, since a block stays in the cache."""
        shape, flat, memory = tuple(x.shape), x.detach().reshape(-1), m.view(-1)
        layout = self._layout(shape)
        difference = torch.empty(layout.numel, dtype=torch.float32, device=x.device)
        for block in layout.blocks(x.device):
            torch.sub(flat[block].float(), memory[block].float(), out=difference[block])
        levels, codes_of, fields = self._prepare(difference, layout, shape)
        if self.rounding == "nearest" and (kernels := kernels_for(layout, x.device, x.dtype, m.dtype)):
            return kernels.encode(flat, levels, memory), *fields
        stream = torch.empty(packed_bytes(layout.numel, self.bits), dtype=torch.uint8, device=x.device)
        divisors = divisor(levels.steps)
        for block in layout.blocks(x.device):
            count = block.stop - block.start
            codes = codes_of(layout.rows(difference[block]), layout.beside(divisors, block)).view(-1)[:count]
            pack_bits(codes, self.bits, stream_of(stream, block.start, count, self.bits))
            self._add(codes, levels, block, memory)
        return stream, *fields

    def decode_update(self, fields: tuple[Tensor, ...], m: Tensor, dtype: torch.dtype) -> Tensor:
        """See acsgd.codecs.difference; done block by block, since a block stays in the cache."""
        stream, *rest = fields
        layout, memory = self._layout(tuple(m.shape)), m.view(-1)
        levels = self._levels(layout, *rest)
        if kernels := kernels_for(layout, m.device, m.dtype, dtype):
            return kernels.decode(stream, levels, dtype, memory).view(m.shape)
        y = torch.empty(layout.numel, dtype=dtype, device=m.device)
        for block in layout.blocks(m.device):
            count = block.stop - block.start
            codes = unpack_bits(stream_of(stream, block.start, count, self.bits), self.bits, count)
            y[block] = self._add(codes, levels, block, memory)
        return y.view(m.shape)

    def _prepare(self, flat: Tensor, layout: Layout, shape: tuple[int, ...]) -> tuple[Levels, CodesOf, list[Tensor]]:
        """Return the levels for a tensor [numel], what makes codes of it, and the fields that travel with them."""
        size = measure(flat, layout, self._measure, shape)
        stochastic = self.rounding == "stochastic"
        codes_of = partial(self._draw_codes, draw=_randomness(size)) if stochastic else self._nearest_codes
        fields = [*to_wire(self._scale(size), up=stochastic)]
        if self.centroids:
            fields.append(self._inwards(flat, layout, self._steps(*fields)))
        return self._levels(layout, *fields), codes_of, fields

    def _levels(self, layout: Layout, half: Tensor, exponent: Tensor, inwards: Tensor | None = None) -> Levels:
        return Levels(self.bits, layout, self._steps(half, exponent), None if inwards is None else inwards.float())

    def _add(self, codes: Tensor, levels: Levels, block: slice, memory: Tensor) -> Tensor:
        """Add to a block of the memory [numel] what its codes [n] stand for; return the sum, fp32, not saturated."""
        layout = levels.layout
        values = self._values(layout.rows(codes), levels.inwards).mul_(layout.beside(levels.steps, block))
        return add_saturated(memory[block], values.view(-1)[: len(codes)])

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
        return size if self.scale == "max" else self.clip * size

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

    def _inwards(self, flat: Tensor, layout: Layout, steps: Tensor) -> Tensor:
        """Return by how many steps, 0 to 0.5, elements are nearer to 0 than their levels in the mean, fp16[1].

        The mean is weighted with the squares of steps, so that it makes the squared error least.
        """
        if not layout.numel:
            return torch.zeros(1, dtype=torch.float16, device=flat.device)
        relative = (steps / steps.max().clamp(min=TINIEST)).square()  # steps squared might overflow
        rows, divisors, weights = layout.sample(flat, divisor(steps), relative)
        exact = rows / divisors
        level = exact.round().clamp(-self._zero, self._zero - 1)
        weights = weights * (level != 0)
        excess = (level.abs() - exact.abs()).mul_(weights).sum() / weights.sum().clamp(min=TINIEST)
        return excess.clamp(0, 0.5).half().view(1)

    def _values(self, codes: Tensor, inwards: Tensor | None) -> Tensor:
        values = codes.float().sub_(self._zero)
        return values if inwards is None else values.sub_(values.sign() * inwards)


def _randomness(size: Tensor) -> torch.Generator:
    """Return a generator seeded by the bits of the measured magnitudes.

    A codec has neither state nor rank, and must not draw from torch's own generator, on which dropout depends.
    """
    return torch.Generator(size.device).manual_seed(int(size.view(torch.int32).sum()))
