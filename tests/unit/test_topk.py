"""Laws of top-k sparsification: which elements are kept, how long messages are, corrupt messages."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from acsgd.codecs import bits as bits_module
from acsgd.codecs.base import ALIGNMENT, NotFiniteError, wire_bytes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.layout import SAMPLE
from acsgd.codecs.lloyd import Lloyd
from acsgd.codecs.topk import THRESHOLD_SAMPLE, TopK
from acsgd.dp.exchange.vectors import SparseVector, UpdateSum

WORST = 1.0423
"""Largest ratio of the bits of positions to their entropy (test_positions.py)."""
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

CASES = [*product(SIZES, ["gaussian"]), *product((1, 8, 65, 1000), DATA)]
"""Sizes and kinds of data."""


def parts(codec: TopK, x: Tensor) -> list[Tensor]:
    """Split a vector into the chunks of which the fraction is kept."""
    return list(x.split(codec.chunk)) if codec.chunk else [x]


def count_of(codec: TopK, part: Tensor) -> int:
    return max(1, round(codec.fraction * len(part))) if len(part) else 0


def largest(codec: TopK, x: Tensor) -> Tensor:
    """Return the positions that should be kept, if no two magnitudes are equal."""
    masks = []
    for part in parts(codec, x):
        masks.append(torch.zeros(len(part), dtype=torch.bool))
        masks[-1][part.abs().argsort(descending=True)[: count_of(codec, part)]] = True
    return torch.cat(masks).nonzero().view(-1)


def values_of(codec: TopK, kept: Tensor) -> Tensor:
    """Return the kept values after the value codec."""
    group = max(1, min(codec.group, len(kept)))
    values = FixPoint(1, dims="group", group=group) if codec.bits == 1 else Lloyd(codec.bits, "group", group)
    return values.decode(values.encode(kept), (len(kept),), torch.float32)


@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_the_largest_elements_decode_as_by_the_value_codec_and_the_others_to_zero(codec: TopK) -> None:
    """Bit for bit."""
    for n, form in product(SIZES, (gaussian, heavy)):
        x = form(n)
        where, before = largest(codec, x), x.clone()
        expected = torch.zeros(n)
        expected[where] = values_of(codec, x[where])
        message = codec.encode(x)
        assert torch.equal(x, before), (n, form)
        assert message.dtype == torch.uint8
        assert torch.equal(codec.decode(message, n), expected), (n, form)


@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_the_right_number_is_kept_and_none_is_smaller_than_a_dropped_one(codec: TopK) -> None:
    """Also for equal magnitudes. With 1 bit and one group, kept elements never decode to 0 unless all are 0."""
    codec = TopK(codec.fraction, 1, 10**9, codec.chunk)
    for n, name in CASES:
        x = DATA[name](n)
        y = codec.decode(codec.encode(x), n)
        counts = [count_of(codec, part) for part in parts(codec, x)]
        assert codec.kept(n) == sum(counts), (n, name)
        if not y.any():
            assert not x.any()
            continue
        for count, before, after in zip(counts, parts(codec, x), parts(codec, y), strict=True):
            kept = after != 0
            assert int(kept.sum()) == count, (n, name)
            if count < len(before):
                assert before[kept].abs().min() >= before[~kept].abs().max(), (n, name)


def test_the_largest_elements_of_a_long_vector_are_kept_for_any_sample() -> None:
    """The threshold from the sample is right, far too high, or far too low."""
    for fraction in (1e-4, 0.02, 0.3):
        check_long_vector(fraction)


def check_long_vector(fraction: float) -> None:
    n = 4 * SAMPLE
    x = gaussian(n)
    sampled = torch.zeros(n, dtype=torch.bool)
    sampled[:: n // THRESHOLD_SAMPLE | 1] = True
    for each in (x, torch.where(sampled, 10 * x, x), torch.where(sampled, 0.1 * x, x), x.sort().values):
        each = each + each.sign() * torch.rand(n, generator=torch.Generator().manual_seed(3)) * 1e-5
        codec = TopK(fraction, bits=1)
        found = codec.decode(codec.encode(each), n).abs().gt(0)
        order = each.abs().sort(descending=True).values
        k = round(fraction * n)
        assert int(found.sum()) == k
        assert each[found].abs().min() == order[k - 1]


@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_messages_are_short_enough_and_the_error_is_within_its_bound(codec: TopK) -> None:
    """The norm of the error is at most that of the vector, up to fp16 precision of the scales."""
    for n, name in CASES:
        x = DATA[name](n)
        message = codec.encode(x)
        assert 0 < len(message) <= codec.max_bytes(n), (n, name)
        y = codec.decode(message, n).double()
        assert ((x.double() - y).abs() <= codec.error_bound(x)).all(), (n, name)
        assert (x.double() - y).norm() <= x.double().norm() * (1 + 2.0**-10), (n, name)


def test_the_largest_length_is_reached() -> None:
    x = torch.zeros(5000)
    x[-100:] = 1 + gaussian(100).abs()
    for codec in (TopK(0.02), TopK(0.02, bits=1)):
        assert len(codec.encode(x)) == codec.max_bytes(5000)


def test_a_fraction_of_one_sends_no_positions() -> None:
    x = gaussian(1000)
    for bits, values in ((1, FixPoint(1, dims="group", group=128)), (4, Lloyd(4, "group", 128))):
        assert len(TopK(1.0, bits).encode(x)) == TopK(1.0, bits).max_bytes(1000) == wire_bytes(values.wire((1000,)))


def test_positions_cost_little_more_than_their_entropy() -> None:
    n = 400_000
    x = gaussian(n)
    for fraction, chunk in product((0.005, 0.02, 0.1, 0.2, 0.5), (0, 4000)):
        codec = TopK(fraction, bits=4, chunk=chunk)
        kept = round(fraction * n)
        entropy = -n * sum(p * math.log2(p) for p in (fraction, 1 - fraction))
        values = wire_bytes(Lloyd(4, "group", 128).wire((kept,)))
        padding, chance = 8 * (ALIGNMENT + 1), 4 * 2 * math.sqrt(kept)
        assert 8 * (len(codec.encode(x)) - values) <= WORST * entropy + padding + chance, (fraction, chunk)


def test_the_setting_of_sparseloco_compresses_more_than_200_times() -> None:
    n = 1 << 20
    codec = TopK(64 / 4096, bits=2, chunk=4096)
    assert 4 * n / len(codec.encode(gaussian(n))) > 200


def test_fitted_levels_have_at_most_two_thirds_of_the_error_of_uniform_ones() -> None:
    """0.9 at 2 bits. The bytes are the same except for the levels, 2**(bits + 1)."""
    n = 200_000
    for name in ("gaussian", "heavy"):
        x = DATA[name](n)
        positions = largest(TopK(0.05), x)
        kept = x[positions]
        for bits in range(2, 9):
            uniform, codec = FixPoint(bits, dims="group", group=128), TopK(0.05, bits)
            error = (uniform.decode(uniform.encode(kept), (len(kept),), torch.float32) - kept).norm()
            fitted = (codec.decode(codec.encode(x), n)[positions] - kept).norm()
            assert fitted < (0.9 if bits == 2 else 2 / 3) * error, (name, bits)


def test_equal_vectors_give_equal_bytes() -> None:
    x = gaussian(3000).round()
    strided = torch.stack([x, -x], 1)[:, 0]
    assert not strided.is_contiguous()
    for codec in SETTINGS:
        assert torch.equal(codec.encode(x), codec.encode(x.clone())), codec
        assert torch.equal(codec.encode(x), codec.encode(strided)), codec


@pytest.mark.parametrize("codec", [TopK(0.2), TopK(0.3, chunk=7), TopK(0.3, chunk=100)], ids=str)
def test_messages_do_not_depend_on_the_block_size(codec: TopK, monkeypatch: pytest.MonkeyPatch) -> None:
    n = SAMPLE + 1001
    local, shared, residual = (gaussian(n, seed) for seed in range(3))
    x = (local - shared).add_(residual)
    whole = codec.encode(x)
    for block in (1 << 18, 1 << 13):
        monkeypatch.setattr(bits_module, "BLOCK", block)
        assert torch.equal(codec.encode(x), whole)
        update = UpdateSum(local, shared, residual.clone())  # computed block by block
        message, positions = codec.encode_kept(update)
        assert torch.equal(message, whole)
        update.sent = SparseVector(n, positions, codec.decode_values(message, n))
        update.store_residual()
        assert torch.equal(update.residual, x - codec.decode(whole, n))


def test_messages_may_start_at_any_address() -> None:
    for codec in SETTINGS:
        message = codec.encode(gaussian(1000))
        buffer = torch.full((3 + len(message),), 255, dtype=torch.uint8)
        buffer[3:] = message
        assert torch.equal(codec.decode(buffer[3:], 1000), codec.decode(message, 1000)), codec


@pytest.mark.parametrize("codec", SETTINGS, ids=str)
def test_non_finite_elements_are_refused_with_their_index(codec: TopK) -> None:
    for n in (1, 1000, SAMPLE + 1001) if not codec.chunk else (1, 1000):
        for index, bad in product((0, n // 2, n - 1), (math.nan, math.inf, -math.inf)):
            x = gaussian(n)
            x[index] = bad
            with pytest.raises(NotFiniteError, match=rf"{bad} at index \({index},\)"):
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
def test_invalid_options_are_refused(wrong: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        TopK(**wrong)


CORRUPTED = [TopK(0.1, bits=4), TopK(0.1, bits=1, group=7), TopK(0.2, bits=2, chunk=50), TopK(0.004, bits=3)]


def decoded_or_none(codec: TopK, message: Tensor, n: int) -> Tensor | None:
    """Return the decoded vector, which must be sparse and finite, or None if the message is refused."""
    try:
        y = codec.decode(message, n)
    except ValueError:
        return None
    assert y.shape == (n,)
    assert y.isfinite().all()
    assert int((y != 0).sum()) <= codec.kept(n)
    return y


@pytest.mark.parametrize("codec", CORRUPTED, ids=str)
def test_messages_of_wrong_length_are_refused(codec: TopK) -> None:
    message = codec.encode(gaussian(600))
    assert decoded_or_none(codec, message, 600) is not None
    for length in range(len(message)):
        assert decoded_or_none(codec, message[:length], 600) is None, length
    for extra in (1, 16, 1000):
        assert decoded_or_none(codec, torch.cat([message, torch.zeros(extra, dtype=torch.uint8)]), 600) is None


@pytest.mark.parametrize("codec", CORRUPTED, ids=str)
def test_flipped_bits_are_refused_or_give_a_sparse_vector(codec: TopK) -> None:
    message = codec.encode(gaussian(600))
    refused = 0
    for bit in range(0, 8 * len(message), 3):
        flipped = message.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        refused += decoded_or_none(codec, flipped, 600) is None
    assert refused


@pytest.mark.parametrize("codec", CORRUPTED, ids=str)
def test_random_bytes_are_refused_or_give_a_sparse_vector(codec: TopK) -> None:
    draw = torch.Generator().manual_seed(0)
    for length in range(codec.max_bytes(600) + 20):
        decoded_or_none(codec, torch.randint(256, (length,), dtype=torch.uint8, generator=draw), 600)


def test_messages_of_wrong_dtype_or_shape_are_refused() -> None:
    message = TopK(0.1).encode(gaussian(600))
    assert decoded_or_none(TopK(0.1), message.float(), 600) is None
    assert decoded_or_none(TopK(0.1), message[:, None], 600) is None
    assert decoded_or_none(TopK(0.1), message, 1200) is None
