"""Laws of what sends the largest elements: which they are, how near they return, how long a message is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acsgd.codecs import bits as bits_module
from acsgd.codecs.base import ALIGNMENT, NotFiniteError, wire_bytes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.layout import SAMPLE
from acsgd.codecs.lloyd import Lloyd
from acsgd.codecs.topk import TopK

WORST = 1.0423
"""Bits of positions beside their entropy, at most (test_positions.py)."""
SIZES = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 4097]
SETTINGS = [
    TopK(0.02),
    TopK(0.2, bits=1, group=8),
    TopK(0.5, bits=2, group=5),
    TopK(0.7, bits=8, group=10**9),
    TopK(1.0, bits=3),
    TopK(1 / 64, bits=2, chunk=64),
    TopK(0.3, bits=4, chunk=7),
    TopK(1e-9, bits=1, chunk=1000),
    TopK(0.5, bits=1, chunk=1),
]


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def heavy(n: int) -> Tensor:
    return gaussian(n, 1) / gaussian(2 * n, 2).view(2, n).square().mean(0).sqrt()


def mostly_zeros(n: int) -> Tensor:
    return gaussian(n) * (torch.arange(n) % 100 == 3)


DATA = {
    "gaussian": gaussian,
    "heavy": heavy,
    "mostly zeros": mostly_zeros,
    "zeros": torch.zeros,
    "few values": lambda n: gaussian(n).round(),
    "tiny": lambda n: gaussian(n) * 1e-30,
    "huge": lambda n: gaussian(n) * 1e37,
}


def parts(codec: TopK, x: Tensor) -> list[Tensor]:
    """Cut a vector into what the share is taken of."""
    return list(x.split(codec.chunk)) if codec.chunk else [x]


def count_of(codec: TopK, part: Tensor) -> int:
    return max(1, round(codec.fraction * len(part))) if len(part) else 0


def largest(codec: TopK, x: Tensor) -> Tensor:
    """Return where the elements are that should be kept, where no two magnitudes are equal."""
    masks = []
    for part in parts(codec, x):
        masks.append(torch.zeros(len(part), dtype=torch.bool))
        masks[-1][part.abs().argsort(descending=True)[: count_of(codec, part)]] = True
    return torch.cat(masks).nonzero().view(-1)


def values_of(codec: TopK, kept: Tensor) -> Tensor:
    """Return what the codec of the values makes of them."""
    group = max(1, min(codec.group, len(kept)))
    values = FixPoint(1, dims="group", group=group) if codec.bits == 1 else Lloyd(codec.bits, "group", group)
    return values.decode(values.encode(kept), (len(kept),), torch.float32)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_the_largest_return_as_the_codec_of_values_makes_them_and_the_rest_as_zeros(codec: TopK, n: int) -> None:
    """Bit for bit, so errors are those of Lloyd or FixPoint, whose bounds are laws of their own."""
    for form in (gaussian, heavy):
        x = form(n)
        where, before = largest(codec, x), x.clone()
        expected = torch.zeros(n)
        expected[where] = values_of(codec, x[where])
        message = codec.encode(x)
        assert torch.equal(x, before)
        assert message.dtype == torch.uint8
        assert torch.equal(codec.decode(message, n), expected)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_kept_are_as_many_as_asked_and_none_is_smaller_than_one_left_out(codec: TopK, name: str) -> None:
    """Also where magnitudes are equal; seen through 1 bit, which makes nothing 0 that is kept beside others."""
    codec = TopK(codec.fraction, 1, 10**9, codec.chunk)
    for n in SIZES:
        x = DATA[name](n)
        y = codec.decode(codec.encode(x), n)
        counts = [count_of(codec, part) for part in parts(codec, x)]
        assert codec.kept(n) == sum(counts)
        if not y.any():
            assert not x.any()
            continue
        for count, before, after in zip(counts, parts(codec, x), parts(codec, y), strict=True):
            kept = after != 0
            assert int(kept.sum()) == count
            if count < len(before):
                assert before[kept].abs().min() >= before[~kept].abs().max()


@pytest.mark.parametrize("share", [1e-4, 0.02, 0.3])
def test_a_long_vector_keeps_the_largest_wherever_they_are(share: float) -> None:
    """A sample says first what is likely large; here it is right, far too high, or far too low."""
    n = 4 * SAMPLE
    x = gaussian(n)
    sampled = torch.zeros(n, dtype=torch.bool)
    sampled[:: n // SAMPLE | 1] = True
    for each in (x, torch.where(sampled, 10 * x, x), torch.where(sampled, 0.1 * x, x), x.sort().values):
        each = each + each.sign() * torch.rand(n, generator=torch.Generator().manual_seed(3)) * 1e-5
        codec = TopK(share, bits=1)
        found = codec.decode(codec.encode(each), n).abs().gt(0)
        order = each.abs().sort(descending=True).values
        k = round(share * n)
        assert int(found.sum()) == k
        assert each[found].abs().min() == order[k - 1]


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_a_message_is_no_longer_than_declared_and_leaves_no_more_than_there_was(codec: TopK, name: str) -> None:
    for n in SIZES:
        x = DATA[name](n)
        message = codec.encode(x)
        assert 0 < len(message) <= codec.max_bytes(n)
        y = codec.decode(message, n).double()
        assert (x.double() - y).norm() <= x.double().norm() * (1 + 2.0**-10)  # fp16 of a scale


def test_the_longest_message_is_as_long_as_declared() -> None:
    x = torch.zeros(5000)
    x[-100:] = 1 + gaussian(100).abs()
    for codec in (TopK(0.02), TopK(0.02, bits=1)):
        assert len(codec.encode(x)) == codec.max_bytes(5000)


@pytest.mark.parametrize("bits", [1, 4])
def test_a_share_of_one_sends_no_positions(bits: int) -> None:
    x = gaussian(1000)
    values = FixPoint(1, dims="group", group=128) if bits == 1 else Lloyd(bits, "group", 128)
    assert len(TopK(1.0, bits).encode(x)) == TopK(1.0, bits).max_bytes(1000) == wire_bytes(values.wire((1000,)))


@pytest.mark.parametrize("share", [0.005, 0.02, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("chunk", [0, 4000])
def test_positions_cost_little_more_than_their_entropy(share: float, chunk: int) -> None:
    n = 400_000
    codec = TopK(share, bits=4, chunk=chunk)
    kept = round(share * n)
    entropy = -n * sum(p * math.log2(p) for p in (share, 1 - share))
    values = wire_bytes(Lloyd(4, "group", 128).wire((kept,)))
    padding, chance = 8 * (ALIGNMENT + 1), 4 * 2 * math.sqrt(kept)
    assert 8 * (len(codec.encode(gaussian(n))) - values) <= WORST * entropy + padding + chance


def test_the_setting_of_sparseloco_saves_more_than_200_times() -> None:
    n = 1 << 20
    codec = TopK(64 / 4096, bits=2, chunk=4096)
    assert 4 * n / len(codec.encode(gaussian(n))) > 200


@pytest.mark.parametrize("name", ["gaussian", "heavy"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_fitted_levels_have_at_most_two_thirds_of_the_error_of_uniform_ones(bits: int, name: str) -> None:
    """At 2 bits with outliers 0.9; the bytes are the same but for the levels, 2**(bits + 1)."""
    n = 200_000
    x = DATA[name](n)
    kept = x[largest(TopK(0.05), x)]
    uniform = FixPoint(bits, dims="group", group=128)
    error = (uniform.decode(uniform.encode(kept), (len(kept),), torch.float32) - kept).norm()
    y = TopK(0.05, bits)
    fitted = (y.decode(y.encode(x), n)[largest(y, x)] - kept).norm()
    assert fitted < (0.9 if bits == 2 else 2 / 3) * error


@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_the_same_vector_gives_the_same_bytes(codec: TopK) -> None:
    x = gaussian(3000).round()
    spread = torch.stack([x, -x], 1)[:, 0]
    assert not spread.is_contiguous()
    assert torch.equal(codec.encode(x), codec.encode(x.clone()))
    assert torch.equal(codec.encode(x), codec.encode(spread))


@pytest.mark.parametrize("codec", [TopK(0.2), TopK(0.3, chunk=7), TopK(0.3, chunk=100)], ids=str)
def test_blocks_leave_no_trace(codec: TopK, monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(SAMPLE + 1001)
    whole = codec.encode(x)
    monkeypatch.setattr(bits_module, "BLOCK", 1 << 13)
    assert torch.equal(codec.encode(x), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_it_decodes_to_the_dtype_asked_for_wherever_the_message_lies(codec: TopK, dtype: torch.dtype) -> None:
    message = codec.encode(gaussian(1000))
    room = torch.full((3 + len(message),), 255, dtype=torch.uint8)
    room[3:] = message
    assert torch.equal(codec.decode(room[3:], 1000, dtype), codec.decode(message, 1000).to(dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_what_is_not_finite_is_refused_with_its_place(codec: TopK, bad: float) -> None:
    for n in (1, 1000, SAMPLE + 1001) if not codec.chunk else (1, 1000):
        for place in (0, n // 2, n - 1):
            x = gaussian(n)
            x[place] = bad
            with pytest.raises(NotFiniteError, match=rf"{bad} at index \({place},\)"):
                codec.encode(x)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.1}, "fraction"),
        ({"fraction": math.nan}, "fraction"),
        ({"fraction": 0.1, "bits": 0}, "bits"),
        ({"fraction": 0.1, "bits": 9}, "bits"),
        ({"fraction": 0.1, "group": 0}, "group"),
        ({"fraction": 0.1, "chunk": -1}, "chunk"),
    ],
)
def test_options_without_meaning_are_refused(wrong: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        TopK(**wrong)


DAMAGED = [TopK(0.1, bits=4), TopK(0.1, bits=1, group=7), TopK(0.2, bits=2, chunk=50), TopK(0.004, bits=3)]


def decoded(codec: TopK, message: Tensor, n: int) -> Tensor | None:
    """Return what comes of some bytes, which must be a sparse vector; None if they are refused."""
    try:
        y = codec.decode(message, n)
    except ValueError:
        return None
    assert y.shape == (n,)
    assert y.isfinite().all()
    assert int((y != 0).sum()) <= codec.kept(n)
    return y


@pytest.mark.parametrize("codec", DAMAGED, ids=str)
def test_what_is_cut_short_or_followed_by_more_is_refused(codec: TopK) -> None:
    message = codec.encode(gaussian(600))
    assert decoded(codec, message, 600) is not None
    for length in range(len(message)):
        assert decoded(codec, message[:length], 600) is None, length
    for extra in (1, 16, 1000):
        assert decoded(codec, torch.cat([message, torch.zeros(extra, dtype=torch.uint8)]), 600) is None


@pytest.mark.parametrize("codec", DAMAGED, ids=str)
def test_of_flipped_bits_comes_a_sparse_vector_or_an_error(codec: TopK) -> None:
    message = codec.encode(gaussian(600))
    refused = 0
    for bit in range(8 * len(message)):
        flipped = message.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        refused += decoded(codec, flipped, 600) is None
    assert refused


@pytest.mark.parametrize("codec", DAMAGED, ids=str)
def test_of_garbage_comes_a_sparse_vector_or_an_error(codec: TopK) -> None:
    draw = torch.Generator().manual_seed(0)
    for length in range(codec.max_bytes(600) + 20):
        decoded(codec, torch.randint(256, (length,), dtype=torch.uint8, generator=draw), 600)


def test_what_is_not_a_row_of_bytes_is_refused() -> None:
    message = TopK(0.1).encode(gaussian(600))
    assert decoded(TopK(0.1), message.float(), 600) is None
    assert decoded(TopK(0.1), message[:, None], 600) is None
    assert decoded(TopK(0.1), message, 1200) is None
