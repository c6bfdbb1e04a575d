"""Laws of the messages of the second-moment correction: levels, rows and their projections."""

from __future__ import annotations

import math

import pytest
import torch

from acsgd.codecs.log_levels import LogLevels
from acsgd.dp.exchange.second_moments import by_rows, project


@pytest.mark.parametrize("n", [0, 1, 7, 1000, 100_000])
def test_numbers_of_any_size_are_exact_within_a_quarter_octave(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-24, 1, n)
    message = LogLevels().encode(x)
    assert len(message) <= LogLevels().max_bytes(n)
    ratio = LogLevels().decode(message, n) / x
    in_range = (x.abs() > LogLevels.LOWEST) & (x.abs() < LogLevels.HIGHEST)
    assert (ratio[in_range].log2().abs() <= 0.25 + 1e-4).all()


def test_values_out_of_range_become_zero_or_the_highest_and_non_finite_ones_zero() -> None:
    x = torch.tensor([0.0, -0.0, 1e-20, -1e-20, 1e9, -1e9, math.inf, math.nan])
    high = LogLevels.HIGHEST
    assert LogLevels().decode(LogLevels().encode(x), 8).tolist() == [0, 0, 0, 0, high, -high, 0, 0]


def test_levels_and_their_squares_are_exact_in_any_vector() -> None:
    """So a weight and its copy on another stage stay equal."""
    levels = LogLevels()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    decoded = levels.decode(levels.encode(x), 1000)
    assert torch.equal(levels.decode(levels.encode(decoded), 1000), decoded)
    assert torch.allclose(levels.decode(levels.encode(decoded.square()), 1000), decoded.square(), rtol=2.0**-20)
    among = torch.cat([100 * x, x, 1e-6 * x])
    assert torch.equal(levels.decode(levels.encode(among), 3000)[1000:2000], decoded)


def test_normal_squares_take_less_than_six_bits() -> None:
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(0)).square() * 1e-6
    assert 8 * len(LogLevels().encode(x)) < 6 * len(x)


def test_damaged_messages_are_refused() -> None:
    message = LogLevels().encode(torch.ones(1000))
    with pytest.raises(ValueError, match=r"decode|entropy coder"):
        LogLevels().decode(message[:-2], 1000)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((6, 20), (6, 20)), ((6, 4, 5), (6, 20)), ((768,), (96, 8)), ((7,), (1, 7)), ((16, 4), (8, 8)), ((3, 3), (1, 9))],
)
def test_rows_are_those_of_the_first_dimension_unless_too_short(shape: tuple[int, ...], rows: tuple[int, int]) -> None:
    x = torch.zeros(shape)
    view = by_rows(x)
    assert view.shape == rows
    view += 1
    assert (x == 1).all(), "it is a view"


@pytest.mark.parametrize("kind", ["drawn", "equal rows", "ones"])
def test_the_mean_square_of_projections_is_that_of_the_rows(kind: str) -> None:
    """Over 300 rows and 50 steps. The square of a projection on signs has a variance of at most 2 squares.

    Signs are drawn for 40 rows at a time. Those of two rows are two draws rotated in opposite directions, so
    projections of equal rows are uncorrelated, except for at most one pair per row.
    """
    generator = torch.Generator().manual_seed(0)
    grads = {"drawn": torch.randn(300, 40, generator=generator), "ones": torch.ones(300, 40)}
    grads["equal rows"] = torch.randn(1, 40, generator=generator).expand(300, 40).contiguous()
    grad = grads[kind]
    ratios = torch.stack([project(grad, step).square().mean() for step in range(50)]) / grad.square().mean()
    assert abs(ratios.mean() - 1) <= 5 * math.sqrt(4 / (50 * 300))
    assert ratios.var() <= 20 * 4 / 300, "as good as independent: one draw for all rows would give 2"


def test_projections_are_new_in_each_step_and_linear() -> None:
    one, two = torch.randn(2, 6, 20)
    assert not torch.equal(project(one, 0), project(one, 1))
    assert torch.allclose(project(one + two, 3), project(one, 3) + project(two, 3), atol=20 * 2.0**-22 * 10)
