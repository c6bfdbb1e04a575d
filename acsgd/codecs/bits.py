"""Codes of 1 to 8 bits <-> one continuous bit stream.

The stream is what numpy.packbits makes of the last `bits` bits of every code, in order, most significant bit first;
only its last byte is padded, with zeros. Nothing is ever spread to one bit per byte: neighbours are joined two by two
inside words of 16, 32 and 64 bits, until a word holds whole bytes. Hosts and devices are little-endian.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 1 << 18
"""Codes at a time on a CPU: 1 MiB as fp32, about a core's own cache, and enough for the cost of a call not to show."""
_WHOLE = 1 << 26
"""Codes at a time elsewhere: every block costs launches, so only memory limits it."""
_WORDS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def packed_bytes(count: int, bits: int) -> int:
    """Length of the stream of `count` codes."""
    return -(-count * bits // 8)


def block_codes(device: torch.device) -> int:
    """How many codes to work on at a time; a multiple of 8, so that blocks meet between two bytes."""
    return BLOCK if device.type == "cpu" else _WHOLE


def stream_of(stream: Tensor, start: int, count: int, bits: int) -> Tensor:
    """View the bytes of `count` codes from code `start`, a multiple of 8."""
    first = start * bits // 8
    return stream[first : first + packed_bytes(count, bits)]


def pack_bits(codes: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Return the stream uint8[packed_bytes(n, bits)] of codes uint8[n], each below 2**bits; `out` is overwritten."""
    if out is None:
        out = codes.new_empty(packed_bytes(len(codes), bits))
    size = block_codes(codes.device)
    for start in range(0, len(codes), size):
        block = codes[start : start + size]
        _pack_block(block, bits, stream_of(out, start, len(block), bits))
    return out


def unpack_bits(stream: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes uint8[count] of a stream uint8[packed_bytes(count, bits)]; at 8 bits the stream itself."""
    if bits == 8:
        return stream
    codes = stream.new_empty(-(-count // 8) * 8)
    size = block_codes(stream.device)
    for start in range(0, count, size):
        block = codes[start : start + size]
        _unpack_block(stream_of(stream, start, min(size, count - start), bits), bits, block)
    return codes[:count]


def _pack_block(codes: Tensor, bits: int, out: Tensor) -> None:
    if len(codes) % 8 or codes.storage_offset() % 8:  # torch views a tensor in a wider type only where it is aligned
        codes = functional.pad(codes, (0, -len(codes) % 8))
    for size in _rounds(bits):
        words, joined = codes.view(_WORDS[size]), bits * size // 8
        # The earlier half, below, moves up to meet the later half; what it drags along lies above both.
        words = torch.add(words >> size // 2, words, alpha=1 << joined // 2)
        codes = words.bitwise_and_((1 << joined) - 1).view(torch.uint8)
    out.copy_(_take_bytes(codes, bits)[: len(out)])


def _unpack_block(stream: Tensor, bits: int, out: Tensor) -> None:
    """Undo _pack_block; out: uint8[n], n a multiple of 8."""
    missing = packed_bytes(len(out), bits) - len(stream)
    codes = _put_bytes(functional.pad(stream, (0, missing)) if missing else stream, bits)
    for size in reversed(_rounds(bits)):
        words, half = codes.view(_WORDS[size]), bits * size // 16
        words = torch.add(words >> half, words, alpha=1 << size // 2)
        codes = words.bitwise_and_(((1 << half) - 1) * (1 + (1 << size // 2))).view(torch.uint8)
    out.copy_(codes)


def _rounds(bits: int) -> list[int]:
    """Sizes in bits of the words in which codes are joined: up to the first that then holds whole bytes."""
    sizes = [16, 32, 64] if bits < 8 else []
    return sizes[: next((i for i, size in enumerate(sizes, 1) if bits * size // 8 % 8 == 0), 0)]


def _word(bits: int) -> torch.dtype:
    return _WORDS[_rounds(bits)[-1]] if bits < 8 else torch.uint8


def _take_bytes(words: Tensor, bits: int) -> Tensor:
    """Return the bytes of the joined codes, which lie at the bottom of each word, the last one lowest."""
    words = words.view(_word(bits))
    count = words.itemsize * bits // 8
    if count == 1:
        return words.to(torch.uint8)
    rows = words.new_empty((len(words), count), dtype=torch.uint8)
    for column, source in zip(rows.unbind(1), reversed(_low_bytes(words, count)), strict=True):
        column.copy_(source)
    return rows.view(-1)


def _put_bytes(stream: Tensor, bits: int) -> Tensor:
    """Undo _take_bytes."""
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
