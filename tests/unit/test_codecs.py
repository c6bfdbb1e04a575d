"""Laws of every codec in the table: declared fields, error bounds, determinism, refusal of non-finite input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from acsgd import codecs
from acsgd.codecs.base import ALIGNMENT, Codec, Field, check_finite, holds_nan, pack, unpack, wire_bytes
from acsgd.codecs.layout import Dims, layout_of
from acsgd.codecs.log_levels import LogLevels
from acsgd.codecs.message import MessageCodec, PackedCodec
from acsgd.codecs.scales import Statistic, decode_scales, encode_scales, measure
from acsgd.codecs.topk import TopK
from acsgd.dp.exchange.averaging import _mean_of
from acsgd.dp.exchange.vectors import CodedVector

SPECS = [
    *codecs.CODECS,
    *(f"none:dtype={dtype}" for dtype in ("fp32", "bf16", "fp16")),
    *(f"fixpoint:bits={bits}" for bits in (1, 3, 7)),
    "fixpoint:bits=2,rounding=stochastic,dims=token",
    "fixpoint:bits=1,scale=l2,dims=tensor",
    "fixpoint:bits=3,dims=group,group=12",
    "fixpoint:bits=4,scale=l2,clip=20,entropy_coding=true",
    *(f"fixpoint:bits={bits},centroids=true,dims={d}" for bits, d in ((2, "channel"), (3, "token"))),
    *("lloyd:bits=1", "lloyd:bits=5", "lloyd:dims=token", "lloyd:dims=group,group=12"),
    "transform:step=2",
    *("hadamard:bits=8,low=1,fraction=0.3,group=2", "hadamard:fraction=0", "hadamard:bits=6,low=6"),
]
MORE = [
    *(f"fixpoint:bits={bits}" for bits in (2, 4, 5, 6)),
    *(f"fixpoint:bits={bits},rounding=stochastic,dims=token" for bits in (1, 4, 8)),
    *(f"fixpoint:bits={bits},scale=l2,dims=tensor" for bits in (2, 4, 8)),
    *(f"fixpoint:bits={bits},dims=group,group=12" for bits in (1, 8)),
    *(f"fixpoint:bits={bits},scale=l2,clip={clip},entropy_coding=true" for bits, clip in ((2, 4), (8, 64))),
    "fixpoint:bits=4,centroids=true,dims=tensor",
    *(f"lloyd:bits={bits}" for bits in (2, 3, 6, 7, 8)),
    "lloyd:dims=tensor",
    *("hadamard:fraction=1,bits=2,low=2,group=1024", "hadamard:bits=7,low=5"),
]
"""Other values of the same options, for `make soak`."""
MESSAGE_CODECS: list[MessageCodec] = [
    *(PackedCodec(codecs.parse(spec)) for spec in SPECS),
    *(TopK(fraction, bits, 64) for fraction, bits in ((0.02, 1), (0.3, 4), (1.0, 8))),
    TopK(0.1, chunk=50, group=3),
    LogLevels(),
]
MORE_MESSAGE_CODECS: list[MessageCodec] = [
    *(PackedCodec(codecs.parse(spec)) for spec in MORE),
    *(TopK(fraction, bits) for fraction in (0.02, 0.3, 1.0) for bits in range(1, 9)),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(values: Sequence[object], more: Sequence[object]) -> list[object]:
    """Return rows of a table, of which `make soak` runs those of `more`."""
    return [*values, *(pytest.param(each, marks=pytest.mark.soak) for each in more)]


def specs(*, without: str = "nothing") -> pytest.MarkDecorator:
    """Return the mark of a test of every codec but those with a text in their spec."""
    some, more = ([spec for spec in each if without not in spec] for each in (SPECS, MORE))
    return pytest.mark.parametrize("spec", rows(some, more))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def inputs() -> dict[str, Tensor]:
    draw = generator()
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


def cases() -> Iterator[tuple[str, Tensor]]:
    for name, x in inputs().items():
        for dtype in DTYPES:
            yield f"{name}, {dtype}", x.to(dtype)


def over_the_wire(codec: Codec, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, int]:
    """Return a tensor encoded, packed, unpacked and decoded, and the bytes of its fields."""
    wire = codec.wire(tuple(x.shape), x.dtype)
    fields = codec.encode(x)
    assert [(f.dtype, tuple(f.shape)) for f in fields] == [(f.dtype, f.shape) for f in wire]
    buffer = torch.empty(wire_bytes(wire), dtype=torch.uint8)
    pack(fields, buffer)
    return codec.decode(unpack(buffer, wire), tuple(x.shape), dtype or x.dtype), sum(f.nbytes for f in fields)


@specs()
def test_fields_are_as_declared_and_errors_within_the_bound(spec: str) -> None:
    codec = codecs.parse(spec)
    for case, x in cases():
        before = x.clone()
        y, sent = over_the_wire(codec, x)
        assert torch.equal(x, before), case
        declared = codec.wire(tuple(x.shape), x.dtype)
        assert sent == sum(field.nbytes for field in declared), case
        assert sent <= wire_bytes(declared) < sent + ALIGNMENT * len(declared), case
        assert (y.dtype, y.shape) == (x.dtype, x.shape), case
        bound = codec.error_bound(x)
        assert (bound.dtype, bound.shape) == (torch.float64, x.shape), case
        in_range = x.double().abs() + bound <= torch.finfo(x.dtype).max
        assert ((y.double() - x.double()).abs() <= bound)[in_range].all(), case
        assert in_range.all() or x.abs().max() > 1e4, case


@pytest.mark.parametrize("codec", rows(MESSAGE_CODECS, MORE_MESSAGE_CODECS), ids=str)
def test_messages_are_short_enough_and_errors_within_the_bound(codec: MessageCodec) -> None:
    for case, tensor in inputs().items():
        x = tensor.reshape(-1)
        message = codec.encode(x)
        assert message.dtype == torch.uint8
        assert len(message) <= codec.max_bytes(len(x)), case
        y = codec.decode(message, len(x))
        assert (y.dtype, y.shape) == (torch.float32, x.shape), case
        assert ((y.double() - x.double()).abs() <= codec.error_bound(x)).all(), case


def test_error_bounds_are_useful() -> None:
    """They are far below the error of sending nothing."""
    x = torch.randn(64, 64, generator=generator())
    for spec in ("none:dtype=bf16", "fixpoint:bits=4", "fixpoint:bits=5,scale=l2", "lloyd:bits=3"):
        assert codecs.parse(spec).error_bound(x).norm() < x.norm() / 2, spec


def test_statistics_of_scales_are_those_of_the_elements() -> None:
    def values(x: Tensor, dims: Dims, group: int) -> list[Tensor]:
        flat = x.reshape(-1)
        if dims in ("token", "group"):
            return list(flat.split(group or x.shape[-1]))
        return [flat] if dims == "tensor" else list(flat.view(-1, x.shape[-1]).T)

    kinds: dict[Statistic, Any] = {
        "max": torch.amax,
        "mean": torch.mean,
        "rms": lambda part: part.square().mean().sqrt(),
    }
    dims_and_groups: list[tuple[Dims, int]] = [("channel", 0), ("token", 0), ("tensor", 0), ("group", 12), ("group", 1)]
    for case, x in cases():
        for dims, group in dims_and_groups:
            if not x.numel() or not x.dim():
                continue
            layout = layout_of(tuple(x.shape), dims, group)
            for statistic, of in kinds.items():
                expected = torch.stack([of(part.abs()) for part in values(x.double(), dims, group)])
                found = measure(x.reshape(-1), layout, statistic)
                assert torch.allclose(found.double(), expected, rtol=2.0**-20, atol=0), (case, dims, statistic)


def test_scales_are_rounded_to_fp16_precision() -> None:
    """Relative to each scale above 2**-24 of the largest, and to the largest below."""
    for largest in (2.0**-100, 1e-7, 1.0, 3e4, 1e30):
        scales = largest * torch.logspace(0, -60, 1000, base=2)
        for round_up in (False, True):
            error = decode_scales(*encode_scales(scales, round_up=round_up)).double() - scales.double()
            limit = (1 + round_up) * (scales.double() * 2.0**-11 + largest * 2.0**-39) + 2.0**-110
            assert (error.abs() <= limit).all(), (largest, round_up)
            assert not round_up or (error[scales >= 2.0**-110] >= 0).all(), largest
    limit_of_fp32 = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    assert (2 * decode_scales(*encode_scales(limit_of_fp32))).isfinite().all()


@specs()
def test_decoding_is_repeatable_and_rounds_to_the_requested_dtype(spec: str) -> None:
    codec, x = codecs.parse(spec), inputs()["gaussian"]
    exact, _ = over_the_wire(codec, x, torch.float32)
    for dtype in DTYPES:
        y, _ = over_the_wire(codec, x, dtype)
        assert y.dtype == dtype
        assert torch.equal(y, exact.to(dtype)), dtype
    fields = codec.encode(x)
    first, second = (codec.decode(fields, tuple(x.shape), x.dtype) for _ in range(2))
    assert torch.equal(first, second)


@specs()
def test_zeros_decode_to_zeros(spec: str) -> None:
    x = torch.zeros(5, 30)
    assert torch.equal(over_the_wire(codecs.parse(spec), x)[0], x)


def test_messages_depend_only_on_the_tensor() -> None:
    """Neither on what the buffer held before, so that padding is deterministic, nor on earlier calls."""
    for spec in SPECS:
        codec = codecs.parse(spec)
        for case in ("gaussian", "one element", "empty", "odd sizes", "outlier"):
            x = inputs()[case]
            n = wire_bytes(codec.wire(tuple(x.shape), x.dtype))
            first, second = torch.full((n,), 255, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
            pack(codec.encode(x), first)
            pack(codec.encode(x.clone()), second)
            assert torch.equal(first, second), (spec, case)


@specs(without="stochastic")  # blocks share random numbers
def test_results_do_not_depend_on_the_block_size(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = codecs.parse(spec), torch.randn(50, 7, 9, generator=generator())
    whole, _ = over_the_wire(codec, x)
    monkeypatch.setattr(codecs.bits, "BLOCK", 64)
    in_blocks, _ = over_the_wire(codec, x)
    packed, flat = PackedCodec(codec), x.view(-1)
    if packed.decodes_in_blocks:
        message = packed.encode(flat)
        blocks, values = zip(*packed.decoded_blocks(message, len(flat)), strict=True)
        assert (len(blocks) > 1) == ("dims=group" in spec or "dims=tensor" in spec), "else all share a row"
        assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
        assert torch.equal(torch.cat(values), packed.decode(message, len(flat)))
    # Only sums, and thereby the scales that are means, depend on the order.
    assert torch.allclose(whole, in_blocks, rtol=2.0**-10, atol=float(whole.abs().max()) * 2.0**-10)


@specs(without="none")
def test_non_finite_elements_are_marked_and_refused_with_their_index(spec: str) -> None:
    codec, finite = codecs.parse(spec), torch.randn(3, 5, 7)
    assert not holds_nan(codec.encode(finite))
    check_finite(codec.encode(finite), finite)
    of_gpu = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()  # NaN that CUDA computes
    for value in (float("nan"), float("inf"), float("-inf"), of_gpu):
        x = finite.clone()
        x[1, 2, 3] = value
        fields = codec.encode(x)
        assert holds_nan(fields)
        with pytest.raises(ValueError) as refused:
            check_finite(fields, x)
        assert str(refused.value) == f"cannot encode {value} at index (1, 2, 3) of a tensor of shape (3, 5, 7)"


def test_invalid_options_are_refused() -> None:
    for spec, expected in (
        ("fixpoint:bits=0", "bits=0 is outside 1 to 8"),
        ("lloyd:bits=9", "bits=9 is outside 1 to 8"),
        ("fixpoint:dims=group", "dims=group needs a positive group size, not group=0"),
        ("lloyd:group=64", "group=64 needs dims=group, not dims=channel"),
        ("fixpoint:scale=l2,rounding=stochastic", "rounding=stochastic needs scale=max"),
        ("fixpoint:scale=l2,clip=0", "clip=0.0 is outside (0, 65536] root mean squares"),
        ("fixpoint:bits=1,centroids=true", "centroids=true needs rounding=nearest and bits=2 or more"),
        ("hadamard:bits=3,low=4", "bits=3 and low=4 are not 1 <= low <= bits <= 8"),
        ("hadamard:fraction=1.5", "fraction=1.5 is outside 0 to 1"),
        ("hadamard:group=48", "group=48 is not a power of two"),
        ("hadamard:share=0.5", 'option "share" is now called "fraction"'),
        ("fixpoint:squeeze=true", 'option "squeeze" is now called "entropy_coding"'),
        ("fixpoint:reach=8", 'option "reach" is now called "clip"'),
        ("fixpoint:means=true", 'option "means" is now called "centroids"'),
    ):
        with pytest.raises(ValueError) as refused:
            codecs.parse(spec, key="pp.forward")
        assert f'pp.forward="{spec}": {expected}' in str(refused.value)


def test_fields_of_several_dtypes_share_one_message() -> None:
    fields = (torch.arange(5, dtype=torch.uint8), torch.randn(3), torch.randn(2, 2, dtype=torch.float16))
    wire = tuple(Field(f.dtype, tuple(f.shape)) for f in fields)
    buffer = torch.full((wire_bytes(wire),), 255, dtype=torch.uint8)
    pack(fields, buffer)
    assert all(torch.equal(a, b) for a, b in zip(fields, unpack(buffer, wire), strict=True))
    used = [0, 5, 16, 28, 32, 40]
    assert not any(buffer[start:stop].any() for start, stop in ((used[1], 16), (used[3], 32), (used[5], 48)))


def test_packed_messages_are_entropy_coded_if_the_codec_asks() -> None:
    x = torch.randn(10_000, generator=generator())
    plain, coded = (
        PackedCodec(codecs.parse(f"fixpoint:bits=4,scale=l2,clip=16,dims=tensor,entropy_coding={flag}"))
        for flag in ("false", "true")
    )
    message, shorter = plain.encode(x), coded.encode(x)
    assert len(shorter) < 0.6 * len(message) == 0.6 * plain.max_bytes(10_000) == 0.6 * coded.max_bytes(10_000)
    assert torch.equal(coded.decode(shorter, 10_000), plain.decode(message, 10_000))
    noise = torch.randint(256, (10_000,), generator=generator(), dtype=torch.uint8).float()
    incompressible = PackedCodec(codecs.parse("fixpoint:bits=8,dims=tensor,entropy_coding=true"))
    assert len(incompressible.encode(noise - 127.5)) <= incompressible.max_bytes(10_000)
    for codec, bad in ((plain, message[:-1]), (coded, shorter[:-1]), (coded, shorter[:0]), (plain, message[:0])):
        with pytest.raises(ValueError, match="corrupt"):
            codec.decode(bad, 10_000)


@pytest.mark.parametrize("own", [0, 2, None])
def test_a_mean_of_decoded_blocks_is_that_of_the_decoded_vectors(
    own: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs.bits, "BLOCK", 64)
    codec, draw, n = PackedCodec(codecs.parse("lloyd:bits=4,dims=group,group=16")), generator(), 300
    vectors, residual = [torch.randn(n, generator=draw) for _ in range(3)], torch.randn(n, generator=draw)
    messages = [CodedVector(n, codec, codec.encode(x)) for x in vectors]
    decoded = [codec.decode(each.message, n) for each in messages]
    x = torch.randn(n, generator=draw)
    before = x.clone()
    mean = _mean_of(dict(enumerate(messages)), x, own, residual)
    assert torch.equal(mean, (decoded[0] + decoded[1] + decoded[2]).div_(3) + residual)
    assert torch.equal(x, before if own is None else before - decoded[own])
