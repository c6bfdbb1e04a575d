"""Laws of the messages of the second-moment correction: rows and their projections."""

from __future__ import annotations

import math

import pytest
import torch

from acsgd.dp.exchange.second_moments import by_rows, project


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
