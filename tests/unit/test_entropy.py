"""Laws of the entropy coder: what it made shorter comes back, and what it did not make is an error or as long."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from torch import Tensor

from acsgd.codecs.bits import pack_bits
from acsgd.codecs.entropy import compress_, decompress

SIZES = [0, 1, 2, 3, 16, 255, 4096, 32768, 100_003]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(n: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (n,), dtype=torch.uint8, generator=generator(seed))


def codes(n: int, seed: int = 0) -> Tensor:
    """Return n bytes of 4-bit codes of which most are one of three, as of differences at wide levels."""
    drawn = (torch.randn(2 * n, generator=generator(seed)) * 0.7).round().clamp(-8, 7) + 8
    return pack_bits(drawn.to(torch.uint8), 4)[:n]


def changing(n: int, seed: int = 0) -> Tensor:
    """Return n bytes whose frequent values are others in each 5000, as where one field follows another."""
    return (codes(n, seed).long() + torch.arange(n) // 5000 * 37).to(torch.uint8)


FORMS = {
    "random": random_bytes,
    "skewed": codes,
    "changing": changing,
    "constant": lambda n: torch.full((n,), 136, dtype=torch.uint8),
    "zeros": lambda n: torch.zeros(n, dtype=torch.uint8),
    "rising": lambda n: torch.arange(n).to(torch.uint8),
}


def squeezed(body: Tensor) -> Tensor:
    """Return a copy of a body after the coder, which must have become shorter."""
    copy = body.clone()
    length = compress_(copy)
    assert length < len(body)
    return copy[:length].clone()


def decoded(coded: Tensor, n: int) -> Tensor | None:
    """Return what comes of some bytes; None if they are refused, which must leave what was there."""
    around = torch.full((n + 32,), 77, dtype=torch.uint8)
    body = around[16 : 16 + n]
    try:
        decompress(coded, body)
    except ValueError:
        assert around.eq(77).all(), "of bytes that are refused, some were taken"
        return None
    assert around[:16].eq(77).all()
    assert around[16 + n :].eq(77).all()
    return body


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", SIZES)
def test_it_is_never_longer_and_comes_back(form: str, n: int) -> None:
    body = FORMS[form](n)
    around = torch.full((n + 32,), 77, dtype=torch.uint8)
    around[16 : 16 + n] = body
    view = around[16 : 16 + n]
    length = compress_(view)
    assert 0 <= length <= n
    assert around[:16].eq(77).all()
    assert around[16 + n :].eq(77).all()
    if length == n:
        assert torch.equal(view, body), "what did not get shorter must be as it was"
        return
    assert length > 0, "a message of no bytes says that a tensor is not finite"
    found = decoded(view[:length].clone(), n)
    assert found is not None
    assert torch.equal(found, body)


def test_it_depends_on_the_bytes_alone() -> None:
    body = codes(50_000)
    assert torch.equal(squeezed(body), squeezed(body))


def test_it_comes_near_the_entropy() -> None:
    """A Huffman code loses less than a bit per symbol, which is 2 codes here, and says its lengths in each 32 KiB."""
    n = 50_000
    body = codes(n)
    shares = body.bincount().double() / n
    entropy = -(shares * shares.clamp(min=1e-30).log2()).sum().item()
    lengths = 3 + 14 + 19 * 3 + (286 + 30) * 7  # bits of them, at most: RFC 1951, 3.2.7
    bound = n * (entropy + 1) + -(-n // 2**15) * lengths
    assert bound < 0.6 * 8 * n, "the law would hold without a coder"
    assert 8 * len(squeezed(body)) <= bound


@pytest.mark.parametrize("n", [40, 3000, 70_000])
def test_what_is_cut_short_is_refused(n: int) -> None:
    coded = squeezed(codes(n))
    for length in {0, 1, 2, len(coded) // 2, *range(max(0, len(coded) - 40), len(coded))}:
        assert decoded(coded[:length].clone(), n) is None, length


@pytest.mark.parametrize("off", [-1000, -1, 1, 1000])
def test_what_is_of_another_length_is_refused(off: int) -> None:
    coded = squeezed(codes(3000))
    assert decoded(coded, 3000 + off) is None


def test_a_few_bytes_that_decode_to_very_many_take_no_memory() -> None:
    coded = squeezed(torch.zeros(2**24, dtype=torch.uint8))
    tracemalloc.start()
    try:
        assert decoded(coded, 100) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(coded), "zlib keeps a copy of what it has not looked at"


@pytest.mark.parametrize("n", [60, 3000])
def test_a_flipped_bit_is_refused_or_leaves_the_length(n: int) -> None:
    """There is no checksum, so a wrong symbol of as many bits decodes to something else; never to fewer or more."""
    body = codes(n)
    coded = squeezed(body)
    refused = 0
    for bit in range(0, 8 * len(coded), max(1, len(coded) // 100)):
        flipped = coded.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        found = decoded(flipped, n)
        refused += found is None
    assert refused


@pytest.mark.parametrize("seed", range(3))
def test_garbage_is_refused_or_leaves_the_length(seed: int) -> None:
    refused = 0
    for n in range(300):
        refused += decoded(random_bytes(n, 1000 * seed + n), 500) is None
    assert refused > 290, "noise that decodes to just so many bytes is rare"


@pytest.mark.parametrize("extra", [1, 100])
def test_what_is_followed_by_more_is_refused(extra: int) -> None:
    """A message is exactly what the coder made: bytes after its end come from somewhere else."""
    coded = squeezed(codes(3000))
    assert decoded(torch.cat([coded, random_bytes(extra)]), 3000) is None
