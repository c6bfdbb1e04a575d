"""Laws of second moments that replicas keep at the size of those of the mean gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.ranks import told_to_all
from test_own_weights import copied, on_replicas
from torch import Tensor, nn

from acsgd.config.options import OptimConfig
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.exchange.second_moments import SecondMomentCorrection, by_rows
from acsgd.meter import Meter
from acsgd.optim.adamw import AdamWOptimizer
from acsgd.optim.base import LocalStep
from acsgd.shards.weights import Weight

SHAPE = (64, 48)
STEPS = 97
"""After the last of them is a measurement."""
LONE = 5
"""A row that one replica alone has a gradient for."""
CONFIG = OptimConfig(lr=1e-3, steps=STEPS, betas=(0.9, 0.97))
"""So that second moments forget what is two measurements ago."""


def draw(*seeds: int) -> Tensor:
    seed = sum(seed * 1000**place for place, seed in enumerate(seeds))
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def lone(step: int, rank: int) -> Tensor:
    grad = draw(step)
    grad[LONE] *= (rank == 1) * 3
    return grad


GRADS: dict[str, Callable[[int, int], Tensor]] = {
    "alike": lambda step, _: draw(step),
    "noise": lambda step, rank: draw(step, rank, 1),
    "half": lambda step, rank: draw(step) + draw(step, rank, 2),
    "lone": lone,
    "zero": lambda step, rank: torch.zeros(SHAPE),
}
"""By key, the gradient of a step and replica."""


class Replica:
    """Weights that AdamW changes, and what keeps its second moments."""

    def __init__(self, peers: Peers) -> None:
        self.weights = [Weight(key, param, param) for key in GRADS for param in [nn.Parameter(torch.zeros(SHAPE))]]
        self.peers, self.optimizer = peers, AdamWOptimizer(self.weights, CONFIG)
        self.rows = SecondMomentCorrection({weight.key: weight.master for weight in self.weights}, peers)

    def go(self, rank: int, steps: range) -> None:
        for step in steps:
            for weight in self.weights:
                weight.master.grad = GRADS[weight.key](step, rank)
            self.optimizer.step(step, LocalStep(shares=self.rows.shares()))
            moments = self.optimizer.second_moments(self.weights)
            self.rows.decay(step, moments)
            if self.rows.is_due(step):
                grads = {weight.key: weight.master.grad for weight in self.weights if weight.master.grad is not None}
                self.peers.submit(partial(self.rows.measure, step, grads, moments, Meter())).result(Meter())

    def moments(self) -> dict[str, Tensor]:
        return dict(self.optimizer.second_moments(self.weights).by_key)


def run(rank: int, peers: Peers) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    replica = Replica(peers)
    replica.go(rank, range(STEPS))
    return replica.rows.shares(), replica.moments()


@pytest.mark.parametrize("replicas", [2, 3])
def test_rows_have_the_second_moments_of_the_mean_gradient(replicas: int, tmp_path: Path) -> None:
    """Told to 19 %, there and back; the share of a weight comes of about 64 * 3 projections, off by 2 / sqrt(192)."""
    ranks = on_replicas(replicas, run, tmp_path / "store")
    expected = {key: torch.zeros(SHAPE) for key in GRADS}
    for step in range(STEPS):
        for key, grad in GRADS.items():
            mean = torch.stack([grad(step, rank) for rank in range(replicas)]).mean(0)
            expected[key].lerp_(mean.square(), 1 - CONFIG.betas[1])
    shares, moments = ranks[0]
    assert torch.allclose(shares["alike"], torch.ones(64), rtol=2.0**-20)
    assert (shares["zero"] == 1).all()
    for key in ("alike", "noise", "half"):
        whole = moments[key].mean() / expected[key].mean()
        assert abs(whole.log2()) <= 0.5
        rows = by_rows(moments[key]).mean(1) / by_rows(expected[key]).mean(1)
        assert rows.log2().abs().max() <= 1.5
    assert shares["noise"].mean() <= shares["half"].mean() - 0.1
    for _, others in ranks[1:]:
        for key, other in others.items():
            assert torch.allclose(by_rows(other).mean(1), by_rows(moments[key]).mean(1), rtol=1e-5)


def test_a_row_that_one_replica_has_a_gradient_for_is_as_large_on_the_others(tmp_path: Path) -> None:
    """1 / R of the squares that one adds, of the mean over R."""
    (shares, moments), (_, others) = on_replicas(2, run, tmp_path / "store")
    assert shares["lone"][LONE] <= 0.5 + 0.25
    expected = torch.zeros(SHAPE[1])
    for step in range(STEPS):
        expected.lerp_((lone(step, 1)[LONE] / 2).square(), 1 - CONFIG.betas[1])
    for held in (moments["lone"][LONE], others["lone"][LONE]):
        assert abs((held.mean() / expected.mean()).log2()) <= 1.0
    assert (moments["lone"][LONE] == moments["lone"][LONE][0]).all(), "filled where there was nothing"


def resume(rank: int, peers: Peers, at: int) -> bool:
    """Whether replicas that take over what others knew after `at` steps go on as these do."""
    whole, half = Replica(peers), Replica(peers)
    whole.go(rank, range(at))
    states = told_to_all(copied(whole.rows.state_dict()), peers.group)
    for weight in half.weights:
        half.optimizer.load_state_of(weight, copied(whole.optimizer.state_of(whole.weights)), weight.key)
    half.rows.load_state_dict(states)
    for replica in (whole, half):
        replica.go(rank, range(at, at + 20))
    return all(torch.equal(half.moments()[key], moment) for key, moment in whole.moments().items())


@pytest.mark.parametrize("at", [1, 6, 21])
def test_what_is_known_can_be_taken_over(at: int, tmp_path: Path) -> None:
    assert on_replicas(2, resume, tmp_path / "store", at) == [True, True]


def regroup(rank: int, peers: Peers) -> tuple[Any, Any]:
    """Return shares and state of a replica that takes over from three, which had agreed on 1, 2 and 3."""
    rows = SecondMomentCorrection({"w": torch.zeros(SHAPE)}, peers)
    shapes = {name: by_key["w"].shape for name, by_key in rows.state_dict().items()}
    saved = [{name: {"w": torch.full(shape, float(i))} for name, shape in shapes.items()} for i in (1, 2, 3)]
    rows.load_state_dict(saved)
    return rows.shares()["w"], rows.state_dict()


def test_of_more_or_fewer_replicas_the_means_of_rows_hold(tmp_path: Path) -> None:
    for shares, state in on_replicas(2, regroup, tmp_path / "store"):
        assert (shares == 1).all()
        assert (state["second_moment_means"]["w"] == 2).all()
        assert (state["second_moment_ratios"]["w"] == 0).all()
