"""Laws of the measured gains: 1 where replicas have the same gradient, sqrt(R) where they have nothing in common."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from test_own_weights import Run, gradients, on_replicas
from torch import Tensor, nn

from acsgd.dp.noise import SKETCHES, Noise, sketch
from acsgd.dp.peers import Peers
from acsgd.meter import Meter
from acsgd.shards.base import Weight

SHAPE = (64, 48)


def draw(*seeds: int) -> Tensor:
    return torch.randn(
        SHAPE, generator=torch.Generator().manual_seed(sum(seed * 1000**place for place, seed in enumerate(seeds)))
    )


def measured(rank: int, peers: Peers) -> tuple[list[float], list[float]]:
    """Return the gains of some weights, and those that a copy has that has taken over what was measured."""
    names = ["alike", "noise", "half", "zero", "none", "vector"]
    weights = [Weight(name, param, param) for name in names for param in [nn.Parameter(torch.zeros(SHAPE))]]
    grads = {name: weight.master for name, weight in zip(names, weights, strict=True)}
    noise, meter = Noise(weights, peers), Meter()
    for step in range(20):
        grads["alike"].grad = draw(step)
        grads["noise"].grad = draw(step, rank, 1)
        grads["half"].grad = draw(step) + draw(step, rank, 2)
        grads["zero"].grad = torch.zeros(SHAPE)
        grads["vector"].grad = draw(step)
        peers.begin(lambda step=step: noise.measure(step, meter)).result(meter)  # type: ignore[misc]
    other = Noise(weights, peers)
    other.load_state_dict([noise.state_dict()] * peers.size)
    return [noise.gain(name) for name in names], [other.gain(name) for name in names]


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_gain_is_what_noise_takes_away(replicas: int, tmp_path: Path) -> None:
    """Weights .7**i count as (sum of w)**2 / sum of w**2 = 5.7 measurements, of 32 numbers; four standard deviations.

    A gain is a power -1/2 of the ratio, so its relative deviation is half of the ratio's.
    """
    (first, again), *others = on_replicas(replicas, measured, tmp_path / "store")
    alike, noise, half, zero, none, vector = first
    assert again == first
    assert all(each == first for each, _ in others)
    assert alike == vector == pytest.approx(1.0, abs=1e-6)
    assert zero == none == 1.0
    deviation = 4 * 0.5 * math.sqrt(2 / (5.7 * SKETCHES)) * math.sqrt(1 + 1 / replicas)
    assert noise == pytest.approx(math.sqrt(replicas), rel=deviation)
    assert noise <= math.sqrt(replicas) * (1 + 2.0**-22)
    assert half == pytest.approx((0.5 + 0.5 / replicas) ** -0.5, rel=deviation)


def first_steps(rank: int, peers: Peers) -> list[dict[str, Tensor]]:
    """Return the weights after one step with and without gains; and the gains."""
    runs = [Run(f"cocktail_grad:topk=1,bits=8,gains={gains}", peers) for gains in ("true", "false")]
    for run in runs:
        run.go(rank, range(1))
    noise = Noise(runs[0].weights, peers)
    for weight, grad in zip(runs[0].weights, gradients(rank, 0), strict=True):
        weight.master.grad = grad
    peers.begin(lambda: noise.measure(0, Meter())).result(Meter())
    gains = {weight.key: torch.tensor(noise.gain(weight.key)) for weight in runs[0].weights}
    return [*(run.model() for run in runs), gains]


def test_steps_become_longer_by_their_gains(tmp_path: Path) -> None:
    """From 0, and 8 bits leave less than a hundredth of the norm of what is sent, at each of two ends."""
    longer, plain, gains = on_replicas(2, first_steps, tmp_path / "store")[0]
    norm = max(float(torch.cat([x.flatten() for x in each.values()]).norm()) for each in (longer, plain))
    assert max(gains.values()) > 1.1
    for key, gain in gains.items():
        assert (longer[key] - gain * plain[key]).norm() <= (1 + gain) * 2 * 0.01 * 1.02 * 2 * norm


@pytest.mark.parametrize("grad", [torch.randn(40, 30), torch.randn(1200), torch.ones(40, 30), torch.randn(5, 6, 40)])
def test_the_squares_of_projections_are_that_of_the_gradient_in_the_mean(grad: Tensor) -> None:
    """a^T G b has a fourth moment of at most 9 |G|^4 (signs, twice), so a variance of 8 |G|^4 at the most; 5 sigma."""
    steps = 100
    mean = torch.stack([sketch(grad, step).square().mean() for step in range(steps)]).mean() / grad.square().sum()
    assert abs(mean - 1) <= 5 * math.sqrt(8 / (steps * SKETCHES))


def test_projections_are_new_in_each_step_and_linear() -> None:
    one, two = torch.randn(2, 6, 7)
    assert not torch.equal(sketch(one, 0), sketch(one, 1))
    assert torch.allclose(sketch(one + two, 3), sketch(one, 3) + sketch(two, 3), atol=42 * 2.0**-22 * 10)
    assert torch.equal(sketch(None, 0), torch.zeros(SKETCHES))
