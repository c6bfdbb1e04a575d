"""Laws of the fused kernels, for any launcher: results equal the torch operations bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from acsgd.codecs.base import saturate_
from acsgd.codecs.cache_update import add_saturated
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.kernels import Kernels, UniformQuantization
from acsgd.codecs.layout import layout_of
from acsgd.codecs.scales import decode_scales

Shape = tuple[int, ...]
BITS = range(1, 9)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENTRY_DTYPES = (torch.float32, torch.float16)


def every_kernel() -> list[str]:
    """Return the C++ names of all kernels."""
    types, entries = ("float", "Half", "BFloat16"), ("float", "Half", "None")
    kernels = [name for x in types for e in entries for name in (f"encode<%d, {x}, {e}>", f"decode<%d, {e}, {x}>")]
    of_gradients = ["encode<4, float, BFloat16>", "decode<4, BFloat16, float>"]
    return [*of_gradients, *(name % bits for bits in BITS for name in kernels)]


def codecs_and_shapes(bits: int) -> Iterator[tuple[FixPoint, Shape]]:
    """Yield codecs and tensor shapes: rows and columns that do and do not fill threads, warps and blocks."""
    for count in (0, 1, 7, 8, 9, 15, 255, 257, 2049):
        yield FixPoint(bits, dims="tensor"), (count,)
        yield FixPoint(bits, dims="group", group=4), (count,)
    for rows, width in ((3, 1), (5, 3), (9, 7), (37, 19), (66, 8), (33, 12), (17, 64), (3, 1031)):
        yield FixPoint(bits), (rows, width)
        yield FixPoint(bits, dims="token"), (rows, width)
    yield FixPoint(bits, dims="group", group=1), (1001,)
    yield FixPoint(bits, dims="group", group=64), (64, 65)
    yield FixPoint(bits, "l2", clip=0.5), (64, 24)  # most elements are clipped
    if bits > 1:
        yield FixPoint(bits, centroids=True), (37, 24)


def data(shape: Shape, bits: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return normal numbers, some of them halfway between two levels or next to that, and a column of zeros."""
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


def quantization_of(
    codec: FixPoint, fields: tuple[Tensor, ...], shape: Shape, device: torch.device
) -> UniformQuantization:
    """Return the quantization that the fields of a message describe."""
    _, half, exponent, *shift = (field.to(device) for field in fields)
    steps = decode_scales(half, exponent) / (0.5 if codec.bits == 1 else 2.0 ** (codec.bits - 1))
    layout = layout_of(shape, codec.dims, codec.group)
    return UniformQuantization(codec.bits, layout, steps, shift[0].float() if shift else None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, on any devices, are equal including the sign of zeros."""
    return a.dtype == b.dtype and torch.equal(a.cpu().view(-1).view(torch.uint8), b.cpu().view(-1).view(torch.uint8))


def check_codec(kernels: Kernels, device: torch.device, codec: FixPoint, x: Tensor) -> None:
    """Compare the codec on the CPU with the kernels, for a CPU tensor."""
    shape, case = tuple(x.shape), (codec, tuple(x.shape), x.dtype)
    fields = codec.encode(x)
    quantization = quantization_of(codec, fields, shape, device)
    stream = kernels.encode(x.to(device).view(-1), quantization)
    assert same_bits(stream, fields[0]), case
    y = kernels.decode(stream, quantization, x.dtype)
    assert same_bits(y, codec.decode(fields, shape, x.dtype)), case
    blocks = [values for _, values in kernels.decoded_blocks(stream, quantization)]
    assert same_bits(torch.cat([torch.empty(0, device=device), *blocks]), codec.decode(fields, shape, torch.float32)), (
        case
    )


def check_update(kernels: Kernels, device: torch.device, codec: FixPoint, x: Tensor, entry: Tensor) -> None:
    """Compare cache updates on the CPU, by their definition, with the kernels of sender and receiver."""
    shape, case = tuple(x.shape), (codec, tuple(x.shape), x.dtype, entry.dtype)
    fields = codec.encode(x.float() - entry.float())
    expected = entry.clone()
    total = add_saturated(expected, codec.decode(fields, shape, torch.float32))

    quantization = quantization_of(codec, fields, shape, device)
    at_sender, at_receiver = entry.to(device, copy=True).view(-1), entry.to(device, copy=True).view(-1)
    stream = kernels.encode(x.to(device).view(-1), quantization, at_sender)
    y = kernels.decode(stream, quantization, x.dtype, at_receiver)
    assert same_bits(stream, fields[0]), case
    assert same_bits(at_sender, expected), case
    assert same_bits(at_receiver, expected), case
    assert same_bits(y, saturate_(total, x.dtype).to(x.dtype)), case


def check_alignment(kernels: Kernels, device: torch.device, bits: int, dtype: torch.dtype) -> None:
    """Compare tensors that start in the middle of an aligned word with others that do not."""
    shape, count, case = (29, 40), 29 * 40, (bits, dtype)
    x, steps = data((count,), bits, dtype), torch.linspace(0.1, 0.2, 40)
    before = data((count,), bits, torch.float16, seed=1).to(device)
    quantization = UniformQuantization(bits, layout_of(shape, "channel", 0), steps.to(device))
    entry = before.clone()
    stream = kernels.encode(x.to(device), quantization, entry)
    y = kernels.decode(stream, quantization, dtype)
    for offset in (1, 2, 4):
        moved = quantization._replace(steps=_moved(quantization.steps, offset))
        moved_entry = _moved(before, offset)
        assert same_bits(kernels.encode(_moved(x.to(device), offset), moved, moved_entry), stream), case
        assert same_bits(moved_entry, entry), case
        assert same_bits(kernels.decode(_moved(stream, offset), moved, dtype), y), case
        kernels.decode(_moved(stream, offset), moved, dtype, moved_entry)


def _moved(tensor: Tensor, offset: int) -> Tensor:
    """Return a copy that starts `offset` elements after an aligned address."""
    return torch.cat([tensor[:1].expand(offset), tensor])[offset:]
