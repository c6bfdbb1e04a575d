"""Laws of logarithmic quantization: relative error, range, independence of other numbers, corrupt messages."""

from __future__ import annotations

import math

import pytest
import torch

from acsgd.codecs.log_levels import LogLevels


def test_the_error_is_at_most_a_quarter_octave() -> None:
    for n in (0, 1, 7, 1000, 100_000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-24, 1, n)
        message = LogLevels().encode(x)
        assert len(message) <= LogLevels().max_bytes(n), n
        y = LogLevels().decode(message, n)
        in_range = (x.abs() > LogLevels.LOWEST) & (x.abs() < LogLevels.HIGHEST)
        assert ((y / x)[in_range].log2().abs() <= 0.25 + 1e-4).all(), n
        assert ((y.double() - x.double()).abs() <= LogLevels().error_bound(x)).all(), n


def test_numbers_out_of_range_become_zero_or_the_highest_level_and_non_finite_ones_zero() -> None:
    x = torch.tensor([0.0, -0.0, 1e-20, -1e-20, 1e9, -1e9, math.inf, math.nan])
    high = LogLevels.HIGHEST
    assert LogLevels().decode(LogLevels().encode(x), 8).tolist() == [0, 0, 0, 0, high, -high, 0, 0]


def test_levels_and_their_squares_are_exact_and_independent_of_other_numbers() -> None:
    """So a weight and its copy on another stage stay equal."""
    codec = LogLevels()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    levels = codec.decode(codec.encode(x), 1000)
    assert torch.equal(codec.decode(codec.encode(levels), 1000), levels)
    assert torch.allclose(codec.decode(codec.encode(levels.square()), 1000), levels.square(), rtol=2.0**-20)
    among = torch.cat([100 * x, x, 1e-6 * x])
    assert torch.equal(codec.decode(codec.encode(among), 3000)[1000:2000], levels)


def test_squares_of_normal_numbers_take_less_than_six_bits() -> None:
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(0)).square() * 1e-6
    assert 8 * len(LogLevels().encode(x)) < 6 * len(x)


def test_corrupt_messages_are_refused() -> None:
    message = LogLevels().encode(torch.ones(1000))
    with pytest.raises(ValueError, match="corrupt"):
        LogLevels().decode(message[:-2], 1000)
