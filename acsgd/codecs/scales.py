"""How large the elements are that share a scale, and how scales travel."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from acsgd.codecs.base import Field, NotFiniteError, Wire
from acsgd.codecs.layout import Layout

Measure = Literal["max", "mean", "rms"]

TINIEST = 2.0**-110
"""Scales below count as 0, so that a scale divided by the number of levels is still a normal fp32 number."""
_LARGEST = (2 - 2.0**-10) * 2.0**126
"""Scales above are clipped to this, half of what fp32 can hold, in the digits of fp16: twice a scale is finite."""


def measure(flat: Tensor, layout: Layout, kind: Measure, shape: tuple[int, ...]) -> Tensor:
    """Return the largest magnitude, mean magnitude or root mean square of each scale's elements, fp32[scales].

    flat: [numel]; shape: for the error. Raises NotFiniteError if an element is not finite: each of these measures
    carries it along, so looking for one costs no pass over the data, but on a GPU a wait for the result. Squares are
    summed in fp32: a root mean square below 1e-19 loses digits, and below 1e-22 it is 0.
    """
    result = _measure(flat, layout, kind)
    if not result.isfinite().all():
        _refuse_non_finite(flat, shape)
        result = _measure(flat.double(), layout, kind)  # a sum overflowed
    return result.float()


def scale_fields(layout: Layout) -> Wire:
    """Declare what `to_wire` returns."""
    return Field(torch.float16, (layout.scales,)), Field(torch.int8, (1,))


def to_wire(scales: Tensor, *, up: bool = False) -> tuple[Tensor, Tensor]:
    """Return fp32 scales >= 0 as fp16 multiples of one power of two, and its exponent, int8[1].

    Each is rounded to nearest, or never down where `up`. fp16 alone ends at 65504 and at 6e-8, where gradients may
    live; the common power puts the largest scale into [2**14, 2**15]. Scales below 2**-40 of it become 0.
    """
    scales = torch.where(scales < TINIEST, 0, scales).clamp(max=_LARGEST)
    largest = functional.pad(scales, (0, 1)).amax()
    exponent = (torch.frexp(largest).exponent - 15).clamp(-124, 113).to(torch.int8).view(1)
    shifted = scales * _power_of_two(-exponent.int())
    half = shifted.half()
    if up:
        half = (half.view(torch.int16) + (half.float() < shifted)).view(torch.float16)
    return half, exponent


def from_wire(half: Tensor, exponent: Tensor) -> Tensor:
    """Return the scales as fp32, exactly."""
    return half.float() * _power_of_two(exponent.int())


def divisor(steps: Tensor) -> Tensor:
    """Return fp32 steps as divisors: a step of 0 becomes infinite, so that its elements count as 0."""
    return torch.where(steps == 0, torch.inf, steps)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2.0 ** int32, from -126 to 127, exactly: made of the bits of an fp32 number, since pow may round."""
    return (exponent + 127 << 23).view(torch.float32)


def _measure(flat: Tensor, layout: Layout, kind: Measure) -> Tensor:
    dim = 0 if layout.by_column else 1
    parts = [_reduce(layout.rows(flat[block]), kind, dim) for block in layout.blocks(flat.device)]
    if not parts:
        return flat.new_zeros(0)
    if not layout.by_column:
        return _finish(torch.cat(parts), kind, _row_lengths(layout, flat.device))
    stacked = torch.stack(parts)
    total = stacked.amax(0) if kind == "max" else stacked.sum(0)
    return _finish(total, kind, torch.full((1,), layout.numel // layout.width, device=flat.device))


def _reduce(rows: Tensor, kind: Measure, dim: int) -> Tensor:
    if kind == "max":
        return rows.abs().amax(dim)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    return (rows.abs() if kind == "mean" else rows.square()).sum(dim)


def _finish(total: Tensor, kind: Measure, counts: Tensor) -> Tensor:
    if kind == "max":
        return total
    return total / counts if kind == "mean" else (total / counts).sqrt()


def _row_lengths(layout: Layout, device: torch.device) -> Tensor:
    lengths = torch.full((layout.scales,), layout.width, device=device)
    lengths[-1] = layout.numel - (layout.scales - 1) * layout.width
    return lengths


def _refuse_non_finite(flat: Tensor, shape: tuple[int, ...]) -> None:
    for first in (~flat.isfinite()).nonzero()[:1].flatten():
        place = tuple(int(i) for i in torch.unravel_index(first, shape))
        raise NotFiniteError(f"cannot encode {flat[first].item()} at index {place} of a tensor of shape {shape}")
