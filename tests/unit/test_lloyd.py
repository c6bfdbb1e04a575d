"""Lloyd and Hadamard: fitted levels are the best ones where those are known, and beat uniform ones at equal bytes."""

from __future__ import annotations

import math
from itertools import pairwise

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


@pytest.mark.parametrize("bits", MAX_1960)
def test_levels_of_a_normal_variable_have_the_known_error(bits: int) -> None:
    levels, x = normal_levels(bits), torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    density = (x.square() / -2).exp() / math.sqrt(2 * math.pi)
    error = ((x[:, None] - levels).abs().amin(1).square() * density).sum() * 16 / 100_000
    assert abs(error / MAX_1960[bits] - 1) <= 0.01  # rounds stop early, by at most 1 %
    assert error / MAX_1960[bits] >= 1 - LAST_DIGIT


@pytest.mark.parametrize("count", [2, 4, 16, 256])
def test_no_round_makes_the_error_larger(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    position = torch.arange(BINS, dtype=torch.float64) / HALF_BINS - 1
    draw = torch.Generator().manual_seed(0)
    histogram = torch.rand(BINS, generator=draw, dtype=torch.float64) ** 30 * (4 * position).exp()
    errors = []
    for rounds in range(1, 8):
        monkeypatch.setattr(lloyd, "ITERATIONS", rounds)
        nearest = (position[:, None] - fit_levels(histogram, count)).abs().amin(1)
        errors.append(float((nearest.square() * histogram).sum()))
    assert all(later <= earlier * (1 + 2.0**-40) for earlier, later in pairwise(errors))
    assert errors[-1] < errors[0]


def test_few_values_far_apart_are_levels_themselves() -> None:
    x = torch.tensor([-1.0, -0.5, 0.0, 1.0]).repeat(30).view(-1, 1)
    assert torch.equal(Lloyd(4).decode(Lloyd(4).encode(x), tuple(x.shape), x.dtype), x)


@pytest.mark.parametrize("name", data())
@pytest.mark.parametrize("bits", range(2, 9))
def test_fitted_levels_beat_uniform_ones_at_equal_bytes(bits: int, name: str) -> None:
    x = data()[name]
    ours, uniform = Lloyd(bits), FixPoint(bits)
    assert relative_error(ours, x) < 0.9 * relative_error(uniform, x)
    table = 2 ** (bits + 1)
    assert wire_bytes(ours.wire((512, 64))) <= wire_bytes(uniform.wire((512, 64))) + max(table, 16)


@pytest.mark.parametrize(("bits", "goal"), [(2, 0.36), (3, 0.20), (4, 0.107)])
def test_the_error_on_gaussian_data_reaches_its_goal(bits: int, goal: float) -> None:
    assert relative_error(Lloyd(bits), gaussian(512, 64)) <= goal


def test_a_sample_of_a_large_tensor_is_enough() -> None:
    """Its levels serve the rest as well as levels fitted to all of it, up to 2 %."""
    x = gaussian(64, 8192)
    whole = torch.cat(
        [Lloyd(4).decode(Lloyd(4).encode(part), tuple(part.shape), x.dtype) for part in x.split(1024, 1)], 1
    )
    assert relative_error(Lloyd(4), x) <= 1.02 * float((whole - x).norm() / x.norm())


def test_a_rare_peak_in_a_large_tensor_is_not_forgotten() -> None:
    x = gaussian(4096, 256)
    x[1234] = 200.0
    assert relative_error(Lloyd(4), x) < 0.1


def test_large_channels_count_for_more() -> None:
    """One channel, 40 times as large as the other 63, has four values; with those as levels most of the error goes."""
    x = gaussian(512, 64)
    x[:, 0] = torch.tensor([-1.0, -0.2, 0.2, 1.0]).repeat(128) * 40 * float(x[:, 1:].abs().max())
    s = x.abs().amax(0)
    candidate = torch.tensor([-1.0, -0.2, 0.2, 1.0])
    error = (x[..., None] - s[:, None] * candidate).abs().amin(-1).norm() / x.norm()
    assert relative_error(Lloyd(2), x) <= error


@pytest.mark.parametrize("name", data())
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_rotated_groups_are_nearly_normal_whatever_the_data(bits: int, name: str) -> None:
    """The error is that of a normal variable; at most 15 % more, where a group holds one or two large elements."""
    codec = Hadamard(bits=bits, low=bits)
    assert relative_error(codec, data()[name]) <= 1.15 * math.sqrt(MAX_1960[bits])


def test_a_constant_is_spread_as_well_as_a_single_outlier() -> None:
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
