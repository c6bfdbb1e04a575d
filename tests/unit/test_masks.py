"""Laws of the coordinates that a step looks at."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch

from acsgd.dp.exchange.masks import Draw, chosen

CPU = torch.device("cpu")
SHARES = [1.0, 0.5, 0.4, 0.1, 1 / 3, 0.15, 0.7, 1e-3]


def indices(n: int, share: float, step: int, draw: Draw, seed: int = 7) -> list[int]:
    found: list[int] = torch.arange(n)[chosen(n, share, step, draw, seed=seed, device=CPU)].tolist()
    return found


@pytest.mark.parametrize(("share", "draw"), list(itertools.product(SHARES, get_args(Draw))))
def test_the_share_asked_is_the_share_chosen(share: float, draw: Draw) -> None:
    for n, step in itertools.product([1, 7, 100, 12345], [0, 1, 2, 999, 10**12]):
        found = indices(n, share, step, draw)
        assert found == sorted(set(found))
        slack = 1 if draw != "shuffled" else 1 + round(share * n) * share  # of two orders that meet, what is in both
        assert round(share * n) - slack <= len(found) <= round(share * n) + 1


@pytest.mark.parametrize("share", SHARES)
def test_rolling_comes_to_every_coordinate_equally_often(share: float) -> None:
    n, steps = 50, 2000
    counts = torch.zeros(n)
    for step in range(steps):
        counts[indices(n, share, step, "rolling")] += 1
    assert (counts - share * steps).abs().max() <= 1


def test_shuffled_comes_to_every_coordinate_once_before_any_comes_again() -> None:
    n, share = 60, 0.25
    rounds = [sorted(itertools.chain(*(indices(n, share, 4 * r + i, "shuffled") for i in range(4)))) for r in range(3)]
    assert rounds == [list(range(n))] * 3
    assert len({tuple(indices(n, share, 4 * r, "shuffled")) for r in range(3)}) == 3


def test_draws_differ_by_step_and_by_seed() -> None:
    assert len({tuple(indices(1000, 0.1, step, "random")) for step in range(20)}) == 20
    assert len({tuple(indices(1000, 0.1, 0, "random", seed)) for seed in range(20)}) == 20
