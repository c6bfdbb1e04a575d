"""Of a vector, only the largest elements: where they are, entropy-coded, and what they are, in few bits.

A message is as long as the positions make it, so this is no Codec: it declares the length of the longest.

n = elements of the vector; k = elements kept, which depends on n, share and chunk alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from acsgd.codecs.base import ALIGNMENT, Codec, Field, Wire, pack, unpack, wire_bytes
from acsgd.codecs.bits import block_codes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.layout import SAMPLE, check_dims, layout_of
from acsgd.codecs.lloyd import Lloyd
from acsgd.codecs.positions import best_rice, decode_positions, encode_positions, max_unary_bytes, rest_bytes
from acsgd.codecs.scales import measure


@dataclass(frozen=True)
class TopK:
    """Keep a share of a vector, the elements with the largest magnitudes, and quantise these; the others become 0.

    Levels are fitted to what is kept (`lloyd`), of which nothing is near 0. At 1 bit a sign and the mean magnitude are
    better (`fixpoint`). Relative errors of what is kept, lloyd's and fixpoint's (20000 of 1e6 elements):

        bits     normal        Laplace       Student t, 3
        1        .135 .116     .231 .199     .819 .592
        2        .081 .262     .142 .212     .535 .631
        3        .045 .124     .080 .131     .240 .353
        4        .023 .055     .040 .069     .109 .179
        8        .0014 .0034   .0024 .0043   .0065 .0148
    """

    fraction: float
    """Of the elements, in (0, 1]; at least one is kept. Positions take about log2(2.72 / share) bits each."""
    bits: int = 4
    """Per value, 1 to 8."""
    group: int = 128
    """Values that share a scale, neighbours among the kept; each scale is 2 bytes."""
    chunk: int = 0
    """The share is one of every `chunk` neighbours, the last of which may be fewer; 0: of the whole vector."""

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
        """Return the length of the longest message of a vector [n]."""
        return wire_bytes(self._wire(n)) + max_unary_bytes(self.kept(n), n, self._rice(n))

    def encode(self, x: Tensor) -> Tensor:
        """Return the message uint8[m] of a vector fp32 [n], m <= max_bytes(n), on its device. Raises NotFiniteError."""
        n, x = len(x), x.detach()
        positions = self._largest(x)
        values = x[positions]
        if not values.isfinite().all():  # what is not finite is among the largest
            measure(x, layout_of((n,), "tensor", 0), "max", (n,))
        rest, unary = encode_positions(positions, n, self._rice(n))
        head = wire_bytes(self._wire(n))
        message = unary.new_zeros(head + len(unary))
        pack((*self._values(n).encode(values), rest), message[:head])
        message[head:] = unary
        return message

    def decode(self, message: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the vector [n] that a message uint8[m] stands for, on its device.

        Raises ValueError for what cannot be a message of n elements. There is no checksum: damage may go unseen.
        """
        wire, kept = self._wire(n), self.kept(n)
        head = wire_bytes(wire)
        if message.dtype != torch.uint8 or message.dim() != 1 or not head <= len(message) <= self.max_bytes(n):
            raise ValueError(
                f"{message.dtype} of shape {tuple(message.shape)} is no message of {n} elements, which has {head} to "
                f"{self.max_bytes(n)} bytes"
            )
        *fields, rest = unpack(_aligned(message[:head]), wire)
        positions = decode_positions(rest, message[head:], kept, n, self._rice(n))
        values = self._values(n).decode(tuple(fields), (kept,), torch.float32)
        if not values.isfinite().all():
            raise ValueError(f"a message of {n} elements holds values that are not finite")
        return torch.zeros(n, dtype=dtype, device=message.device).index_copy_(0, positions, values.to(dtype))

    def _wire(self, n: int) -> Wire:
        """Declare the fields of fixed length, which come first."""
        kept = self.kept(n)
        return *self._values(n).wire((kept,)), Field(torch.uint8, (rest_bytes(kept, n, self._rice(n)),))

    def _values(self, n: int) -> Codec:
        group = max(1, min(self.group, self.kept(n)))
        return FixPoint(1, dims="group", group=group) if self.bits == 1 else Lloyd(self.bits, "group", group)

    def _rice(self, n: int) -> int:
        return best_rice(self.kept(n) / n) if n else 0

    def _chunk(self, n: int) -> int:
        return max(1, min(self.chunk or n, n))

    def _kept_of(self, width: int) -> int:
        return max(1, round(self.fraction * width)) if width else 0

    def _largest(self, x: Tensor) -> Tensor:
        """Return where the elements are that are kept, int64[k], ascending."""
        whole = len(x) - len(x) % self._chunk(len(x))
        rows, short = x[:whole].reshape(-1, self._chunk(len(x))), x[whole:]
        found = _largest_of_row(rows[0], self._kept_of(whole)) if len(rows) == 1 else self._largest_of_rows(rows)
        return torch.cat([found, whole + _largest_of_row(short, self._kept_of(len(short)))])

    def _largest_of_rows(self, rows: Tensor) -> Tensor:
        kept, blocks = self._kept_of(rows.shape[1]), rows.split(max(1, block_codes(rows.device) // rows.shape[1]))
        columns = torch.cat([block.abs().topk(kept, sorted=False).indices.sort().values for block in blocks])
        return columns.add_(torch.arange(0, rows.numel(), rows.shape[1], device=rows.device)[:, None]).view(-1)


def _largest_of_row(x: Tensor, count: int) -> Tensor:
    """Return where the `count` largest magnitudes of a vector are, ascending.

    Ranking takes far longer than one comparison, so what cannot be among them is sorted out first.
    """
    likely = _likely_largest(x, count) if len(x) > SAMPLE else None
    if likely is None or len(likely) < count:
        return x.abs().topk(count, sorted=False).indices.sort().values
    return likely[x[likely].abs().topk(count, sorted=False).indices.sort().values]


def _likely_largest(x: Tensor, count: int) -> Tensor:
    """Return where magnitudes reach a bound, ascending; by a sample, it leaves a few more than `count`."""
    sample = x[:: len(x) // SAMPLE | 1].abs()
    expected = count * len(sample) / len(x)
    bound = sample.topk(min(len(sample), int(expected + 4 * math.sqrt(expected)) + 1)).values[-1]
    blocks = x.split(block_codes(x.device))  # on a CPU, what stays in the cache
    starts = range(0, len(x), len(blocks[0]))
    return torch.cat(
        [  # "not below", since that is true of NaN
            (block.abs() < bound).logical_not_().nonzero().view(-1) + start
            for start, block in zip(starts, blocks, strict=True)
        ]
    )


def _aligned(head: Tensor) -> Tensor:
    """Return bytes where fields can be viewed in them, wherever the message lies."""
    return head.clone() if head.storage_offset() % ALIGNMENT else head
