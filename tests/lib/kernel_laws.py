"""What the fused kernels must do, whoever runs them: equal the torch operations bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from acsgd.codecs.cache_update import add_saturated
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.kernels import Kernels, Quantization
from acsgd.codecs.layout import layout_of
from acsgd.codecs.scales import decode_scales

Shape = tuple[int, ...]
BITS = range(1, 9)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENTRY_DTYPES = (torch.float32, torch.float16)


def every_kernel() -> list[str]:
    """Return the C++ names of all kernels."""
    types, memories = ("float", "Half", "BFloat16"), ("float", "Half", "None")
    ways = [way for x in types for m in memories for way in (f"encode<%d, {x}, {m}>", f"decode<%d, {m}, {x}>")]
    return [way % bits for bits in BITS for way in ways]


def codecs(bits: int) -> Iterator[tuple[FixPoint, Shape]]:
    """Yield codecs with shapes of tensors: rows and columns that do and do not fill threads, warps and blocks."""
    for count in (0, 1, 7, 8, 9, 15, 255, 257, 2049):
        yield FixPoint(bits, dims="tensor"), (count,)
        yield FixPoint(bits, dims="group", group=4), (count,)
    for rows, width in ((3, 1), (5, 3), (9, 7), (37, 19), (66, 8), (33, 12), (17, 64), (3, 1031)):
        yield FixPoint(bits), (rows, width)
        yield FixPoint(bits, dims="token"), (rows, width)
    yield FixPoint(bits, dims="group", group=1), (1001,)
    yield FixPoint(bits, dims="group", group=64), (64, 65)
    yield FixPoint(bits, "l2", clip=0.5), (64, 24)  # most are clipped
    if bits > 1:
        yield FixPoint(bits, centroids=True), (37, 24)


def data(shape: Shape, bits: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return normal numbers, some of them halfway between two levels, or next to that, and a column of zeros."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw).view(-1)
    if x.numel():
        peak = x.abs().amax().mul(1024).ceil().div(1024)  # exact in fp16
        step = peak * 2 ** (1 - bits)
        halfway = (torch.randint(-(2**bits), 2**bits, x.shape, generator=draw) + 0.5) * step
        beside = halfway.nextafter(torch.where(torch.rand(x.shape, generator=draw) < 0.5, -math.inf, math.inf))
        kind = torch.randint(4, x.shape, generator=draw)
        x = torch.where(kind == 0, halfway.clamp(-peak, peak), torch.where(kind == 1, beside.clamp(-peak, peak), x))
    x = x.view(shape)
    if len(shape) > 1:
        x[:, shape[1] // 2] = 0
        x[0, :] = x.abs().amax()
    return x.to(dtype)


def levels_of(codec: FixPoint, fields: tuple[Tensor, ...], shape: Shape, device: torch.device) -> Quantization:
    """Return the levels that the fields of a message tell of."""
    _, half, exponent, *inwards = (field.to(device) for field in fields)
    steps = decode_scales(half, exponent) / (0.5 if codec.bits == 1 else 2.0 ** (codec.bits - 1))
    layout = layout_of(shape, codec.dims, codec.group)
    return Quantization(codec.bits, layout, steps, inwards[0].float() if inwards else None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors on any devices are equal to the sign of a zero."""
    return a.dtype == b.dtype and torch.equal(a.cpu().view(-1).view(torch.uint8), b.cpu().view(-1).view(torch.uint8))


def check_codec(kernels: Kernels, device: torch.device, codec: FixPoint, x: Tensor) -> None:
    """Encode and decode a tensor of the CPU, there and by the kernels."""
    shape = tuple(x.shape)
    fields = codec.encode(x)
    levels = levels_of(codec, fields, shape, device)
    stream = kernels.encode(x.to(device).view(-1), levels)
    assert same_bits(stream, fields[0])
    y = kernels.decode(stream, levels, x.dtype)
    assert same_bits(y, codec.decode(fields, shape, x.dtype))


def check_update(kernels: Kernels, device: torch.device, codec: FixPoint, x: Tensor, m: Tensor) -> None:
    """Update memories of both ends, on the CPU by the definition, and by the kernels."""
    shape = tuple(x.shape)
    fields = codec.encode(x.float() - m.float())
    expected = m.clone()
    total = add_saturated(expected, codec.decode(fields, shape, torch.float32))

    levels = levels_of(codec, fields, shape, device)
    at_sender, at_receiver = m.to(device, copy=True).view(-1), m.to(device, copy=True).view(-1)
    stream = kernels.encode(x.to(device).view(-1), levels, at_sender)
    y = kernels.decode(stream, levels, x.dtype, at_receiver)
    assert same_bits(stream, fields[0])
    assert same_bits(at_sender, expected)
    assert same_bits(at_receiver, expected)
    assert same_bits(y, total.to(x.dtype))


def check_begin_anywhere(kernels: Kernels, device: torch.device, bits: int, dtype: torch.dtype) -> None:
    """Compare tensors that begin in the middle of an aligned word with others that do not."""
    shape, count = (29, 40), 29 * 40
    x, m, steps = data((count,), bits, dtype), data((count,), bits, torch.float16, seed=1), torch.linspace(0.1, 0.2, 40)
    levels = Quantization(bits, layout_of(shape, "channel", 0), steps.to(device))
    memory = m.to(device, copy=True)
    stream = kernels.encode(x.to(device), levels, memory)
    y = kernels.decode(stream, levels, dtype)
    for offset in (1, 2, 4):
        moved = levels._replace(steps=_moved(levels.steps, offset))
        moved_memory = _moved(m.to(device), offset)
        assert same_bits(kernels.encode(_moved(x.to(device), offset), moved, moved_memory), stream)
        assert same_bits(moved_memory, memory)
        assert same_bits(kernels.decode(_moved(stream, offset), moved, dtype), y)
        kernels.decode(_moved(stream, offset), moved, dtype, moved_memory)


def _moved(tensor: Tensor, offset: int) -> Tensor:
    """Return a copy that begins `offset` elements after an aligned address."""
    return torch.cat([tensor[:1].expand(offset), tensor])[offset:]
