"""Lossless coding: Huffman codes over bytes, and an order of the bits of floating-point numbers that suits it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire

_RAW = -zlib.MAX_WBITS
"""Raw DEFLATE, without header and checksum: the frame holds length and checksum."""
_PARTS, _MIN_PART = 16, 1024
"""Number of parts of a sparse message, and the least bytes of one: each costs a table of some 30 bytes."""


def compress_(message: Tensor) -> int:
    """Entropy-code a message, uint8[n] in host memory, in place. Return its new length.

    If coding does not shorten it, the message is left unchanged, and the length is n. In a message of which most bytes
    are 0, runs are coded as one symbol, and its parts have codes of their own, as their bytes may be distributed
    differently.
    """
    view = message.numpy()
    is_sparse = 2 * numpy.count_nonzero(view) < len(view)
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW, 9, zlib.Z_RLE if is_sparse else zlib.Z_HUFFMAN_ONLY)
    coded = b"".join(_code(coder, view) if is_sparse else [coder.compress(view.data)]) + coder.flush()
    if len(coded) >= len(view):
        return len(view)
    view.data[: len(coded)] = coded
    return len(coded)


def _code(coder: zlib._Compress, view: numpy.ndarray) -> Iterator[bytes]:
    """Code a message in parts; a part of zeros shares the codes of the next."""
    size = max(_MIN_PART, -(-len(view) // _PARTS))
    for start in range(0, len(view), size):
        part = view[start : start + size]
        yield coder.compress(part.data)
        if part.any():
            yield coder.flush(zlib.Z_BLOCK)


def decompress(coded: Tensor, message: Tensor) -> None:
    """Decode an entropy-coded message into `message`, uint8[n]; both in host memory. Raises ValueError if corrupt."""
    view, decoder = message.numpy().data, zlib.decompressobj(_RAW)
    try:
        decoded = decoder.decompress(coded.numpy().data, len(view) + 1)
    except zlib.error as error:
        raise ValueError(f"corrupt entropy-coded message of {len(coded)} bytes: {error}") from None
    if len(decoded) != len(view) or not decoder.eof or decoder.unused_data:
        raise ValueError(
            f"corrupt entropy-coded message: its {len(coded)} bytes decode to {len(decoded)} or more, not {len(view)}"
        )
    view[:] = decoded


_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integer dtype by the bytes of an element."""


@dataclass(frozen=True)
class BytePlanes:
    """Send the first bytes of all elements, then their second bytes, and so on, entropy-coded.

    Sign and exponent have bytes of their own, of which few values are frequent. The bytes of mantissas are random.
    """

    entropy_coding: ClassVar[bool] = True
    encodes_nan: ClassVar[bool] = True

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        return (Field(torch.uint8, (dtype.itemsize, math.prod(shape))),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (to_planes(bits_of(x)),)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        (planes,) = fields
        return from_planes(planes).view(dtype).view(shape)

    def error_bound(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64)


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of floating-point numbers as integers of the same size, in the shape of `x`, a view if it can."""
    return x.detach().contiguous().view(_INTEGERS[x.dtype.itemsize])


def to_planes(values: Tensor) -> Tensor:
    """Return the bytes of n integers, uint8 [bytes of an integer, n]. Those of small ones are mostly 0."""
    bits, flat = 8 * values.dtype.itemsize, values.reshape(-1)
    zigzag = (flat << 1) ^ (flat >> (bits - 1))  # the sign is the lowest bit
    return zigzag.view(torch.uint8).view(-1, values.dtype.itemsize).t().contiguous()


def from_planes(planes: Tensor) -> Tensor:
    """Inverse of `to_planes`; returns the integers in one dimension."""
    dtype = _INTEGERS[len(planes)]
    zigzag = planes.t().reshape(-1).view(dtype)
    return ((zigzag >> 1) & torch.iinfo(dtype).max) ^ -(zigzag & 1)
