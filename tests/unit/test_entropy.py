"""Laws of the entropy coder: lossless, never longer, near the entropy; corrupt messages are refused or keep length."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire, wire_bytes
from acsgd.codecs.bits import pack_bits
from acsgd.codecs.lossless import compress_, decompress

SIZES = [0, 1, 2, 3, 16, 255, 4096, 32768, 100_003]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(n: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (n,), dtype=torch.uint8, generator=generator(seed))


def packed_codes(n: int, seed: int = 0) -> Tensor:
    """Return n bytes of 4-bit codes of which most are one of three, as of differences at large quantization steps."""
    drawn = (torch.randn(2 * n, generator=generator(seed)) * 0.7).round().clamp(-8, 7) + 8
    return pack_bits(drawn.to(torch.uint8), 4)[:n]


def changing(n: int, seed: int = 0) -> Tensor:
    """Return n bytes whose frequent values change every 5000 bytes, as between fields."""
    return (packed_codes(n, seed).long() + torch.arange(n) // 5000 * 37).to(torch.uint8)


FORMS = {
    "random": random_bytes,
    "skewed": packed_codes,
    "changing": changing,
    "constant": lambda n: torch.full((n,), 136, dtype=torch.uint8),
    "zeros": lambda n: torch.zeros(n, dtype=torch.uint8),
    "sparse": lambda n: random_bytes(n) * (random_bytes(n, 1) < 20 + torch.arange(n) // 1000),
    "rising": lambda n: torch.arange(n).to(torch.uint8),
}


def compressed(message: Tensor) -> Tensor:
    """Return the entropy-coded message, which must be shorter."""
    copy = message.clone()
    length = compress_(copy)
    assert length < len(message)
    return copy[:length].clone()


def decoded_or_none(coded: Tensor, n: int) -> Tensor | None:
    """Return the decoded message, or None if it is refused; the output is then unchanged."""
    around = torch.full((n + 32,), 77, dtype=torch.uint8)
    body = around[16 : 16 + n]
    try:
        decompress(coded, body)
    except ValueError:
        assert around.eq(77).all(), "a refused message changed the output"
        return None
    assert around[:16].eq(77).all()
    assert around[16 + n :].eq(77).all()
    return body


def rows_of_levels(rows: int, columns: int, *, largest: float = 20.0) -> tuple[Tensor, Wire]:
    """Return a message of bytes, levels whose magnitude falls from row to row, and bytes; and its fields.

    The last row has one level that is not 0.
    """
    magnitude = largest * torch.logspace(0, -4, rows)[:, None]
    levels = (torch.randn(rows, columns, generator=generator(1)) * magnitude).round().clamp(-127, 127).to(torch.int8)
    levels[-1:, :1] = 1
    codes = ((levels << 1) ^ (levels >> 7)).view(torch.uint8)
    wire = Field(torch.uint8, (48,)), Field(torch.uint8, (rows, columns), has_rows=True), Field(torch.uint8, (16,))
    message = torch.cat([random_bytes(48), codes.view(-1), torch.zeros(-rows * columns % 16, dtype=torch.uint8)])
    return torch.cat([message, random_bytes(16, 2)]), wire


def coded_rows(message: Tensor, wire: Wire) -> Tensor:
    copy = message.clone()
    return copy[: compress_(copy, wire)].clone()


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (1, 1), (3, 7), (40, 300), (2, 5000)])
def test_rows_of_levels_are_restored(rows: int, columns: int) -> None:
    for largest in (0.0, 0.4, 20.0, 1e4):
        message, wire = rows_of_levels(rows, columns, largest=largest)
        assert len(message) == wire_bytes(wire)
        coded, found = coded_rows(message, wire), torch.full_like(message, 77)
        if len(coded) < len(message):
            decompress(coded, found, wire)
            assert torch.equal(found[:48], message[:48])
            assert torch.equal(found[48 : 48 + rows * columns], message[48 : 48 + rows * columns])
            assert torch.equal(found[-16:], message[-16:])


def test_each_row_of_levels_is_coded_near_its_entropy() -> None:
    """The distributions of the coder are not those of rounded normal variables, which costs a percent."""
    message, wire = rows_of_levels(64, 4000)
    entropy = 0.0
    for row in message[48 : 48 + 64 * 4000].view(64, 4000):
        shares = row.bincount().double() / 4000
        entropy -= 4000 * (shares * shares.clamp(min=1e-30).log2()).sum().item()
    assert 8 * len(coded_rows(message, wire)) < 1.015 * entropy


@pytest.mark.parametrize("length", [0, 3, 4, 5, 100, 101, -1, -4])
def test_truncated_rows_are_refused(length: int) -> None:
    message, wire = rows_of_levels(40, 300)
    with pytest.raises(ValueError, match="corrupt entropy-coded message"):
        decompress(coded_rows(message, wire)[:length], message, wire)


def test_damaged_rows_are_refused_or_keep_the_length() -> None:
    message, wire = rows_of_levels(40, 300)
    coded, refused = coded_rows(message, wire), 0
    for bit in range(0, 8 * len(coded), 8 * len(coded) // 60):
        flipped, found = coded.clone(), message.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            decompress(flipped, found, wire)
        except ValueError:
            refused += 1
    assert refused > 50, "a decoder that is out of step does not end where the encoder began"


@pytest.mark.parametrize("form", FORMS)
def test_messages_never_get_longer_and_are_restored(form: str) -> None:
    for n in SIZES:
        body = FORMS[form](n)
        around = torch.full((n + 32,), 77, dtype=torch.uint8)
        around[16 : 16 + n] = body
        view = around[16 : 16 + n]
        length = compress_(view)
        assert 0 <= length <= n, n
        assert around[:16].eq(77).all(), n
        assert around[16 + n :].eq(77).all(), n
        if length == n:
            assert torch.equal(view, body), f"{n} bytes were not shortened, but changed"
            continue
        assert length > 0, "an empty message stands for a tensor that is not finite"
        found = decoded_or_none(view[:length].clone(), n)
        assert found is not None, n
        assert torch.equal(found, body), n


def test_equal_messages_are_coded_equally() -> None:
    body = packed_codes(50_000)
    assert torch.equal(compressed(body), compressed(body))


def test_the_length_is_near_the_entropy() -> None:
    """A Huffman code loses less than a bit per symbol, which is 2 codes here, and its code lengths in each 32 KiB."""
    n = 50_000
    body = packed_codes(n)
    shares = body.bincount().double() / n
    entropy = -(shares * shares.clamp(min=1e-30).log2()).sum().item()
    lengths = 3 + 14 + 19 * 3 + (286 + 30) * 7  # bits of them, at most: RFC 1951, 3.2.7
    bound = n * (entropy + 1) + -(-n // 2**15) * lengths
    assert bound < 0.6 * 8 * n, "the bound would hold without a coder"
    assert 8 * len(compressed(body)) <= bound


@pytest.mark.parametrize("n", [40, 3000, 70_000])
def test_truncated_messages_are_refused(n: int) -> None:
    coded = compressed(packed_codes(n))
    for length in {0, 1, 2, len(coded) // 2, *range(max(0, len(coded) - 40), len(coded))}:
        assert decoded_or_none(coded[:length].clone(), n) is None, length


@pytest.mark.parametrize("off", [-1000, -1, 1, 1000])
def test_messages_of_another_length_are_refused(off: int) -> None:
    coded = compressed(packed_codes(3000))
    assert decoded_or_none(coded, 3000 + off) is None


def test_parts_of_sparse_messages_have_codes_of_their_own() -> None:
    """Each of 16 parts has a value of its own beside 0: that costs no more than the same value in all parts."""
    is_zero = random_bytes(2**16) < 150
    alike, own = (
        torch.where(is_zero, 0, values).to(torch.uint8) for values in (7, 16 * (torch.arange(2**16) // 4096) + 7)
    )
    assert len(compressed(own)) < 1.05 * len(compressed(alike))


def test_small_messages_that_decode_to_many_bytes_take_no_memory() -> None:
    coded = compressed(torch.zeros(2**24, dtype=torch.uint8))
    tracemalloc.start()
    try:
        assert decoded_or_none(coded, 100) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(coded) + 2**16, "zlib has a window, and keeps a copy of the bytes it has not read"


@pytest.mark.parametrize("n", [60, 3000])
def test_flipped_bits_are_refused_or_keep_the_length(n: int) -> None:
    """There is no checksum, so a flip may decode to other symbols, but never to another length."""
    body = packed_codes(n)
    coded = compressed(body)
    refused = 0
    for bit in range(0, 8 * len(coded), max(1, len(coded) // 100)):
        flipped = coded.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        found = decoded_or_none(flipped, n)
        refused += found is None
    assert refused


def test_random_bytes_are_refused_or_keep_the_length() -> None:
    refused = 0
    for n in range(900):
        refused += decoded_or_none(random_bytes(n % 300, n), 500) is None
    assert refused > 870, "few random messages decode to the right length"


@pytest.mark.parametrize("extra", [1, 100])
def test_messages_followed_by_more_bytes_are_refused(extra: int) -> None:
    coded = compressed(packed_codes(3000))
    assert decoded_or_none(torch.cat([coded, random_bytes(extra)]), 3000) is None
