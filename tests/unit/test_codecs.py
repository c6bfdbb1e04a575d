"""Laws of every codec in the table: declared bytes are the bytes sent, and decoding is within the derived bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from acsgd import codecs
from acsgd.codecs.base import ALIGNMENT, Codec, pack, unpack, wire_bytes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.hadamard import REACH, Hadamard, normal_levels
from acsgd.codecs.identity import Identity
from acsgd.codecs.lloyd import HALF, Lloyd

SPECS = [
    *codecs.CODECS,
    *(f"none:dtype={dtype}" for dtype in ("fp32", "bf16", "fp16")),
    *(f"fixpoint:bits={bits}" for bits in range(1, 8)),
    *(f"fixpoint:bits={bits},rounding=stochastic,dims=token" for bits in (1, 2, 4, 8)),
    *(f"fixpoint:bits={bits},scale=l2,dims=tensor" for bits in (1, 2, 4, 8)),
    *(f"fixpoint:bits={bits},dims=group,group=12" for bits in (1, 3, 8)),
    *(f"fixpoint:bits={bits},scale=l2,clip={clip},entropy_coding=true" for bits, clip in ((2, 4), (4, 20), (8, 64))),
    *(
        f"fixpoint:bits={bits},centroids=true,dims={dims}"
        for bits, dims in ((2, "channel"), (3, "token"), (4, "tensor"))
    ),
    *(f"lloyd:bits={bits}" for bits in (1, 2, 3, 8)),
    *("lloyd:dims=token", "lloyd:dims=tensor", "lloyd:dims=group,group=12"),
    *(
        "hadamard:bits=8,low=1,fraction=0.3,group=2",
        "hadamard:fraction=0",
        "hadamard:fraction=1,bits=2,low=2,group=1024",
    ),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST_HALF = 2.0**-25
"""Half the smallest subnormal of fp16: the most that rounding towards zero loses near zero."""
FAR_BELOW = 2.0**-40
"""Scales that are smaller, relative to the largest, may be lost."""


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "gaussian": torch.randn(2, 7, 16, generator=draw),
        "one element": torch.tensor([0.3]),
        "no dimension": torch.tensor(-0.3),
        "empty": torch.empty(3, 0, 5),
        "empty vectors": torch.empty(3, 0),
        "zeros": torch.zeros(3, 5),
        "constant": torch.full((9, 7), -2.5),
        "odd sizes": torch.randn(3, 5, 7, generator=draw),
        "outlier": torch.cat([torch.randn(63, generator=draw), torch.tensor([6e4])]),
        "outlier channel": torch.randn(40, 10, generator=draw) * torch.tensor([1.0] * 9 + [500.0]),
        "heavy tails": (torch.randn(1000, generator=draw) / torch.rand(1000, generator=draw)).clamp(-6e4, 6e4),
        "not contiguous": torch.randn(8, 6, generator=draw).T,
    }


def over_the_wire(codec: Codec, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, int]:
    wire = codec.wire(tuple(x.shape), x.dtype)
    fields = codec.encode(x)
    assert [(f.dtype, tuple(f.shape)) for f in fields] == [(f.dtype, f.shape) for f in wire]
    buffer = torch.empty(wire_bytes(wire), dtype=torch.uint8)
    pack(fields, buffer)
    return codec.decode(unpack(buffer, wire), tuple(x.shape), dtype or x.dtype), sum(f.nbytes for f in fields)


# The most that one element may change, per codec, derived from the input alone. A codec that is not listed must at
# least not be worse than sending nothing.


def identity_bound(codec: Identity, x: Tensor, dtype: torch.dtype) -> Tensor:
    on_wire = codec.wire(tuple(x.shape), dtype)[0].dtype
    return (UNIT_ROUNDOFF[on_wire] if on_wire != dtype else 0) * x.abs() + (SMALLEST_HALF if on_wire != dtype else 0)


def over_group(x: Tensor, dims: str, group: int, statistic: str) -> Tensor:
    """The statistic of the elements that share a scale with an element, for every element."""
    flat = x.reshape(-1)
    if not x.numel():
        return x
    if dims in ("channel", "tensor"):
        parts = list(flat.view(-1, x.shape[-1] if dims == "channel" and x.dim() else 1).T)
        parts = parts if dims == "channel" else [flat]
    else:
        parts = list(flat.split(group or (x.shape[-1] if x.dim() else 1)))
    value = {"max": torch.amax, "mean": torch.mean, "rms": lambda part: part.square().mean().sqrt()}[statistic]
    filled = [value(part.abs()).expand_as(part) for part in parts]
    return (torch.stack(filled, 1) if dims == "channel" else torch.cat(filled)).reshape(x.shape)


def fixpoint_bound(codec: FixPoint, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A step, and what the rounding of s to fp16 moves the levels, at most s / 2**11."""
    last = 2 ** (codec.bits - 1)
    if codec.rounding == "stochastic":
        peak = over_group(x, codec.dims, codec.group, "max")
        return peak * (1 + 2 * UNIT_ROUNDOFF[torch.float16]) * (2 if last == 1 else 1 / (last - 1))
    if codec.bits == 1:
        mean = over_group(x, codec.dims, codec.group, "mean")
        return (x.abs() - mean).abs() + mean * UNIT_ROUNDOFF[torch.float16]
    statistic, factor = ("max", 1) if codec.scale == "max" else ("rms", codec.clip)
    s = factor * over_group(x, codec.dims, codec.group, statistic)
    inwards = 0.5 / last if codec.centroids else 0.0
    return s * (1 / last + inwards + UNIT_ROUNDOFF[torch.float16]) + (x.abs() - s).clamp(min=0)


def lloyd_bound(codec: Lloyd, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest of the levels that travel, up to a cell: an element's own place in it, and the tie it may decide."""
    fields = codec.encode(x.to(dtype))
    levels = fields[3].double()
    peak = over_group(x, codec.dims, codec.group, "max")
    s = (peak * 2.0 ** -fields[2].double()).half().double() * 2.0 ** fields[2].double()
    nearest = (x[..., None] - s[..., None] * levels).abs().amin(-1)
    return nearest + s * (2 * 0.5 / HALF) + 2 * (peak - s).abs()


def hadamard_bound(codec: Hadamard, x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the rotated group no coefficient is off by more than the widest gap, or by what it lies beyond the last level.

    Rotations keep norms, so this bounds the norm of the group's error, and that bounds each element's.
    """
    gap = {bits: float(normal_levels(bits).diff().max()) for bits in (codec.bits, codec.low)}
    last = {bits: float(normal_levels(bits).max()) for bits in (codec.bits, codec.low)}
    rms = over_group(torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % codec.group)), "group", codec.group, "rms")
    rms = rms[: x.numel()].view(x.shape) * 2 ** (0.5 / 8)  # the scale, rounded in steps of an eighth octave
    root = codec.group**0.5
    inside = max(gap.values()) / 2 * root
    beyond = root * 2 ** (0.5 / 8)  # the norm of a group, relative to the scale
    return rms * (inside + max(0.0, beyond - min(last.values())) + root * REACH / HALF)


def contraction_bound(codec: Codec, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.norm().expand_as(x)


BOUNDS: dict[type, Callable[[Any, Tensor, torch.dtype], Tensor]] = {
    Identity: identity_bound,
    FixPoint: fixpoint_bound,
    Lloyd: lloyd_bound,
    Hadamard: hadamard_bound,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_declared_travels_and_returns_within_the_bound(spec: str, name: str, dtype: torch.dtype) -> None:
    codec, x = codecs.parse(spec), inputs()[name].to(dtype)
    before = x.clone()
    y, sent = over_the_wire(codec, x)
    assert torch.equal(x, before)
    declared = codec.wire(tuple(x.shape), dtype)
    assert sent == sum(field.nbytes for field in declared) <= wire_bytes(declared) < sent + ALIGNMENT * len(declared)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    exact = x.double()
    bound = BOUNDS.get(type(codec), contraction_bound)(codec, exact, dtype)
    slack = 0 if isinstance(codec, Identity) else _rounding_of_the_result(exact, y, dtype)
    assert ((y.double() - exact).abs() <= bound + slack).all()


def _rounding_of_the_result(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """What fp32 arithmetic and the result's own dtype add; and scales far below the largest are lost."""
    largest = x.abs().amax() if x.numel() else torch.zeros(())
    unit = 2 * UNIT_ROUNDOFF[dtype] + 16 * UNIT_ROUNDOFF[torch.float32]
    return unit * (y.double().abs() + x.abs()) + SMALLEST_HALF * (dtype == torch.float16) + FAR_BELOW * largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_tensor_returns_in_the_dtype_asked_for(spec: str, dtype: torch.dtype) -> None:
    codec, x = codecs.parse(spec), inputs()["gaussian"]
    y, _ = over_the_wire(codec, x, dtype)
    exact, _ = over_the_wire(codec, x, torch.float32)
    assert y.dtype == dtype
    assert torch.equal(y, exact.to(dtype))


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_return_as_zeros(spec: str) -> None:
    x = torch.zeros(5, 30)
    assert torch.equal(over_the_wire(codecs.parse(spec), x)[0], x)


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_twice_gives_the_same_bytes(spec: str) -> None:
    codec, x = codecs.parse(spec), inputs()["gaussian"]
    assert all(torch.equal(a, b) for a, b in zip(codec.encode(x), codec.encode(x.clone()), strict=True))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "stochastic" not in spec])  # blocks share the draws out
def test_blocks_leave_no_trace(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of many blocks decodes as it does in one piece."""
    codec, x = codecs.parse(spec), torch.randn(50, 7, 9, generator=torch.Generator().manual_seed(0))
    whole, _ = over_the_wire(codec, x)
    monkeypatch.setattr(codecs.bits, "BLOCK", 64)
    in_blocks, _ = over_the_wire(codec, x)
    # Only sums, and thereby the scales that are means, depend on the order.
    assert torch.allclose(whole, in_blocks, rtol=2.0**-10, atol=float(whole.abs().max()) * 2.0**-10)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("none")])
def test_what_is_not_finite_is_refused_with_its_place(spec: str, value: float) -> None:
    x = torch.randn(3, 5, 7)
    x[1, 2, 3] = value
    with pytest.raises(ValueError) as refused:
        codecs.parse(spec).encode(x)
    assert str(refused.value) == f"cannot encode {value} at index (1, 2, 3) of a tensor of shape (3, 5, 7)"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fixpoint:bits=0", "bits=0 is outside 1 to 8"),
        ("lloyd:bits=9", "bits=9 is outside 1 to 8"),
        ("fixpoint:dims=group", "dims=group with group=0: give the elements"),
        ("lloyd:group=64", "group=64 has no meaning with dims=channel"),
        ("fixpoint:scale=l2,rounding=stochastic", "rounding=stochastic is unbiased only with scale=max"),
        ("hadamard:bits=3,low=4", "bits=3 and low=4 are not 1 <= low <= bits <= 8"),
        ("hadamard:fraction=1.5", "fraction=1.5 is outside 0 to 1"),
        ("hadamard:group=48", "group=48 is not a power of two"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(spec: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        codecs.parse(spec, key="pp.forward")
    assert f'pp.forward="{spec}": {expected}' in str(refused.value)


@pytest.mark.parametrize("spec", SPECS)
def test_decoding_twice_gives_the_same(spec: str) -> None:
    codec, x = codecs.parse(spec), inputs()["gaussian"]
    fields = codec.encode(x)
    first, second = (codec.decode(fields, tuple(x.shape), x.dtype) for _ in range(2))
    assert torch.equal(first, second)


def test_fields_of_several_dtypes_share_one_message() -> None:
    fields = (torch.arange(5, dtype=torch.uint8), torch.randn(3), torch.randn(2, 2, dtype=torch.float16))
    wire = tuple(codecs.base.Field(f.dtype, tuple(f.shape)) for f in fields)
    buffer = torch.empty(wire_bytes(wire), dtype=torch.uint8)
    pack(fields, buffer)
    assert all(torch.equal(a, b) for a, b in zip(fields, unpack(buffer, wire), strict=True))
