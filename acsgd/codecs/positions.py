"""An entropy coder for positions: ascending places below a size <-> two bit streams.

Source: Golomb, "Run-length encodings" (1966), with Rice's powers of two. Before a position, a gap of q * 2**rice + r
places is left out. The rest r is packed, in `rice` bits; q is written in unary, as q bits 0 and a 1. Each has a stream
of its own, so neither direction loops over the positions. With rice=0 nothing is left of r, and the q are the bitmap of
the positions. Where all are kept, both streams are empty.

Beside the entropy of positions that are kept independently:

    share                .005  .01   .02   .05   .1    .2    .3    .38   .5
    bits per position    9.12  8.12  7.10  5.78  4.75  3.69  2.96  2.62  2.00
    more than entropy    .4 %  .5 %  .4 %  1.0 % 1.4 % 2.3 % .8 %  4.1 % .1 %

k = positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from acsgd.codecs.bits import pack_bits, packed_bytes, unpack_bits


def best_rice(share: float) -> int:
    """Return the parameter that takes the fewest bits where a share, in (0, 1], of all places is kept.

    One more bit of r halves the 0 bits of q, and pays while fewer than .382 (the golden section) of the blocks of
    2**rice places hold a position. Products alone, without a logarithm, so that all hosts find the same.
    """
    held, rice = share, 0
    while held * (3 - held) < 1:
        held *= 2 - held
        rice += 1
    return rice


def rest_bytes(count: int, size: int, rice: int) -> int:
    """Return the length of the stream of r, for `count` positions below `size`."""
    return sum(packed_bytes(count, bits) for _, bits in _planes(rice)) if count < size else 0


def max_unary_bytes(count: int, size: int, rice: int) -> int:
    """Return the most bytes of the stream of q: gaps sum to at most size - count, and so do q * 2**rice."""
    return packed_bytes(count + (size - count >> rice), 1) if 0 < count < size else 0


def encode_positions(positions: Tensor, size: int, rice: int) -> tuple[Tensor, Tensor]:
    """Return the streams of r and q of int64[k] positions, ascending, in [0, size): uint8, on their device."""
    count, nothing = len(positions), positions.new_empty(0, dtype=torch.uint8)
    if count in (0, size):
        return nothing, nothing
    gaps = positions.diff(prepend=positions.new_full((1,), -1)).sub_(1)
    planes = [
        pack_bits((gaps >> shift).bitwise_and_((1 << bits) - 1).to(torch.uint8), bits) for shift, bits in _planes(rice)
    ]
    ones = (gaps >> rice).add_(1).cumsum(0).sub_(1)
    unary = positions.new_zeros(int(ones[-1]) + 1, dtype=torch.uint8).index_fill_(0, ones, 1)
    return torch.cat([nothing, *planes]), pack_bits(unary, 1)


def decode_positions(rest: Tensor, unary: Tensor, count: int, size: int, rice: int) -> Tensor:
    """Return the positions int64[count], ascending, in [0, size). Raises ValueError if the streams hold no such."""
    if len(rest) != rest_bytes(count, size, rice) or len(unary) > max_unary_bytes(count, size, rice):
        raise ValueError(f"{len(rest)} and {len(unary)} bytes cannot be {count} positions below {size}")
    index = torch.arange(count, device=unary.device)
    if count in (0, size):
        return index
    ones = unpack_bits(unary, 1, 8 * len(unary)).nonzero().view(-1)
    if len(ones) != count:
        raise ValueError(f"{len(unary)} bytes hold {len(ones)} positions instead of {count}")
    positions = (ones - index << rice).add_(index)
    start = 0
    for shift, bits in _planes(rice):
        plane = rest[start : start + packed_bytes(count, bits)]
        positions += unpack_bits(plane, bits, count).cumsum(0) << shift
        start += len(plane)
    last, last_one = int(positions[-1]), int(ones[-1])
    if last >= size or len(unary) != packed_bytes(last_one + 1, 1):
        raise ValueError(f"{len(rest)} and {len(unary)} bytes lead to position {last}, of {size}")
    return positions


def _planes(rice: int) -> Iterator[tuple[int, int]]:
    """Cut r into numbers of at most 8 bits; return where in r each begins, and its bits."""
    for shift in range(0, rice, 8):
        yield shift, min(8, rice - shift)
