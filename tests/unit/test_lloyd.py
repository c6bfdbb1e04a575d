"""Lloyd and Hadamard: fitted levels are optimal where the optimum is known, and beat uniform ones at equal bytes."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from acsgd.codecs import lloyd
from acsgd.codecs.base import Codec, wire_bytes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.hadamard import Hadamard, normal_levels
from acsgd.codecs.lloyd import BINS, HALF_BINS, Lloyd, fit_levels

MAX_1960 = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
"""Least mean squared error for a normal variable (Max, Quantizing for minimum distortion, 1960, table I)."""
LAST_DIGIT = 5e-4
"""Relative: the table has four digits."""


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def data() -> dict[str, Tensor]:
    x = gaussian(512, 64)
    uniform = torch.rand(512, 64, generator=torch.Generator().manual_seed(1)) - 0.5
    outliers = x.clone()
    outliers[:, :8] *= 500
    return {
        "gaussian": x,
        "laplace": uniform.sign() * -torch.log1p(-2 * uniform.abs()),
        "student t, 2 degrees": x / gaussian(512 * 64 * 2).view(2, 512, 64).square().mean(0).sqrt(),
        "cubed": x**3,
        "outlier channels": outliers,
        "rectified": x.relu(),
    }


def relative_error(codec: Codec, x: Tensor) -> float:
    y = codec.decode(codec.encode(x), tuple(x.shape), torch.float32)
    return float((y - x).norm() / x.norm())


def test_levels_of_a_normal_variable_have_the_known_error() -> None:
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    density = (x.square() / -2).exp() / math.sqrt(2 * math.pi)
    for bits, expected in MAX_1960.items():
        error = ((x[:, None] - normal_levels(bits)).abs().amin(1).square() * density).sum() * 16 / 100_000
        assert abs(error / expected - 1) <= 0.01, bits  # iterations stop early, which costs at most 1 %
        assert error / expected >= 1 - LAST_DIGIT, bits


@pytest.mark.parametrize("count", [2, 4, 16, 256])
def test_no_iteration_increases_the_error(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    position = torch.arange(BINS, dtype=torch.float64) / HALF_BINS - 1
    draw = torch.Generator().manual_seed(0)
    histogram = torch.rand(BINS, generator=draw, dtype=torch.float64) ** 30 * (4 * position).exp()
    errors = []
    for iterations in range(1, 8):
        monkeypatch.setattr(lloyd, "ITERATIONS", iterations)
        nearest = (position[:, None] - fit_levels(histogram, count)).abs().amin(1)
        errors.append(float((nearest.square() * histogram).sum()))
    assert all(later <= earlier * (1 + 2.0**-40) for earlier, later in pairwise(errors))
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("count", [2, 16, 256])
def test_a_cpu_fits_the_levels_of_other_devices(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    histogram = (
        (torch.rand(BINS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 30).mul(1e6).round()
    )
    assert (histogram == 0).sum() > BINS / 4  # so that some levels have no mass
    levels = fit_levels(histogram, count)
    monkeypatch.setattr(lloyd, "has_numpy", lambda x: False)
    assert torch.equal(fit_levels(histogram, count), levels)


def test_a_few_distinct_values_become_levels() -> None:
    x = torch.tensor([-1.0, -0.5, 0.0, 1.0]).repeat(30).view(-1, 1)
    assert torch.equal(Lloyd(4).decode(Lloyd(4).encode(x), tuple(x.shape), x.dtype), x)


@pytest.mark.parametrize("bits", range(2, 9))
def test_fitted_levels_beat_uniform_ones_at_equal_bytes(bits: int) -> None:
    fitted, uniform = Lloyd(bits), FixPoint(bits)
    for name, x in data().items():
        assert relative_error(fitted, x) < 0.9 * relative_error(uniform, x), name
    table = 2 ** (bits + 1)
    assert wire_bytes(fitted.wire((512, 64))) <= wire_bytes(uniform.wire((512, 64))) + max(table, 16)


def test_the_error_on_gaussian_data_reaches_its_goal() -> None:
    for bits, goal in ((2, 0.36), (3, 0.20), (4, 0.107)):
        assert relative_error(Lloyd(bits), gaussian(512, 64)) <= goal, bits


def test_a_sample_of_a_large_tensor_is_enough() -> None:
    """Levels fitted to a sample have at most 2 % more error than levels fitted to all elements."""
    x = gaussian(64, 8192)
    whole = torch.cat(
        [Lloyd(4).decode(Lloyd(4).encode(part), tuple(part.shape), x.dtype) for part in x.split(1024, 1)], 1
    )
    assert relative_error(Lloyd(4), x) <= 1.02 * float((whole - x).norm() / x.norm())


def test_a_rare_peak_in_a_large_tensor_keeps_a_level() -> None:
    x = gaussian(4096, 256)
    x[1234] = 200.0
    assert relative_error(Lloyd(4), x) < 0.1


def test_large_channels_have_more_weight() -> None:
    """One channel, 40 times as large as the other 63, has four values; these are the best levels for the tensor."""
    x = gaussian(512, 64)
    x[:, 0] = torch.tensor([-1.0, -0.2, 0.2, 1.0]).repeat(128) * 40 * float(x[:, 1:].abs().max())
    s = x.abs().amax(0)
    candidate = torch.tensor([-1.0, -0.2, 0.2, 1.0])
    error = (x[..., None] - s[:, None] * candidate).abs().amin(-1).norm() / x.norm()
    assert relative_error(Lloyd(2), x) <= error


def test_rotated_groups_are_nearly_normal_for_any_data() -> None:
    """The error is that of a normal variable, or up to 15 % more where a group holds one or two large elements."""
    for (name, x), bits in product(data().items(), (2, 3, 4, 5)):
        codec = Hadamard(bits=bits, low=bits)
        assert relative_error(codec, x) <= 1.15 * math.sqrt(MAX_1960[bits]), (name, bits)


def test_a_constant_is_spread_like_a_single_outlier() -> None:
    codec = Hadamard(bits=4, low=4)
    assert relative_error(codec, torch.full((4, 64), 3.0)) <= 1.15 * math.sqrt(MAX_1960[4])
    assert relative_error(codec, torch.eye(64)) <= 1.15 * math.sqrt(MAX_1960[4])


def test_the_groups_with_the_larger_scales_have_more_bits() -> None:
    x = gaussian(100, 64) * torch.where(torch.arange(100) % 4 == 0, 100.0, 1.0)[:, None]
    codec = Hadamard(bits=6, low=2, fraction=0.25)
    y = codec.decode(codec.encode(x), (100, 64), torch.float32)
    errors = (y - x).norm(dim=1) / x.norm(dim=1)
    assert errors[::4].max() < 0.1 < errors[1::4].min()
    assert codec.wire((100, 64))[2].nbytes == 25 * 64 * 6 // 8
    assert codec.wire((100, 64))[3].nbytes == 75 * 64 * 2 // 8
