"""FixPoint is the original's quantiser where that works, useful at 1 bit, unbiased when asked, and never NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from acsgd.codecs.fixpoint import FixPoint

FP16_ROUNDING = 2.0**-11
"""Half the distance of neighbouring fp16 numbers, relative."""
SIGMAS = 5
"""A sound quantiser is further off in one of 1.7 million tests; the draws are the same in every run."""


def returned(codec: FixPoint, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), tuple(x.shape), torch.float32)


def relative_error(codec: FixPoint, x: Tensor) -> float:
    return float((returned(codec, x) - x).norm() / x.norm())


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def original(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The bit stream and the decoded values by the formula, with a scale per index of the last dimension."""
    levels = np.float32(2 ** (bits - 1))
    s = np.abs(x).max(axis=tuple(range(x.ndim - 1)), keepdims=True).astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(x / s * levels), -levels, levels - 1) + levels
    one_bit_per_byte = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    return np.packbits(one_bit_per_byte.reshape(-1)), (codes - levels) / levels * s


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("bits", range(2, 9))
def test_levels_and_stream_are_the_originals(bits: int, magnitude: float) -> None:
    x = gaussian(2, 37, 19) * magnitude
    fields = FixPoint(bits).encode(x)
    stream, y = original(x.numpy(), bits)
    assert np.array_equal(fields[0].numpy(), stream)
    assert np.array_equal(FixPoint(bits).decode(fields, (2, 37, 19), torch.float32).numpy(), y)


@pytest.mark.parametrize("bits", range(2, 9))
def test_halves_round_to_even(bits: int) -> None:
    levels = 2 ** (bits - 1)
    halves = torch.arange(-levels, levels - 1) + 0.5
    x = torch.cat([torch.tensor([-levels]), halves]).view(-1, 1)  # the scale is `levels`, the step 1
    assert torch.equal(returned(FixPoint(bits), x)[1:, 0], halves.round().clamp(max=levels - 1))


@pytest.mark.parametrize("dims", ["channel", "token", "tensor", "group"])
def test_one_bit_is_the_sign_times_the_mean_magnitude(dims: str) -> None:
    x = gaussian(64, 48)
    codec = FixPoint(1, dims=dims, group=48 if dims == "group" else 0)  # type: ignore[arg-type]
    dim = {"channel": (0,), "token": (1,), "tensor": (0, 1), "group": (1,)}[dims]
    expected = x.sign() * x.abs().mean(dim, keepdim=True)
    assert torch.allclose(returned(codec, x), expected, rtol=2 * FP16_ROUNDING, atol=0)


def test_l2_scales_are_twice_the_root_mean_square() -> None:
    x = gaussian(512, 8)
    y = returned(FixPoint(8, scale="l2"), x)
    assert torch.allclose(y.amin(0), -2 * x.square().mean(0).sqrt(), rtol=2 * FP16_ROUNDING, atol=0)  # all are clipped
    assert relative_error(FixPoint(2, scale="l2"), x) < relative_error(FixPoint(2), x)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("value", [0.0, 0.1, -0.45, 0.999, -1.0])
def test_stochastic_rounding_is_unbiased_over_places(bits: int, value: float) -> None:
    count = 1 << 16
    x = torch.full((count, 1), value)
    x[0] = 1.0
    y = returned(FixPoint(bits, rounding="stochastic"), x)[1:].double()
    step = 2.0 if bits == 1 else 1 / (2 ** (bits - 1) - 1)
    sigma = step / 2 / math.sqrt(count - 1)  # no variable between two neighbouring levels varies more
    assert abs(float(y.mean()) - float(x[1])) <= SIGMAS * sigma
    if value not in (0.0, -1.0) or (bits == 1 and value == 0.0):
        assert y.unique().numel() == 2


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("digits", range(8))
def test_stochastic_rounding_does_not_clip_the_peak(bits: int, digits: int) -> None:
    """Whether fp16 rounds the scale up or down."""
    peak, count = 1 + digits * 2.0**-12, 1 << 16
    y = returned(FixPoint(bits, rounding="stochastic"), torch.full((count, 1), peak)).double()
    spread = float(y.amax() - y.amin())  # of a variable with two values; its sigma is at most half of it
    assert abs(float(y.mean()) - peak) <= SIGMAS * spread / 2 / math.sqrt(count) + 2.0**-24


def test_stochastic_rounding_is_unbiased_from_one_tensor_to_the_next() -> None:
    codec, x, trials = FixPoint(3, rounding="stochastic"), gaussian(32, 1).clamp(-1, 1), 2000
    total = torch.zeros(32, 1, dtype=torch.float64)
    for trial in range(trials):
        x[0] = 2 + trial * 2.0**-20  # changes nothing but the seed: fp16 rounds it to 2, or the next number
        total += returned(codec, x)
    step = 2 / 3 * (1 + 2 * FP16_ROUNDING)
    error = (total / trials - x)[1:].abs()
    assert error.max() <= SIGMAS * step / 2 / math.sqrt(trials)


def test_stochastic_rounding_depends_on_the_data_alone() -> None:
    codec, x = FixPoint(4, rounding="stochastic"), gaussian(64, 8)
    state = torch.get_rng_state()
    first, second = codec.encode(x), codec.encode(x.clone())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("magnitude", [1e-32, 1e-12, 1e-7, 1e6, 1e30])
def test_the_magnitude_of_the_whole_tensor_does_not_matter(bits: int, magnitude: float) -> None:
    """Scales are multiples of a common power of two: fp16 alone would turn these to 0, or to infinity."""
    x = gaussian(128, 8)
    near = 2.0 ** round(math.log2(magnitude))  # exact, so that all roundings are those of x
    assert torch.equal(returned(FixPoint(bits), x * near), returned(FixPoint(bits), x) * near)


@pytest.mark.parametrize("scale", ["max", "l2"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_finite_tensor_returns_finite(bits: int, rounding: str, scale: str) -> None:
    if (rounding, scale) == ("stochastic", "l2"):
        return
    codec = FixPoint(bits, scale=scale, rounding=rounding)  # type: ignore[arg-type]
    limits = torch.finfo(torch.float32)
    x = torch.tensor([[limits.max, limits.tiny, 1.0], [limits.min, -1e-45, 0.0], [limits.max, 1e-45, -1e-20]])
    assert returned(codec, x).isfinite().all()


@pytest.mark.parametrize("magnitude", [2.0**-40, 2.0**100])
def test_sums_of_squares_may_overflow(magnitude: float) -> None:
    codec, x = FixPoint(4, scale="l2"), gaussian(128, 8)
    assert torch.allclose(
        returned(codec, x * magnitude), returned(codec, x) * magnitude, rtol=2 * FP16_ROUNDING, atol=0
    )


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_channel_far_below_the_others_keeps_its_own_precision(bits: int) -> None:
    x = gaussian(128, 2) * torch.tensor([1.0, 2.0**-26])
    alone = returned(FixPoint(bits), x[:, 1:])
    assert torch.equal(returned(FixPoint(bits), x)[:, 1:], alone)


def test_the_last_group_may_be_short() -> None:
    x = torch.tensor([1.0, -2.0, 4.0, -8.0, 0.5])
    y = returned(FixPoint(8, dims="group", group=4), x)
    assert y[4] == 0.5 * (1 - 2**-7)  # its own scale: with the others' it would be a multiple of 8 / 128
    assert torch.equal(y[:4], returned(FixPoint(8, dims="tensor"), x[:4]))


def test_the_mean_of_a_short_group_is_over_its_own_elements() -> None:
    x = torch.tensor([1.0, -1.0, 1.0, -1.0, 3.0])
    assert torch.equal(returned(FixPoint(1, dims="group", group=4), x), x)
