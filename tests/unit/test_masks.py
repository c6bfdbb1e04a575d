"""Laws of the sampling of coordinates."""

from __future__ import annotations

import itertools
from typing import get_args

import torch

from acsgd.dp.modes.cocktail import Sampling, sample_coordinates

CPU = torch.device("cpu")
FRACTIONS = [1.0, 0.5, 0.4, 0.1, 1 / 3, 0.15, 0.7, 1e-3]


def indices(n: int, fraction: float, step: int, sampling: Sampling, seed: int = 7) -> list[int]:
    sampled = sample_coordinates(n, fraction, step, sampling, seed=seed, device=CPU)
    found: list[int] = torch.arange(n)[sampled].tolist()
    return found


def test_the_fraction_is_exact_to_within_one_coordinate() -> None:
    sizes, steps = [1, 7, 100, 12345], [0, 1, 2, 999, 10**12]
    for fraction, sampling, n, step in itertools.product(FRACTIONS, get_args(Sampling), sizes, steps):
        found, case = indices(n, fraction, step, sampling), (fraction, sampling, n, step)
        assert found == sorted(set(found)), case
        slack = 1 if sampling != "shuffled" else 1 + round(fraction * n) * fraction  # two permutations may overlap
        assert round(fraction * n) - slack <= len(found) <= round(fraction * n) + 1, case


def test_rolling_samples_every_coordinate_equally_often() -> None:
    n, steps = 50, 2000
    for fraction in FRACTIONS:
        counts = torch.zeros(n)
        for step in range(steps):
            counts[sample_coordinates(n, fraction, step, "rolling", seed=0, device=CPU)] += 1
        assert (counts - fraction * steps).abs().max() <= 1, fraction


def test_shuffled_samples_without_replacement() -> None:
    n, fraction = 60, 0.25
    rounds = [
        sorted(itertools.chain(*(indices(n, fraction, 4 * r + i, "shuffled") for i in range(4)))) for r in range(3)
    ]
    assert rounds == [list(range(n))] * 3
    assert len({tuple(indices(n, fraction, 4 * r, "shuffled")) for r in range(3)}) == 3


def test_random_samples_differ_by_step_and_by_seed() -> None:
    assert len({tuple(indices(1000, 0.1, step, "random")) for step in range(20)}) == 20
    assert len({tuple(indices(1000, 0.1, 0, "random", seed)) for seed in range(20)}) == 20
