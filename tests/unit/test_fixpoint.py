"""FixPoint equals the original quantizer, is useful at 1 bit, unbiased with stochastic rounding, and never NaN."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from torch import Tensor

from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.layout import Dims

FP16_ROUNDING = 2.0**-11
"""Unit roundoff of fp16."""
SIGMAS = 5
"""A correct quantizer deviates more in one of 1.7 million tests. The random numbers are the same in every run."""


def decoded(codec: FixPoint, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), tuple(x.shape), torch.float32)


def relative_error(codec: FixPoint, x: Tensor) -> float:
    return float((decoded(codec, x) - x).norm() / x.norm())


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def original(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bit stream and the decoded values by the formula, with a scale per index of the last dimension."""
    levels = np.float32(2 ** (bits - 1))
    s = np.abs(x).max(axis=tuple(range(x.ndim - 1)), keepdims=True).astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(x / s * levels), -levels, levels - 1) + levels
    one_bit_per_byte = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    return np.packbits(one_bit_per_byte.reshape(-1)), (codes - levels) / levels * s


def test_levels_and_stream_equal_the_original() -> None:
    for bits, magnitude in product(range(2, 9), (1e-3, 1.0, 1e4)):
        x = gaussian(2, 37, 19) * magnitude
        fields = FixPoint(bits).encode(x)
        stream, y = original(x.numpy(), bits)
        assert np.array_equal(fields[0].numpy(), stream), (bits, magnitude)
        assert np.array_equal(FixPoint(bits).decode(fields, (2, 37, 19), torch.float32).numpy(), y), (bits, magnitude)


def test_halves_round_to_even() -> None:
    for bits in range(2, 9):
        levels = 2 ** (bits - 1)
        halves = torch.arange(-levels, levels - 1) + 0.5
        x = torch.cat([torch.tensor([-levels]), halves]).view(-1, 1)  # the scale is `levels`, the step 1
        assert torch.equal(decoded(FixPoint(bits), x)[1:, 0], halves.round().clamp(max=levels - 1)), bits


def test_centroids_are_nearer_to_the_values_where_small_ones_are_more_frequent() -> None:
    x = gaussian(64, 48) * gaussian(64, 48, seed=1)
    for bits in range(2, 7):
        assert relative_error(FixPoint(bits, centroids=True), x) < relative_error(FixPoint(bits), x), bits


def test_one_bit_is_the_sign_times_the_mean_magnitude() -> None:
    x = gaussian(64, 48)
    dim_of: dict[Dims, tuple[int, ...]] = {"channel": (0,), "token": (1,), "tensor": (0, 1), "group": (1,)}
    for dims, dim in dim_of.items():
        codec = FixPoint(1, dims=dims, group=48 if dims == "group" else 0)
        expected = x.sign() * x.abs().mean(dim, keepdim=True)
        assert torch.allclose(decoded(codec, x), expected, rtol=2 * FP16_ROUNDING, atol=0), dims


def test_l2_scales_are_twice_the_root_mean_square() -> None:
    x = gaussian(512, 8)
    y = decoded(FixPoint(8, scale="l2"), x)
    assert torch.allclose(
        y.amin(0), -2 * x.square().mean(0).sqrt(), rtol=2 * FP16_ROUNDING, atol=0
    )  # each channel has clipped elements
    assert relative_error(FixPoint(2, scale="l2"), x) < relative_error(FixPoint(2), x)


def test_stochastic_rounding_is_unbiased_over_elements() -> None:
    count = 1 << 16
    for bits, value in product((1, 2, 3, 4, 8), (0.0, 0.1, -0.45, 0.999, -1.0)):
        x = torch.full((count, 1), value)
        x[0] = 1.0
        y = decoded(FixPoint(bits, rounding="stochastic"), x)[1:].double()
        step = 2.0 if bits == 1 else 1 / (2 ** (bits - 1) - 1)
        sigma = step / 2 / math.sqrt(count - 1)  # the largest possible between two neighbouring levels
        assert abs(float(y.mean()) - float(x[1])) <= SIGMAS * sigma, (bits, value)
        if value not in (0.0, -1.0) or (bits == 1 and value == 0.0):
            assert y.unique().numel() == 2, (bits, value)


def test_stochastic_rounding_does_not_clip_the_peak() -> None:
    """For scales that fp16 would round up or down."""
    count = 1 << 16
    for bits, digits in product((1, 2, 8), range(8)):
        peak = 1 + digits * 2.0**-12
        y = decoded(FixPoint(bits, rounding="stochastic"), torch.full((count, 1), peak)).double()
        spread = float(y.amax() - y.amin())  # between two values; the standard deviation is at most half of it
        assert abs(float(y.mean()) - peak) <= SIGMAS * spread / 2 / math.sqrt(count) + 2.0**-24, (bits, digits)


def test_stochastic_rounding_is_unbiased_over_tensors() -> None:
    codec, x, trials = FixPoint(3, rounding="stochastic"), gaussian(32, 1).clamp(-1, 1), 1000
    total = torch.zeros(32, 1, dtype=torch.float64)
    for trial in range(trials):
        x[0] = 2 + trial * 2.0**-20  # changes only the seed: fp16 rounds it to 2 or the next number
        total += decoded(codec, x)
    step = 2 / 3 * (1 + 2 * FP16_ROUNDING)
    error = (total / trials - x)[1:].abs()
    assert error.max() <= SIGMAS * step / 2 / math.sqrt(trials)


def test_stochastic_rounding_depends_only_on_the_data() -> None:
    codec, x = FixPoint(4, rounding="stochastic"), gaussian(64, 8)
    state = torch.get_rng_state()
    first, second = codec.encode(x), codec.encode(x.clone())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_relative_error_does_not_depend_on_the_magnitude() -> None:
    """Scales are multiples of a common power of two; fp16 alone would turn these scales into 0 or infinity."""
    x = gaussian(128, 8)
    for bits, magnitude in product(range(1, 9), (1e-32, 1e-12, 1e-7, 1e6, 1e30)):
        power = 2.0 ** round(math.log2(magnitude))  # scales all roundings exactly
        expected = decoded(FixPoint(bits), x) * power
        assert torch.equal(decoded(FixPoint(bits), x * power), expected), (bits, magnitude)


def test_finite_tensors_decode_to_finite_ones_within_the_bound() -> None:
    limits = torch.finfo(torch.float32)
    x = torch.tensor([[limits.max, limits.tiny, 1.0], [limits.min, -1e-45, 0.0], [limits.max, 1e-45, -1e-20]])
    for bits in range(1, 9):
        for codec in (FixPoint(bits), FixPoint(bits, scale="l2"), FixPoint(bits, rounding="stochastic")):
            y = decoded(codec, x)
            assert y.isfinite().all(), codec
            assert ((y.double() - x.double()).abs() <= codec.error_bound(x)).all(), codec


def test_sums_of_squares_may_overflow() -> None:
    codec, x = FixPoint(4, scale="l2"), gaussian(128, 8)
    for power in (2.0**-40, 2.0**100):
        y = decoded(codec, x * power)
        assert torch.allclose(y, decoded(codec, x) * power, rtol=2 * FP16_ROUNDING, atol=0), power


def test_a_channel_far_below_the_others_keeps_its_precision() -> None:
    x = gaussian(128, 2) * torch.tensor([1.0, 2.0**-26])
    for bits in range(2, 9):
        assert torch.equal(decoded(FixPoint(bits), x)[:, 1:], decoded(FixPoint(bits), x[:, 1:])), bits


def test_the_last_group_may_be_short() -> None:
    x = torch.tensor([1.0, -2.0, 4.0, -8.0, 0.5])
    y = decoded(FixPoint(8, dims="group", group=4), x)
    assert y[4] == 0.5 * (1 - 2**-7)  # with the scale of the others it would be a multiple of 8 / 128
    assert torch.equal(y[:4], decoded(FixPoint(8, dims="tensor"), x[:4]))


def test_the_mean_of_a_short_group_is_over_its_elements() -> None:
    x = torch.tensor([1.0, -1.0, 1.0, -1.0, 3.0])
    assert torch.equal(decoded(FixPoint(1, dims="group", group=4), x), x)
