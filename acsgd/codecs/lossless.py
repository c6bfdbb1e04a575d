"""Lossless coding: Huffman codes of bytes, asymmetric numeral systems (Duda 2009, arXiv:0902.0271) for quantization
levels, and an order of the bits of floating-point numbers that suits Huffman codes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire, wire_bytes

_RAW = -zlib.MAX_WBITS
"""Raw DEFLATE, without header and checksum: the frame holds length and checksum."""
_PARTS, _MIN_PART = 16, 1024
"""Number of parts of a sparse message, and the least bytes of one: each costs a table of some 30 bytes."""
_SIZE = struct.Struct("<I")
_MODELS = 128
"""Number of distributions of levels, by their mean magnitude."""
_OF_MODELS = 96
"""Distribution of the differences between the numbers of the models of neighbouring rows."""
_LEVELS = 128
"""Number of magnitudes of levels, of which 0 is one."""


def compress_(message: Tensor, wire: Wire = ()) -> int:
    """Entropy-code a message, uint8[n] in host memory, in place. Return its new length.

    If coding does not shorten it, the message is left unchanged, and the length is n. wire: of the message, if it has
    a field with rows. The other bytes are Huffman-coded.
    """
    view = message.numpy()
    rows = _find_rows(wire)
    coded = _deflate(view) if rows is None else _code_rows(view, *rows)
    if len(coded) >= len(view):
        return len(view)
    view.data[: len(coded)] = coded
    return len(coded)


def decompress(coded: Tensor, message: Tensor, wire: Wire = ()) -> None:
    """Decode an entropy-coded message into `message`, uint8[n]; both in host memory.

    wire: that of `compress_`. Raises ValueError if corrupt; `message` is then undefined.
    """
    source, target = coded.numpy(), message.numpy()
    rows = _find_rows(wire)
    if rows is None:
        _inflate(source, target)
    else:
        _decode_rows(source, target, *rows)


def _find_rows(wire: Wire) -> tuple[int, Field] | None:
    """Return the first byte of the field with rows, and the field; None without one, or if it is empty."""
    for index, field in enumerate(wire):
        if field.has_rows and field.nbytes:
            return wire_bytes(wire[:index]), field
    return None


def _code_rows(view: numpy.ndarray, start: int, field: Field) -> bytes:
    """Return the length of the coded rows, bytes, as uint32; the coded rows; and the Huffman-coded rest."""
    codes, rest = view[start : start + field.nbytes], numpy.delete(view, slice(start, start + field.nbytes))
    words = _encode_levels(codes.reshape(field.shape)).tobytes()
    return _SIZE.pack(len(words)) + words + _deflate(rest)


def _decode_rows(source: numpy.ndarray, target: numpy.ndarray, start: int, field: Field) -> None:
    end, size = start + field.nbytes, source[: _SIZE.size].tobytes()
    if len(size) < _SIZE.size:
        raise ValueError(f"corrupt entropy-coded message: it has only {len(size)} bytes")
    rest_at = _SIZE.size + _SIZE.unpack(size)[0]
    if rest_at > len(source) or rest_at % 4:
        raise ValueError(f"corrupt entropy-coded message: {len(source)} bytes, of which {rest_at} are of its rows")
    rest = numpy.empty(len(target) - field.nbytes, dtype=numpy.uint8)
    _inflate(source[rest_at:], rest)
    target[:start], target[end:] = rest[:start], rest[start:]
    words = numpy.frombuffer(source[_SIZE.size : rest_at].tobytes(), dtype="<u4")
    _decode_levels(words, target[start:end].reshape(field.shape))


def _encode_levels(codes: numpy.ndarray) -> numpy.ndarray:
    """Return coded rows of levels, uint32. codes: 0, 1, 2, 3, 4, ... for levels 0, -1, 1, -2, 2, ..., [rows, columns].

    Levels lie between -127 and 127.
    A row is coded with the distribution of `_model` whose mean magnitude is that of its levels; a row of zeros takes no
    bytes. The numbers of the distributions come first, as differences from that of the row before. The coder is a
    stack, so all is encoded in reverse.
    """
    from constriction import stream

    coder = stream.stack.AnsCoder()
    size = (codes >> 1).mean(1) + (codes & 1).mean(1)
    numbers = numpy.searchsorted(_mean_magnitudes(), size).astype(numpy.int32)
    for row, number in zip(codes[::-1], numbers[::-1].tolist(), strict=True):
        if number:
            coder.encode_reverse(row.astype(numpy.int32), _model(number))
    coder.encode_reverse(_zigzag(numpy.diff(numbers, prepend=numpy.int32(0))), _model(_OF_MODELS))
    return coder.get_compressed()


def _decode_levels(words: numpy.ndarray, codes: numpy.ndarray) -> None:
    """Decode what `_encode_levels` returned, into `codes`. Raises ValueError if corrupt."""
    from constriction import stream

    coder = stream.stack.AnsCoder(words)
    differences = coder.decode(_model(_OF_MODELS), len(codes))
    numbers = numpy.cumsum((differences >> 1) ^ -(differences & 1))
    if numbers.min() < 0 or numbers.max() >= _MODELS:
        raise ValueError("corrupt entropy-coded message: its rows have models that do not exist")
    for row, number in zip(codes, numbers.tolist(), strict=True):
        row[:] = coder.decode(_model(number), len(row)) if number else 0
    if not coder.is_empty():
        raise ValueError(f"corrupt entropy-coded message: {4 * len(words)} bytes of rows, which end before")


def _zigzag(values: numpy.ndarray) -> numpy.ndarray:
    return (values << 1) ^ (values >> 31)


@lru_cache(_MODELS)
def _model(number: int) -> Any:
    """Return a distribution of levels: of a logistic variable, rounded."""
    from constriction import stream

    tails = _tails(number)
    shares = tails - numpy.append(tails[1:], 0.0)
    return stream.model.Categorical(numpy.concatenate([[1 - 2 * tails[0]], shares.repeat(2)]), perfect=False)


def _tails(number: int) -> numpy.ndarray:
    """Return the probability that a level is at least 1, 2, ... By products and quotients, so equal on all hosts."""
    root = number / _MODELS
    odds = root * numpy.cumprod([1.0, *(_LEVELS - 2) * [root**2]])
    return odds / (1 + odds)


@lru_cache(1)
def _mean_magnitudes() -> numpy.ndarray:
    """Return the largest mean magnitude of levels with each distribution, but for the last one."""
    means = numpy.array([2 * _tails(number).sum() for number in range(1, _MODELS)])
    return numpy.concatenate([[0.0], (means[1:] + means[:-1]) / 2])


def _deflate(view: numpy.ndarray) -> bytes:
    """Return the Huffman codes of a message.

    If most bytes are 0, runs are coded as one symbol, and its parts have codes of their own, as their
    bytes may be distributed differently.
    """
    is_sparse = 2 * numpy.count_nonzero(view) < len(view)
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW, 9, zlib.Z_RLE if is_sparse else zlib.Z_HUFFMAN_ONLY)
    return b"".join(_code(coder, view) if is_sparse else [coder.compress(view.data)]) + coder.flush()


def _code(coder: zlib._Compress, view: numpy.ndarray) -> Iterator[bytes]:
    """Code a message in parts; a part of zeros shares the codes of the next."""
    size = max(_MIN_PART, -(-len(view) // _PARTS))
    for start in range(0, len(view), size):
        part = view[start : start + size]
        yield coder.compress(part.data)
        if part.any():
            yield coder.flush(zlib.Z_BLOCK)


def _inflate(coded: numpy.ndarray, view: numpy.ndarray) -> None:
    decoder = zlib.decompressobj(_RAW)
    try:
        decoded = decoder.decompress(coded.data, len(view) + 1)
    except zlib.error as error:
        raise ValueError(f"corrupt entropy-coded message of {len(coded)} bytes: {error}") from None
    if len(decoded) != len(view) or not decoder.eof or decoder.unused_data:
        raise ValueError(
            f"corrupt entropy-coded message: its {len(coded)} bytes decode to {len(decoded)} or more, not {len(view)}"
        )
    view.data[:] = decoded


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
