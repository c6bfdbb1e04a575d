"""Uniform quantization between minus and plus a scale, with 1 to 8 bits: the quantizer of AQ-SGD.

Levels and bit stream follow AQ-SGD (arXiv:2206.01299) and its code. Unlike the original, it decodes all-zero, tiny and
huge tensors without NaN, has useful levels at 1 bit, and offers stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire, check_finite, rounding_bound, saturate_
from acsgd.codecs.bits import pack_bits, packed_bytes, stream_slice, unpack_bits
from acsgd.codecs.cache_update import add_saturated
from acsgd.codecs.kernels import UniformQuantization, kernels_for
from acsgd.codecs.layout import CodedStream, Dims, ScaleLayout, check_dims, encode_blocks, layout_of
from acsgd.codecs.scales import (
    MIN_SCALE,
    Statistic,
    as_divisors,
    decode_scales,
    encode_scales,
    measure,
    scale_fields,
)

CodesOf = Callable[[Tensor, Tensor], Tensor]
"""Quantizer of a block: (fp32 [rows, width], divisors that broadcast against it) -> codes, uint8."""
ROUND_OFFSET = 1.5 * 2.0**23
"""Adding it to |v| < 2**22 rounds v to an integer, half to even, and leaves that integer in the low mantissa bits."""


@dataclass(frozen=True)
class FixPoint:
    """Round x / s to multiples of 2**(1 - bits) in [-1, 1), with a scale s per channel, token, group or tensor.

    With f = 2**(bits - 1): code = clip(round_half_even(x / s * f), -f, f - 1) + f, decoded as (code - f) / f * s. Zero
    is a level; +s is not, so the largest positive element loses one quantization step. At 1 bit the levels are -s and
    s, where s is the mean magnitude, which minimizes the squared error.

    The fastest codec. With 2 bits and more, `lloyd` has a smaller error in the same number of bytes.
    """

    encodes_nan: ClassVar[bool] = False
    RENAMED: ClassVar[dict[str, str]] = {"reach": "clip", "means": "centroids", "squeeze": "entropy_coding"}

    bits: int = 8
    """Bits per element, 1 to 8."""
    scale: Literal["max", "l2"] = "max"
    """Scale s: the largest magnitude, or `clip` times the root mean square, which clips larger elements. "l2" is better
    for 2 and 3 bits on bell-shaped data, and much worse with outliers. No difference at 1 bit."""
    clip: float = 2.0
    """Clipping threshold of scale=l2, root mean squares; in (0, 65536]. A large threshold with many bits gives a
    quantization step that is independent of outliers; most codes are then equal, so `entropy_coding` pays off."""
    dims: Dims = "channel"
    """Elements that share a scale: an index of the last dimension ("channel"), a vector along it ("token"), the whole
    "tensor", or "group" = `group` neighbours."""
    group: int = 0
    """Group size of dims=group, elements. Each group costs a scale of 2 bytes."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of x / s. "stochastic" rounds up or down at random, so that the expectation is x: a larger error, but
    unbiased. The random numbers are seeded by the data, so equal tensors give equal bytes."""
    centroids: bool = False
    """Whether nonzero codes decode to the approximate centroid of their bin, which is closer to 0 than its level: one
    shift, fitted to the tensor, 2 bytes. Removes a third of the error at large quantization steps."""
    entropy_coding: bool = False
    """Whether messages are entropy-coded (codecs/lossless.py). Shortens them if levels are not equally frequent."""

    def __post_init__(self) -> None:
        check_dims(self.bits, self.dims, self.group)
        if not 0 < self.clip <= 2**16:
            raise ValueError(f"clip={self.clip} is outside (0, 65536] root mean squares; 2 is usual")
        if self.rounding == "stochastic" and self.scale != "max":
            raise ValueError("rounding=stochastic needs scale=max: scale=l2 clips, which is biased")
        if self.centroids and (self.rounding == "stochastic" or self.bits == 1):
            raise ValueError(
                "centroids=true needs rounding=nearest and bits=2 or more; 1 bit always decodes to the mean"
            )

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        layout = self._layout(shape)
        stream = Field(torch.uint8, (packed_bytes(layout.numel, self.bits),))
        return stream, *scale_fields(layout), *([Field(torch.float16, (1,))] if self.centroids else [])

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the bit stream, the scales and their exponent, and the centroid shift."""
        flat, layout = x.detach().reshape(-1), self._layout(tuple(x.shape))
        quantization, codes_of, fields = self._prepare(flat, layout)
        if self.rounding == "nearest" and (kernels := kernels_for(layout, x.device, x.dtype)):
            return kernels.encode(flat, quantization), *fields
        return encode_blocks(flat, layout, self.bits, as_divisors(quantization.steps), codes_of), *fields

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the decoded tensor, finite. Computed exactly in fp32, so it is the same on every device."""
        stream, *rest = fields
        quantization = self._quantization(self._layout(shape), *rest)
        if kernels := kernels_for(quantization.layout, stream.device, dtype):
            return kernels.decode(stream, quantization, dtype).view(shape)
        return self._stream(stream, quantization).decode(dtype).view(shape)

    def decoded_blocks(self, fields: tuple[Tensor, ...], shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
        stream, *rest = fields
        quantization = self._quantization(self._layout(shape), *rest)
        if kernels := kernels_for(quantization.layout, stream.device, torch.float32):
            return kernels.decoded_blocks(stream, quantization)
        return self._stream(stream, quantization).blocks()

    def _stream(self, stream: Tensor, quantization: UniformQuantization) -> CodedStream:
        values_of = partial(self._values_of_stream, shift=quantization.shift)
        return CodedStream(stream, quantization.layout, self.bits, quantization.steps, values_of)

    def error_bound(self, x: Tensor) -> Tensor:
        """One quantization step (1.5 with centroids), and what the encoded scale clips."""
        layout, shape = self._layout(tuple(x.shape)), tuple(x.shape)
        size = self._scale(measure(x.detach().reshape(-1), layout, self._statistic))
        scales = decode_scales(*encode_scales(size, round_up=self.rounding == "stochastic"))
        s, magnitude = layout.per_element(scales.double()).view(shape), x.double().abs()
        if self._statistic == "mean":
            return rounding_bound(x, (magnitude - s).abs())
        steps = 1.5 if self.centroids else 1.0
        return rounding_bound(x, steps * s / self._zero + (magnitude - s).clamp(min=0))

    def encode_update(self, x: Tensor, entry: Tensor) -> tuple[Tensor, ...]:
        """Fused version of cache_update.encode_update: block by block, so that a block stays in the CPU cache."""
        flat, cached, layout = x.detach().reshape(-1), entry.view(-1), self._layout(tuple(x.shape))
        difference = torch.empty(layout.numel, dtype=torch.float32, device=x.device)
        for block in layout.blocks(x):
            torch.sub(flat[block].float(), cached[block].float(), out=difference[block])
        quantization, codes_of, fields = self._prepare(difference, layout)
        check_finite(tuple(fields), difference.view(x.shape))
        if self.rounding == "nearest" and (kernels := kernels_for(layout, x.device, x.dtype, entry.dtype)):
            return kernels.encode(flat, quantization, cached), *fields
        stream = torch.empty(packed_bytes(layout.numel, self.bits), dtype=torch.uint8, device=x.device)
        divisors = as_divisors(quantization.steps)
        for block in layout.blocks(x):
            count = block.stop - block.start
            codes = codes_of(layout.rows(difference[block]), layout.scales_of(divisors, block)).view(-1)[:count]
            pack_bits(codes, self.bits, stream_slice(stream, block.start, count, self.bits))
            self._add(codes, quantization, block, cached)
        return stream, *fields

    def decode_update(self, fields: tuple[Tensor, ...], entry: Tensor, dtype: torch.dtype) -> Tensor:
        """Fused version of cache_update.decode_update: block by block, so that a block stays in the CPU cache."""
        stream, *rest = fields
        layout, cached = self._layout(tuple(entry.shape)), entry.view(-1)
        quantization = self._quantization(layout, *rest)
        if kernels := kernels_for(layout, entry.device, entry.dtype, dtype):
            return kernels.decode(stream, quantization, dtype, cached).view(entry.shape)
        y = torch.empty(layout.numel, dtype=dtype, device=entry.device)
        for block in layout.blocks(entry):
            count = block.stop - block.start
            codes = unpack_bits(stream_slice(stream, block.start, count, self.bits), self.bits, count)
            y[block] = saturate_(self._add(codes, quantization, block, cached), dtype)
        return y.view(entry.shape)

    def _prepare(self, flat: Tensor, layout: ScaleLayout) -> tuple[UniformQuantization, CodesOf, list[Tensor]]:
        """Return the quantization of a tensor [numel], its quantizer, and the fields that follow the bit stream."""
        size = measure(flat, layout, self._statistic)
        stochastic = self.rounding == "stochastic"
        codes_of = partial(self._random_codes, generator=_generator(size)) if stochastic else self._nearest_codes
        fields = [*encode_scales(self._scale(size), round_up=stochastic)]
        if self.centroids:
            fields.append(self._shift(flat, layout, self._steps(*fields)))
        return self._quantization(layout, *fields), codes_of, fields

    def _quantization(
        self, layout: ScaleLayout, half: Tensor, exponent: Tensor, shift: Tensor | None = None
    ) -> UniformQuantization:
        if shift is not None:
            shift = shift.float().nan_to_num_(0.0).clamp_(0.0, 0.5)
        return UniformQuantization(self.bits, layout, self._steps(half, exponent), shift)

    def _add(self, codes: Tensor, quantization: UniformQuantization, block: slice, cached: Tensor) -> Tensor:
        """Add decoded codes [n] to a block of a cache entry [numel]. Return the fp32 sum, not saturated."""
        layout = quantization.layout
        values = self._values(layout.rows(codes), quantization.shift)
        values.mul_(layout.scales_of(quantization.steps, block))
        return add_saturated(cached[block], values.view(-1)[: len(codes)])

    def _layout(self, shape: tuple[int, ...]) -> ScaleLayout:
        return layout_of(shape, self.dims, self.group)

    @property
    def _zero(self) -> float:
        """Code of the value 0; at 1 bit halfway between the two codes."""
        return 0.5 if self.bits == 1 else 2.0 ** (self.bits - 1)

    @property
    def _statistic(self) -> Statistic:
        if self.bits == 1 and self.rounding == "nearest":
            return "mean"
        return "max" if self.scale == "max" else "rms"

    def _scale(self, size: Tensor) -> Tensor:
        """Return s; for stochastic rounding such that the largest magnitude, with either sign, lies on a level."""
        if self.bits == 1:
            return size
        if self.rounding == "stochastic":
            return size * (self._zero / (self._zero - 1))
        return size if self.scale == "max" else self.clip * size

    def _steps(self, half: Tensor, exponent: Tensor) -> Tensor:
        """Return the quantization steps, fp32[scales]."""
        return decode_scales(half, exponent) / self._zero

    def _nearest_codes(self, rows: Tensor, divisors: Tensor) -> Tensor:
        if self.bits == 1:
            return (rows >= 0).view(torch.uint8)
        rounded = rows.div(divisors).add_(ROUND_OFFSET + self._zero)  # addcdiv is slower if scales are by row
        return rounded.clamp_(ROUND_OFFSET, ROUND_OFFSET + 2**self.bits - 1).view(torch.int32).to(torch.uint8)

    def _random_codes(self, rows: Tensor, divisors: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.empty_like(rows).uniform_(generator=generator)
        codes = noise.add_(self._zero).addcdiv_(rows, divisors)
        return codes.clamp_(0, 2**self.bits - 1).to(torch.int32).to(torch.uint8)

    def _shift(self, flat: Tensor, layout: ScaleLayout, steps: Tensor) -> Tensor:
        """Return the mean distance of elements from their levels towards 0, steps, 0 to 0.5, fp16[1].

        The mean is weighted with squared steps, so that it minimizes the squared error.
        """
        if not layout.numel:
            return torch.zeros(1, dtype=torch.float16, device=flat.device)
        relative = (steps / steps.max().clamp(min=MIN_SCALE)).square()  # squares of the steps themselves could overflow
        rows, divisors, weights = layout.sample(flat, as_divisors(steps), relative)
        exact = rows / divisors
        level = exact.round().clamp(-self._zero, self._zero - 1)
        weights = weights * (level != 0)
        excess = (level.abs() - exact.abs()).mul_(weights).sum() / weights.sum().clamp(min=MIN_SCALE)
        return excess.clamp(0, 0.5).half().view(1)

    def _values_of_stream(self, stream: Tensor, count: int, shift: Tensor | None) -> Tensor:
        return self._values(unpack_bits(stream, self.bits, count), shift)

    def _values(self, codes: Tensor, shift: Tensor | None) -> Tensor:
        """Return the values of codes, steps."""
        values = codes.float().sub_(self._zero)
        return values if shift is None else values.sub_(values.sign() * shift)


def _generator(size: Tensor) -> torch.Generator:
    """Return a generator seeded by the bits of the measured magnitudes.

    Codecs are stateless, and must not draw from torch's default generator, on which dropout depends.
    """
    return torch.Generator(size.device).manual_seed(int(size.view(torch.int32).sum()))
