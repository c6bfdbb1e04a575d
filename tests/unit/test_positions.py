"""Laws of Golomb-Rice coding of positions: round trips, cost near the entropy, corrupt streams refused or in bounds."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
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
FRACTIONS = [0.001, 0.01, 0.02, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0]
RICE = [0, 1, 5, 8, 11, 17]
GOLDEN = (3 - math.sqrt(5)) / 2
"""The fraction, .382, at which rice=0 and rice=1 cost the same, and most above the entropy: 4.23 %."""


def random_positions(size: int, fraction: float) -> Tensor:
    """Return positions that are kept independently with a probability."""
    return (torch.rand(size, generator=torch.Generator().manual_seed(0)) < fraction).nonzero().view(-1)


def entropy(fraction: float) -> float:
    """Return the bits per position of whether it is kept."""
    return -sum(p * math.log2(p) for p in (fraction, 1 - fraction) if p)


def bits_of(stream: Tensor) -> list[int]:
    found: list[int] = np.unpackbits(stream.numpy()).tolist()
    return found


def read(remainders: Tensor, quotients: Tensor, count: int, rice: int) -> list[int]:
    """The definition of the streams, position by position; remainders in planes of 8 bits, the lowest first."""
    parts, start = [0] * count, 0
    for shift in range(0, rice, 8):
        bits = min(8, rice - shift)
        stream = bits_of(remainders[start : start + -(-count * bits // 8)])
        start += -(-count * bits // 8)
        for i in range(count):
            parts[i] += int("".join(map(str, stream[i * bits : (i + 1) * bits])), 2) << shift
    found, position, q, index = [], -1, 0, 0
    for bit in bits_of(quotients):
        if not bit:
            q += 1
            continue
        position += (q << rice) + parts[index] + 1
        found.append(position)
        q, index = 0, index + 1
    return found


def test_round_trip_in_streams_of_the_declared_lengths() -> None:
    for size, fraction, rice in product(SIZES, FRACTIONS, RICE):
        case = (size, fraction, rice)
        positions = random_positions(size, fraction)
        before, count = positions.clone(), len(positions)
        remainders, quotients = encode_positions(positions, size, rice)
        assert torch.equal(positions, before), case
        assert len(remainders) == remainder_bytes(count, size, rice), case
        assert len(quotients) <= max_quotient_bytes(count, size, rice), case
        decoded = decode_positions(remainders, quotients, count, size, rice)
        assert decoded.dtype == torch.int64, case
        assert torch.equal(decoded, positions), case


def test_the_streams_follow_their_definition() -> None:
    for fraction, rice in product((0.002, 0.1, 0.6), RICE):
        positions = random_positions(2000, fraction)
        streams = encode_positions(positions, 2000, rice)
        assert read(*streams, len(positions), rice) == positions.tolist(), (fraction, rice)


def test_the_largest_length_is_reached() -> None:
    """Positions at the end leave one gap before them."""
    size, count = 5000, 40
    for rice in range(12):
        _, quotients = encode_positions(torch.arange(size - count, size), size, rice)
        assert len(quotients) == max_quotient_bytes(count, size, rice), rice


def test_without_remainders_the_stream_is_the_bitmap() -> None:
    positions = random_positions(1000, 0.5)
    bitmap = np.zeros(1000, dtype=bool)
    bitmap[positions] = True
    remainders, quotients = encode_positions(positions, 1000, 0)
    assert not len(remainders)
    assert torch.equal(quotients, torch.from_numpy(np.packbits(bitmap[: positions[-1] + 1])))


def test_streams_are_empty_if_all_or_no_positions_are_kept() -> None:
    for size in SIZES:
        for positions in (torch.arange(size), torch.arange(0)):
            assert [len(stream) for stream in encode_positions(positions, size, rice_parameter(1.0))] == [0, 0]
            assert remainder_bytes(size, size, 0) == max_quotient_bytes(len(positions), size, 0) == 0


def test_the_rice_parameter_is_optimal() -> None:
    """Expected bits per position: the remainder, the one, and a zero for each empty block of 2**rice in a row."""

    def cost(fraction: float, rice: int) -> float:
        empty = math.exp(2**rice * math.log1p(-fraction))
        return rice + 1 / (1 - empty)

    fractions = [10 ** (-6 * i / 1000) for i in range(1, 1001)]
    for fraction in fractions:
        least = min(cost(fraction, rice) for rice in range(25))
        assert cost(fraction, rice_parameter(fraction)) <= least * (1 + 2.0**-30), fraction
    assert [rice_parameter(fraction) for fraction in fractions] == sorted(map(rice_parameter, fractions))
    assert rice_parameter(1.0) == rice_parameter(0.5) == 0


def test_the_cost_is_near_the_entropy() -> None:
    size, worst = 1 << 18, 1 / entropy(GOLDEN)
    for fraction in (0.005, 0.01, 1 / 64, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, GOLDEN, 0.4, 0.5):
        positions = random_positions(size, fraction)
        bits = 8 * sum(map(len, encode_positions(positions, size, rice_parameter(fraction))))
        # The standard deviation of the bits of one position is at most 2.
        assert bits <= worst * size * entropy(fraction) + 4 * 2 * math.sqrt(len(positions)) + 16, fraction


SMALL = random_positions(300, 0.1)
SMALL_RICE = rice_parameter(0.1)


def decoded_or_none(remainders: Tensor, quotients: Tensor, size: int = 300) -> Tensor | None:
    """Return the decoded positions, which must be valid, or None if the streams are refused."""
    try:
        positions = decode_positions(remainders, quotients, len(SMALL), size, SMALL_RICE)
    except ValueError:
        return None
    assert len(positions) == len(SMALL)
    assert positions.diff().gt(0).all()
    assert 0 <= positions[0] <= positions[-1] < size
    return positions


def test_streams_of_wrong_length_are_refused() -> None:
    remainders, quotients = encode_positions(SMALL, 300, SMALL_RICE)
    assert decoded_or_none(remainders, quotients) is not None
    for length in range(len(quotients)):
        assert decoded_or_none(remainders, quotients[:length]) is None, length
    for length in range(len(remainders)):
        assert decoded_or_none(remainders[:length], quotients) is None, length
    for extra in (1, 2, 30):
        more = torch.zeros(extra, dtype=torch.uint8)
        assert decoded_or_none(remainders, torch.cat([quotients, more])) is None
        assert decoded_or_none(torch.cat([remainders, more]), quotients) is None


def test_flipped_bits_are_refused_or_give_valid_positions() -> None:
    """A flip in the quotients changes the number of positions; one in the remainders moves the following positions."""
    streams = encode_positions(SMALL, 300, SMALL_RICE)
    for which in (0, 1):
        for bit in range(8 * len(streams[which])):
            flipped = [stream.clone() for stream in streams]
            flipped[which][bit // 8] ^= 1 << bit % 8
            assert decoded_or_none(*flipped) is None or which == 0, bit


def test_positions_beyond_the_size_are_refused() -> None:
    streams = encode_positions(SMALL, 300, SMALL_RICE)
    last = int(SMALL[-1])
    assert decoded_or_none(*streams, size=last + 1) is not None
    assert decoded_or_none(*streams, size=last) is None


def test_random_bytes_are_refused_or_give_valid_positions() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = [len(stream) for stream in encode_positions(SMALL, 300, SMALL_RICE)]
    refused = 0
    for _ in range(300):
        noise = [torch.randint(256, (length,), dtype=torch.uint8, generator=draw) for length in lengths]
        refused += decoded_or_none(noise[0], noise[1]) is None
    assert refused > 200, "few random streams have the right number of ones"
