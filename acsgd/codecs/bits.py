"""Bit packing: codes of 1 to 8 bits <-> one contiguous bit stream.

The stream equals numpy.packbits of the low `bits` bits of each code, in order, most significant bit first; the last
byte is padded with zeros. Instead of expanding to one bit per byte, neighbouring codes are merged pairwise in words of
16, 32 and 64 bits until a word holds whole bytes. Assumes a little-endian host and device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

BLOCK = 1 << 18
"""Codes per block on a CPU: 1 MiB as fp32, about the size of an L2 cache, and enough to amortise call overhead."""
DEVICE_BLOCK = 1 << 22
"""Codes per block on other devices: 16 MiB as fp32, which is little beside weights, while a kernel on so many numbers
should take no less than its launch."""
_WORDS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def packed_bytes(count: int, bits: int) -> int:
    """Return the length of the stream of `count` codes."""
    return -(-count * bits // 8)


def block_size(device: torch.device) -> int:
    """Return the number of codes to process at a time: a multiple of 8, so that blocks end at byte boundaries."""
    return BLOCK if device.type == "cpu" else DEVICE_BLOCK


def stream_slice(stream: Tensor, start: int, count: int, bits: int) -> Tensor:
    """Return a view of the bytes of `count` codes, starting at code `start`, a multiple of 8."""
    first = start * bits // 8
    return stream[first : first + packed_bytes(count, bits)]


def pack_bits(codes: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Pack codes, uint8[n], each below 2**bits, into a stream, uint8[packed_bytes(n, bits)]: `out`, or a new tensor."""
    if out is None:
        out = codes.new_empty(packed_bytes(len(codes), bits))
    if bits == 8:
        return out.copy_(codes)
    if bits == 1 and has_numpy(codes):
        return out.copy_(torch.from_numpy(numpy.packbits(codes.numpy())))
    size = block_size(codes.device)
    for start in range(0, len(codes), size):
        block = codes[start : start + size]
        _pack_block(block, bits, stream_slice(out, start, len(block), bits))
    return out


def unpack_bits(stream: Tensor, bits: int, count: int) -> Tensor:
    """Unpack a stream, uint8[packed_bytes(count, bits)], into codes, uint8[count]. At 8 bits these are the stream."""
    if bits == 8:
        return stream
    if bits == 1 and has_numpy(stream):
        return torch.from_numpy(numpy.unpackbits(stream.numpy(), count=count))
    codes = stream.new_empty(-(-count // 8) * 8)
    size = block_size(stream.device)
    for start in range(0, count, size):
        block = codes[start : start + size]
        _unpack_block(stream_slice(stream, start, min(size, count - start), bits), bits, block)
    return codes[:count]


def positions_of_ones(flags: Tensor) -> Tensor:
    """Return the ascending positions of the ones of a vector of zeros and ones, uint8 or bool, as int64.

    On a CPU, NumPy finds them five times as fast as torch.
    """
    if flags.device.type != "cpu":
        return flags.nonzero().view(-1)
    return torch.from_numpy(numpy.flatnonzero(flags.view(torch.bool).numpy()))


def has_values(x: Tensor) -> bool:
    """Whether a tensor has values: those of a plan of memory have not, and show the sizes of what is allocated."""
    return not isinstance(x, FakeTensor)


def in_blocks(length: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Divide tensors along their first dimension, those without values into one block: others need no more memory."""
    blocks = zip(*(tensor.split(length) for tensor in tensors), strict=True)
    return itertools.islice(blocks, None if has_values(tensors[0]) else 1)


def has_numpy(x: Tensor) -> bool:
    """Whether NumPy can read a tensor. Its functions take less time than torch's on few elements or on single bits."""
    return x.device.type == "cpu" and has_values(x)


def _pack_block(codes: Tensor, bits: int, out: Tensor) -> None:
    if len(codes) % 8 or codes.storage_offset() % 8:  # views in a wider dtype need alignment
        codes = functional.pad(codes, (0, -len(codes) % 8))
    for size in _word_sizes(bits):
        words, merged = codes.view(_WORDS[size]), bits * size // 8
        # Shift the earlier (low) half up next to the later half, then mask the bits that were carried above both.
        words = torch.add(words >> size // 2, words, alpha=1 << merged // 2)
        if merged == 8:
            out.copy_(words[: len(out)])  # this drops these bits
            return
        codes = words.bitwise_and_((1 << merged) - 1).view(torch.uint8)
    out.copy_(_take_bytes(codes, bits)[: len(out)])


def _unpack_block(stream: Tensor, bits: int, out: Tensor) -> None:
    """Invert _pack_block. out: uint8[n], n a multiple of 8."""
    missing = packed_bytes(len(out), bits) - len(stream)
    codes = _put_bytes(functional.pad(stream, (0, missing)) if missing else stream, bits)
    for size in reversed(_word_sizes(bits)):
        words, half = codes.view(_WORDS[size]), bits * size // 16
        words = torch.add(words >> half, words, alpha=1 << size // 2)
        codes = words.bitwise_and_(((1 << half) - 1) * (1 + (1 << size // 2))).view(torch.uint8)
    out.copy_(codes)


def _word_sizes(bits: int) -> list[int]:
    """Return the word sizes, in bits, of the merging rounds: up to the first at which a word holds whole bytes."""
    sizes = [16, 32, 64] if bits < 8 else []
    return sizes[: next((i for i, size in enumerate(sizes, 1) if bits * size // 8 % 8 == 0), 0)]


def _word(bits: int) -> torch.dtype:
    return _WORDS[_word_sizes(bits)[-1]] if bits < 8 else torch.uint8


def _take_bytes(words: Tensor, bits: int) -> Tensor:
    """Return the bytes of merged codes, which are the low bytes of each word in reverse order; 2 or more."""
    words = words.view(_word(bits))
    count = words.itemsize * bits // 8
    rows = words.new_empty((len(words), count), dtype=torch.uint8)
    for column, source in zip(rows.unbind(1), reversed(_low_bytes(words, count)), strict=True):
        column.copy_(source)
    return rows.view(-1)


def _put_bytes(stream: Tensor, bits: int) -> Tensor:
    """Invert _take_bytes."""
    word = _word(bits)
    count = word.itemsize * bits // 8
    if count == 1:
        return stream.to(word).view(torch.uint8)
    rows = stream.view(-1, count)
    words = stream.new_zeros(len(rows), dtype=word)
    for target, column in zip(reversed(_low_bytes(words, count)), rows.unbind(1), strict=True):
        target.copy_(column)
    return words.view(torch.uint8)


def _low_bytes(words: Tensor, count: int) -> tuple[Tensor, ...]:
    return words.view(torch.uint8).view(-1, words.itemsize).unbind(1)[:count]
