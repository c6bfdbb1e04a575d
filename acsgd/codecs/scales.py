"""Scales: their measurement from data, and their encoding as 16-bit fields."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from acsgd.codecs.base import Field, Wire
from acsgd.codecs.bits import has_values
from acsgd.codecs.layout import ScaleLayout

Statistic = Literal["max", "mean", "rms"]
"""Largest magnitude, mean magnitude or root mean square."""

MIN_SCALE = 2.0**-110
"""Smaller scales count as 0, so that a scale divided by the number of levels is a normal fp32 number."""
_MAX_SCALE = (2 - 2.0**-10) * 2.0**126
"""Larger scales are clipped to this number, half the fp32 range and exact in fp16 digits: twice a scale is finite."""

_EXPONENTS = -124, 113
"""Range of the common exponent of scales."""


def measure(flat: Tensor, layout: ScaleLayout, statistic: Statistic) -> Tensor:
    """Return a statistic of the elements that share each scale, fp32[scales]; NaN if any element is not finite.

    Statistics propagate NaN and infinity, so that this takes no extra pass over the elements, and no host waits for a
    device. A root mean square below 1e-19 of the largest element loses digits.

    flat: elements, [numel].
    """
    result = _measure(flat, layout, statistic)
    return torch.where(result.isfinite().all(), result, torch.nan).float()


def scale_fields(layout: ScaleLayout) -> Wire:
    """Return the fields of `encode_scales`."""
    return Field(torch.float16, (layout.scales,)), Field(torch.int8, (1,))


def encode_scales(scales: Tensor, *, round_up: bool = False) -> tuple[Tensor, Tensor]:
    """Encode fp32 scales >= 0 as fp16 multiples of a common power of two. Return these and the exponent, int8[1].

    The power of two puts the largest scale into [2**14, 2**15]: plain fp16 would end at 65504 and at 6e-8, where
    gradients may lie. Scales are rounded to nearest, or with `round_up` never down. Scales below 2**-40 of the largest
    become 0. If one is NaN, all are encoded as NaN, which `holds_nan` finds.
    """
    scales = torch.where(scales < MIN_SCALE, 0, scales).clamp(max=_MAX_SCALE)
    largest = functional.pad(scales, (0, 1)).amax()
    exponent = (torch.frexp(largest).exponent - 15).clamp(*_EXPONENTS).to(torch.int8).view(1)
    shifted = scales * _power_of_two(-exponent.int())
    half = torch.where(largest.isnan(), torch.nan, shifted).half()
    if round_up:
        half = (half.view(torch.int16) + (half.float() < shifted)).view(torch.float16)
    return half, exponent


def decode_scales(half: Tensor, exponent: Tensor) -> Tensor:
    """Return encoded scales as fp32, exactly. Fields that `encode_scales` never returns give finite scales, too."""
    scales = half.float() * _power_of_two(exponent.int().clamp(*_EXPONENTS))
    return scales.nan_to_num_(0.0).clamp_(0.0, _MAX_SCALE)


def as_divisors(steps: Tensor) -> Tensor:
    """Return quantization steps, fp32, as divisors: a step of 0 becomes infinite, so that its elements count as 0."""
    return torch.where(steps == 0, torch.inf, steps)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2.0**exponent, fp32, exactly (pow may round). exponent: int32, from -126 to 127."""
    return (exponent + 127 << 23).view(torch.float32)


def _measure(flat: Tensor, layout: ScaleLayout, statistic: Statistic) -> Tensor:
    if not layout.numel:
        return flat.new_zeros(0)
    dim = 0 if layout.by_column else 1
    unit = flat.new_ones(()) if statistic == "max" else _unit_of(flat)
    parts = [_reduce(layout.rows(flat[block]), statistic, dim, unit) for block in layout.blocks(flat)]
    if not has_values(flat):  # there is one block
        return torch.empty(layout.scales, device=flat.device)
    if not layout.by_column:
        return _finish(torch.cat(parts), statistic, _row_lengths(layout, flat.device), unit)
    stacked = torch.stack(parts)
    total = stacked.amax(0) if statistic == "max" else stacked.sum(0)
    return _finish(total, statistic, torch.full((1,), layout.numel // layout.width, device=flat.device), unit)


def _unit_of(flat: Tensor) -> Tensor:
    """Return a power of two near the largest magnitude, fp32. Sums of numbers in this unit do not overflow."""
    least, most = flat.aminmax()
    return _power_of_two(torch.frexp(torch.maximum(-least, most).float()).exponent.clamp(-126, 126))


def _reduce(rows: Tensor, statistic: Statistic, dim: int, unit: Tensor) -> Tensor:
    if statistic == "max":
        return rows.abs().amax(dim)
    scaled = rows.float() / unit
    return (scaled.abs_() if statistic == "mean" else scaled.square_()).sum(dim)


def _finish(total: Tensor, statistic: Statistic, counts: Tensor, unit: Tensor) -> Tensor:
    if statistic == "max":
        return total
    return unit * (total / counts if statistic == "mean" else (total / counts).sqrt())


def _row_lengths(layout: ScaleLayout, device: torch.device) -> Tensor:
    lengths = torch.full((layout.scales,), layout.width, device=device)
    lengths[-1] = layout.numel - (layout.scales - 1) * layout.width
    return lengths
