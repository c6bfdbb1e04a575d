"""Golomb-Rice coding of positions: ascending positions below a size <-> two bit streams.

Source: Golomb, "Run-length encodings" (1966), with Rice's powers of two. The gap before a position is q * 2**rice + r.
The remainder r is packed in `rice` bits; the quotient q is unary-coded, as q zeros and a one. Both have separate
streams, so neither encoding nor decoding loops over positions. With rice=0 there are no remainders, and the quotients
are the bitmap of the positions. If all positions are kept, both streams are empty.

Cost, compared with the entropy of positions that are kept independently of each other:

    fraction kept        .005  .01   .02   .05   .1    .2    .3    .38   .5
    bits per position    9.12  8.12  7.10  5.78  4.75  3.69  2.96  2.62  2.00
    above entropy        .4 %  .5 %  .4 %  1.0 % 1.4 % 2.3 % .8 %  4.1 % .1 %

k = number of positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from acsgd.codecs.bits import pack_bits, packed_bytes, positions_of_ones, unpack_bits


def rice_parameter(fraction: float) -> int:
    """Return the `rice` that takes the fewest bits if a fraction, in (0, 1], of all positions is kept.

    One more bit of r halves the zeros of q. It pays while fewer than .382 (the golden section) of the blocks of
    2**rice positions contain a kept one. Computed with products only, without a logarithm: equal on all hosts.
    """
    occupied, rice = fraction, 0
    while occupied * (3 - occupied) < 1:
        occupied *= 2 - occupied
        rice += 1
    return rice


def remainder_bytes(count: int, size: int, rice: int) -> int:
    """Return the length of the stream of remainders of `count` positions below `size`."""
    return sum(packed_bytes(count, bits) for _, bits in _planes(rice)) if count < size else 0


def max_quotient_bytes(count: int, size: int, rice: int) -> int:
    """Return the largest length of the stream of quotients: gaps, and thus q * 2**rice, sum to size - count at most."""
    return packed_bytes(count + (size - count >> rice), 1) if 0 < count < size else 0


def encode_positions(positions: Tensor, size: int, rice: int) -> tuple[Tensor, Tensor]:
    """Encode ascending positions in [0, size), int64[k], as streams of remainders and quotients, uint8."""
    count, empty = len(positions), positions.new_empty(0, dtype=torch.uint8)
    if count in (0, size):
        return empty, empty
    gaps = positions.diff(prepend=positions.new_full((1,), -1)).sub_(1)
    planes = [
        pack_bits((gaps >> shift).bitwise_and_((1 << bits) - 1).to(torch.uint8), bits) for shift, bits in _planes(rice)
    ]
    ones = (gaps >> rice).add_(1).cumsum(0).sub_(1)
    unary = positions.new_zeros(int(ones[-1]) + 1, dtype=torch.uint8).index_fill_(0, ones, 1)
    return torch.cat([empty, *planes]), pack_bits(unary, 1)


def decode_positions(remainders: Tensor, quotients: Tensor, count: int, size: int, rice: int) -> Tensor:
    """Return the ascending positions, int64[count], in [0, size). Raises ValueError for corrupt streams."""
    corrupt = f"corrupt streams of {count} positions below {size}:"
    if len(remainders) != remainder_bytes(count, size, rice) or len(quotients) > max_quotient_bytes(count, size, rice):
        raise ValueError(f"{corrupt} wrong lengths, {len(remainders)} and {len(quotients)} bytes")
    index = torch.arange(count, device=quotients.device)
    if count in (0, size):
        return index
    ones = positions_of_ones(unpack_bits(quotients, 1, 8 * len(quotients)))
    if len(ones) != count:
        raise ValueError(f"{corrupt} they hold {len(ones)} positions")
    positions = (ones - index << rice).add_(index)
    start = 0
    for shift, bits in _planes(rice):
        plane = remainders[start : start + packed_bytes(count, bits)]
        positions += unpack_bits(plane, bits, count).cumsum(0) << shift
        start += len(plane)
    last, last_one = int(positions[-1]), int(ones[-1])
    if last >= size or len(quotients) != packed_bytes(last_one + 1, 1):
        raise ValueError(f"{corrupt} the last position is {last}, and the quotients have {len(quotients)} bytes")
    return positions


def _planes(rice: int) -> Iterator[tuple[int, int]]:
    """Split r into planes of at most 8 bits; yield the shift and the bits of each."""
    for shift in range(0, rice, 8):
        yield shift, min(8, rice - shift)
