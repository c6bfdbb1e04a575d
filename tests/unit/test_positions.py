"""Laws of the coder of positions: they return, in few more bits than their entropy; what is damaged stays in bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from acsgd.codecs.positions import (
    decode_positions,
    encode_positions,
    max_quotient_bytes,
    remainder_bytes,
    rice_parameter,
)

SIZES = [0, 1, 2, 7, 8, 9, 100, 4097]
SHARES = [0.001, 0.01, 0.02, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0]
GOLDEN = (3 - math.sqrt(5)) / 2
"""The share, .382, where rice=0 and rice=1 cost alike, and most more than the entropy: 1 / share bits, 4.23 % more."""


def drawn(size: int, share: float, seed: int = 0) -> Tensor:
    """Return positions, each kept with probability `share`, whichever others are."""
    return (torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share).nonzero().view(-1)


def entropy(share: float) -> float:
    """Return the bits of a position that is kept or not."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p)


def bits_of(stream: Tensor) -> list[int]:
    found: list[int] = np.unpackbits(stream.numpy()).tolist()
    return found


def read(rest: Tensor, unary: Tensor, count: int, rice: int) -> list[int]:
    """The definition of the streams, position by position; r in planes of 8 bits, the lowest first."""
    parts, start = [0] * count, 0
    for shift in range(0, rice, 8):
        bits = min(8, rice - shift)
        stream = bits_of(rest[start : start + -(-count * bits // 8)])
        start += -(-count * bits // 8)
        for i in range(count):
            parts[i] += int("".join(map(str, stream[i * bits : (i + 1) * bits])), 2) << shift
    found, place, q, index = [], -1, 0, 0
    for bit in bits_of(unary):
        if not bit:
            q += 1
            continue
        place += (q << rice) + parts[index] + 1
        found.append(place)
        q, index = 0, index + 1
    return found


@pytest.mark.parametrize("rice", [0, 1, 5, 8, 11, 17])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", SIZES)
def test_positions_return_from_streams_of_the_lengths_declared(size: int, share: float, rice: int) -> None:
    positions = drawn(size, share)
    before, count = positions.clone(), len(positions)
    rest, unary = encode_positions(positions, size, rice)
    assert torch.equal(positions, before)
    assert len(rest) == remainder_bytes(count, size, rice)
    assert len(unary) <= max_quotient_bytes(count, size, rice)
    returned = decode_positions(rest, unary, count, size, rice)
    assert returned.dtype == torch.int64
    assert torch.equal(returned, positions)


@pytest.mark.parametrize("rice", [0, 1, 5, 8, 11, 17])
@pytest.mark.parametrize("share", [0.002, 0.1, 0.6])
def test_the_streams_are_those_defined(share: float, rice: int) -> None:
    positions = drawn(5000, share)
    assert read(*encode_positions(positions, 5000, rice), len(positions), rice) == positions.tolist()


@pytest.mark.parametrize("rice", range(12))
def test_the_longest_stream_is_as_long_as_declared(rice: int) -> None:
    """Positions at the end leave one gap of all that is left out."""
    size, count = 5000, 40
    _, unary = encode_positions(torch.arange(size - count, size), size, rice)
    assert len(unary) == max_quotient_bytes(count, size, rice)


def test_without_rests_it_is_the_bitmap() -> None:
    positions = drawn(1000, 0.5)
    bitmap = np.zeros(1000, dtype=bool)
    bitmap[positions] = True
    rest, unary = encode_positions(positions, 1000, 0)
    assert not len(rest)
    assert torch.equal(unary, torch.from_numpy(np.packbits(bitmap[: positions[-1] + 1])))


@pytest.mark.parametrize("size", SIZES)
def test_where_all_are_kept_or_none_nothing_travels(size: int) -> None:
    for positions in (torch.arange(size), torch.arange(0)):
        assert [len(stream) for stream in encode_positions(positions, size, rice_parameter(1.0))] == [0, 0]
        assert remainder_bytes(size, size, 0) == max_quotient_bytes(len(positions), size, 0) == 0


def test_the_best_parameter_is_the_best() -> None:
    """Bits of a position: its r, the 1, and as many 0 as blocks of 2**rice in a row are empty, in expectation."""

    def cost(share: float, rice: int) -> float:
        empty = math.exp(2**rice * math.log1p(-share))
        return rice + 1 / (1 - empty)

    shares = [10 ** (-6 * i / 1000) for i in range(1, 1001)]
    for share in shares:
        least = min(cost(share, rice) for rice in range(25))
        assert cost(share, rice_parameter(share)) <= least * (1 + 2.0**-30), share
    assert [rice_parameter(share) for share in shares] == sorted(rice_parameter(share) for share in shares)
    assert rice_parameter(1.0) == rice_parameter(0.5) == 0


@pytest.mark.parametrize("share", [0.005, 0.01, 1 / 64, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, GOLDEN, 0.4, 0.5])
def test_the_cost_is_near_the_entropy(share: float) -> None:
    size = 1 << 20
    positions = drawn(size, share)
    streams = encode_positions(positions, size, rice_parameter(share))
    bits = 8 * sum(map(len, streams))
    worst = 1 / entropy(GOLDEN)
    # So many bits per position in expectation; one takes at most 2 more or fewer, as a standard deviation.
    assert bits <= worst * size * entropy(share) + 4 * 2 * math.sqrt(len(positions)) + 16


SMALL = drawn(300, 0.1)
RICE = rice_parameter(0.1)


def decoded(rest: Tensor, unary: Tensor, size: int = 300) -> Tensor | None:
    """Return what comes of some bytes, which must be positions; None if they are refused."""
    try:
        positions = decode_positions(rest, unary, len(SMALL), size, RICE)
    except ValueError:
        return None
    assert len(positions) == len(SMALL)
    assert positions.diff().gt(0).all()
    assert 0 <= positions[0] <= positions[-1] < size
    return positions


def test_what_is_cut_short_or_followed_by_more_is_refused() -> None:
    rest, unary = encode_positions(SMALL, 300, RICE)
    assert decoded(rest, unary) is not None
    for length in range(len(unary)):
        assert decoded(rest, unary[:length]) is None, length
    for length in range(len(rest)):
        assert decoded(rest[:length], unary) is None, length
    for extra in (1, 2, 30):
        more = torch.zeros(extra, dtype=torch.uint8)
        assert decoded(rest, torch.cat([unary, more])) is None
        assert decoded(torch.cat([rest, more]), unary) is None


def test_of_flipped_bits_come_positions_or_an_error() -> None:
    """Each flip in the unary stream changes how many there are; one in the rests moves what follows, maybe too far."""
    streams = encode_positions(SMALL, 300, RICE)
    for which in (0, 1):
        for bit in range(8 * len(streams[which])):
            flipped = [stream.clone() for stream in streams]
            flipped[which][bit // 8] ^= 1 << bit % 8
            assert decoded(*flipped) is None or which == 0, bit


def test_a_position_beyond_the_size_is_refused() -> None:
    streams = encode_positions(SMALL, 300, RICE)
    last = int(SMALL[-1])
    assert decoded(*streams, size=last + 1) is not None
    assert decoded(*streams, size=last) is None


def test_garbage_is_refused_or_positions() -> None:
    draw = torch.Generator().manual_seed(0)
    rest, unary = encode_positions(SMALL, 300, RICE)
    refused = 0
    for _ in range(300):
        noise = [torch.randint(256, (len(stream),), dtype=torch.uint8, generator=draw) for stream in (rest, unary)]
        refused += decoded(noise[0], noise[1]) is None
    assert refused > 200, "few random streams have as many ones"
