"""Top-k sparsification: entropy-coded positions and quantized values of the elements with the largest magnitudes.

The length of a message depends on the positions, so TopK is a MessageCodec and no Codec.

n = elements of the vector; k = elements kept, which depends only on n, `fraction` and `chunk`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from acsgd.codecs.base import ALIGNMENT, Codec, Field, SlicedVector, Wire, check_finite, pack, unpack, wire_bytes
from acsgd.codecs.bits import block_size, has_values, positions_of_ones
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.layout import SAMPLE, check_dims
from acsgd.codecs.lloyd import Lloyd
from acsgd.codecs.positions import (
    decode_positions,
    encode_positions,
    max_quotient_bytes,
    remainder_bytes,
    rice_parameter,
)

THRESHOLD_SAMPLE = 1 << 14
"""Minimum number of elements that a threshold is estimated from. Few: each is in another cache line."""


@dataclass(frozen=True)
class TopK:
    """Keep a fraction of a vector, the elements with the largest magnitudes, and quantize them; the others become 0.

    The quantization levels are fitted to the kept elements (`lloyd`), none of which is near 0. At 1 bit, sign and mean
    magnitude are better (`fixpoint`). Relative errors of the kept elements, lloyd and fixpoint (20000 of 1e6 elements):

        bits     normal        Laplace       Student t, 3
        1        .135 .116     .231 .199     .819 .592
        2        .081 .262     .142 .212     .535 .631
        3        .045 .124     .080 .131     .240 .353
        4        .023 .055     .040 .069     .109 .179
        8        .0014 .0034   .0024 .0043   .0065 .0148
    """

    fraction: float
    """Fraction of the elements that is kept, in (0, 1]; at least one element. A position takes about
    log2(2.72 / fraction) bits."""
    bits: int = 4
    """Bits per kept element, 1 to 8."""
    group: int = 128
    """Number of kept neighbours that share a scale; each scale is 2 bytes."""
    chunk: int = 0
    """Number of neighbours of which the fraction is kept; the last chunk may be shorter. 0 = the whole vector."""

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"group={self.group} must be 1 or more values that share a scale; 128 is usual")
        check_dims(self.bits, "group", self.group)
        if not 0 < self.fraction <= 1:
            raise ValueError(f"a fraction of {self.fraction} must lie in (0, 1]; 0.02 is usual")
        if self.chunk < 0:
            raise ValueError(f"chunk={self.chunk} must be 1 or more elements, or 0 for the whole vector")

    def kept(self, n: int) -> int:
        """Return k for a vector [n]."""
        chunk = self._chunk(n)
        return n // chunk * self._kept_of(chunk) + self._kept_of(n % chunk)

    def max_bytes(self, n: int) -> int:
        return wire_bytes(self._wire(n)) + max_quotient_bytes(self.kept(n), n, self._rice(n))

    def encode(self, x: Tensor) -> Tensor:
        """Return the message, uint8[m], of a vector fp32 [n], on its device. Raises NotFiniteError."""
        return self.encode_kept(x)[0]

    def encode_kept(self, x: SlicedVector) -> tuple[Tensor, Tensor]:
        """Return `encode`'s message, and the ascending positions of the kept elements, int64[k]."""
        n, empty = len(x), x[:0].new_empty
        if not has_values(x[:0]):
            _ = x[: block_size(x.device)]
            return empty(self.max_bytes(n), dtype=torch.uint8), empty(self.kept(n), dtype=torch.int64)
        positions, values = self._largest(x)
        fields = self._value_codec(n).encode(values)
        check_finite(fields, x)  # NaN and infinity are always among the largest
        remainders, quotients = encode_positions(positions, n, self._rice(n))
        head = wire_bytes(self._wire(n))
        message = quotients.new_empty(head + len(quotients))
        pack((*fields, remainders), message[:head])
        message[head:] = quotients
        return message, positions

    def decode(self, message: Tensor, n: int) -> Tensor:
        """Return the decoded vector [n], on the message's device. Raises ValueError as `decode_kept`."""
        positions, values = self.decode_kept(message, n)
        return torch.zeros(n, device=message.device).index_copy_(0, positions, values)

    def decode_kept(self, message: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return the kept elements of the decoded vector [n]: their ascending positions, int64[k], and values, fp32[k].

        Raises ValueError for a message that is not one of n elements. Other corruption is undetected: the checksum of
        a message is added and verified by dp/peers.py.
        """
        fields, remainders, quotients = self._fields(message, n)
        if has_values(message):
            positions = decode_positions(remainders, quotients, self.kept(n), n, self._rice(n))
        else:
            positions = message.new_empty(self.kept(n), dtype=torch.int64)
        return positions, self._values(fields, n)

    def decode_values(self, message: Tensor, n: int) -> Tensor:
        """Return the kept elements of the decoded vector [n], fp32[k]. Raises ValueError as `decode_kept`."""
        return self._values(self._fields(message, n)[0], n)

    def _fields(self, message: Tensor, n: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return the fields of the values, the remainders and the quotients of a message of n elements."""
        wire = self._wire(n)
        head = wire_bytes(wire)
        if message.dtype != torch.uint8 or message.dim() != 1 or not head <= len(message) <= self.max_bytes(n):
            raise ValueError(
                f"corrupt message of {n} elements: {message.dtype} of shape {tuple(message.shape)} instead of {head} "
                f"to {self.max_bytes(n)} bytes"
            )
        *fields, remainders = unpack(_aligned(message[:head]), wire)
        return tuple(fields), remainders, message[head:]

    def _values(self, fields: tuple[Tensor, ...], n: int) -> Tensor:
        return self._value_codec(n).decode(fields, (self.kept(n),), torch.float32)

    def error_bound(self, x: Tensor) -> Tensor:
        """The bound of the value codec for kept elements, the magnitude for the others."""
        (positions, values), bound = self._largest(x), x.double().abs()
        bound[positions] = self._value_codec(len(x)).error_bound(values)
        return bound

    def _wire(self, n: int) -> Wire:
        """Return the fields of fixed length, with which a message starts."""
        kept = self.kept(n)
        remainders = Field(torch.uint8, (remainder_bytes(kept, n, self._rice(n)),))
        return *self._value_codec(n).wire((kept,)), remainders

    def _value_codec(self, n: int) -> Codec:
        group = max(1, min(self.group, self.kept(n)))
        return FixPoint(1, dims="group", group=group) if self.bits == 1 else Lloyd(self.bits, "group", group)

    def _rice(self, n: int) -> int:
        return rice_parameter(self.kept(n) / n) if n else 0

    def _chunk(self, n: int) -> int:
        return max(1, min(self.chunk or n, n))

    def _kept_of(self, width: int) -> int:
        return max(1, round(self.fraction * width)) if width else 0

    def _largest(self, x: SlicedVector) -> tuple[Tensor, Tensor]:
        """Return the positions of the kept elements, int64[k], ascending, and their values, fp32[k]."""
        if 0 < len(x) == self._chunk(len(x)):
            return _largest_of_row(x, self.kept(len(x)))
        x = x[:].detach()
        whole = len(x) - len(x) % self._chunk(len(x))
        rows, rest = x[:whole].reshape(-1, self._chunk(len(x))), x[whole:]
        first = _largest_of_row(rows[0], self._kept_of(whole)) if len(rows) == 1 else self._largest_of_rows(rows)
        if not len(rest):
            return first
        positions, values = _largest_of_row(rest, self._kept_of(len(rest)))
        return torch.cat([first[0], whole + positions]), torch.cat([first[1], values])

    def _largest_of_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        kept, blocks = self._kept_of(rows.shape[1]), rows.split(max(1, block_size(rows.device) // rows.shape[1]))
        columns = torch.cat([block.abs().topk(kept, sorted=False).indices.sort().values for block in blocks])
        values = rows.gather(1, columns).view(-1)
        columns += torch.arange(0, rows.numel(), rows.shape[1], device=rows.device)[:, None]
        return columns.view(-1), values


def _largest_of_row(x: SlicedVector, count: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the `count` largest magnitudes of a vector, ascending, and their values.

    Selecting takes far longer than comparing, so candidates are filtered by a threshold first.
    """
    positions, values = _candidates(x, count) if len(x) > SAMPLE else (None, x[:])
    if len(values) < count:
        positions, values = None, x[:]
    found = _select(_magnitudes(values), count)
    return found if positions is None else positions.index_select(0, found), values.index_select(0, found)


def _candidates(x: SlicedVector, count: int) -> tuple[Tensor, Tensor]:
    """Return the ascending positions and values of the elements whose magnitudes are not below a threshold.

    The threshold is chosen from a sample so that probably more than `count` pass it.
    """
    sample = _magnitudes(x[:: len(x) // THRESHOLD_SAMPLE | 1])
    expected = count * len(sample) / len(x)
    threshold = _nth_largest(sample, min(len(sample), int(expected + 4 * math.sqrt(expected)) + 1))
    size, found = block_size(x.device), []
    for start in range(0, len(x), size):  # on a CPU, a block stays in the cache
        block = x[start : start + size]
        positions = _not_below(_magnitudes(block), threshold)
        found.append((positions + start, block.index_select(0, positions)))
    return torch.cat([positions for positions, _ in found]), torch.cat([values for _, values in found])


def _magnitudes(x: Tensor) -> Tensor:
    """Return the magnitudes of fp32 numbers as int32, which are in the same order; NaN is above infinity."""
    return x.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF)


def _nth_largest(magnitudes: Tensor, count: int) -> Tensor:
    """Return the `count`-th largest of some numbers, int32 [n]."""
    if magnitudes.device.type != "cpu":
        return magnitudes.topk(count, sorted=False).values.amin()
    place = len(magnitudes) - count
    return torch.from_numpy(numpy.partition(magnitudes.numpy(), place)[place : place + 1])  # ten times as fast as torch


def _not_below(magnitudes: Tensor, threshold: Tensor) -> Tensor:
    """Return the ascending positions of the numbers, int32 [n], that are not below a threshold."""
    if magnitudes.device.type != "cpu":
        return positions_of_ones(magnitudes >= threshold)
    return positions_of_ones(torch.from_numpy(magnitudes.numpy() >= threshold.numpy()))  # five times as fast as torch


def _select(magnitudes: Tensor, count: int) -> Tensor:
    """Return the ascending positions of the `count` largest of some numbers, int32 [n]; of equal ones, the first."""
    least = _nth_largest(magnitudes, count)
    found = _not_below(magnitudes, least)
    if (beyond := len(found) - count) > 0:
        equal = positions_of_ones(magnitudes.index_select(0, found) == least)
        is_kept = torch.ones(len(found), dtype=torch.bool, device=found.device)
        found = found[is_kept.index_fill_(0, equal[len(equal) - beyond :], False)]
    return found


def _aligned(head: Tensor) -> Tensor:
    """Return the head of a message at an aligned address, so that its fields can be viewed in their dtypes."""
    return head.clone() if head.storage_offset() % ALIGNMENT else head
