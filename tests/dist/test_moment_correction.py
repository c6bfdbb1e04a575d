"""Laws of the correction of second moments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest
import torch
from lib.ranks import gather_states
from lib.replicas import copied, on_replicas
from torch import Tensor, nn

from acsgd.comm.waits import Meter
from acsgd.config.options import OptimConfig
from acsgd.dp.exchange.second_moments import SecondMomentCorrection, by_rows
from acsgd.dp.peers import Peers
from acsgd.optim.adamw import AdamW
from acsgd.optim.base import LocalStep, SecondMoments
from acsgd.optim.muon import Muon
from acsgd.shards.weights import Weight, WeightState

SHAPE = (64, 48)
STEPS = 97
"""Ends with a measurement."""
LONE = 5
"""A row that has a gradient on one replica only."""
CONFIG = OptimConfig(lr=1e-3, steps=STEPS, betas=(0.9, 0.97))
"""Second moments decay within two measurements."""


def draw(*seeds: int) -> Tensor:
    seed = sum(seed * 1000**index for index, seed in enumerate(seeds))
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
"""Gradient of a step and replica, by weight."""


class Replica:
    """Weights, AdamW and the correction of its second moments on one replica. hidden: those that Muon updates."""

    def __init__(self, peers: Peers, hidden: Collection[str] = ()) -> None:
        params = {key: nn.Parameter(torch.zeros(SHAPE)) for key in [*hidden, *GRADS]}
        self.weights = [Weight(key, param, param, is_hidden_matrix=key in hidden) for key, param in params.items()]
        self.peers, self.meter = peers, Meter()
        self.optimizer = (Muon() if hidden else AdamW()).open(self.weights, CONFIG)
        self.correction = SecondMomentCorrection({weight.key: weight.master for weight in self.weights}, peers)

    def train(self, rank: int, steps: range) -> None:
        for step in steps:
            for weight in self.weights:
                weight.master.grad = GRADS.get(weight.key, GRADS["half"])(step, rank)
            self.optimizer.step(step, LocalStep(shares=self.correction.shares()))
            moments = self.optimizer.second_moments(self.weights)
            measured = None
            if self.correction.is_due(step):
                grads = {weight.key: weight.master.grad for weight in self.weights if weight.master.grad is not None}
                measuring = self.peers.submit(partial(self.correction.measure, step, grads, moments, self.meter))
                measured = measuring.result(self.meter)
            self.correction.update(step, moments, measured)

    def moments(self) -> dict[str, Tensor]:
        return dict(self.optimizer.second_moments(self.weights).by_key)


def run(rank: int, peers: Peers) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    replica = Replica(peers)
    replica.train(rank, range(STEPS))
    return replica.correction.shares(), replica.moments()


Result = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Shares and second moments of a replica, by weight."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Result]]:
    """Return the results of each replica, by number of replicas."""
    directory = tmp_path_factory.mktemp("trained")
    return {replicas: on_replicas(replicas, run, directory / f"store-{replicas}") for replicas in (2, 3)}


def test_rows_have_the_second_moments_of_the_mean_gradient(trained: dict[int, list[Result]]) -> None:
    """Messages are exact to 19 % in each direction; the share of a weight is measured by about 64 * 3 projections, with
    an error of 2 / sqrt(192)."""
    for replicas, results in trained.items():
        expected = {key: torch.zeros(SHAPE) for key in GRADS}
        for step in range(STEPS):
            for key, grad in GRADS.items():
                mean = torch.stack([grad(step, rank) for rank in range(replicas)]).mean(0)
                expected[key].lerp_(mean.square(), 1 - CONFIG.betas[1])
        shares, moments = results[0]
        assert torch.allclose(shares["alike"], torch.ones(64), rtol=2.0**-20), replicas
        assert (shares["zero"] == 1).all(), replicas
        for key in ("alike", "noise", "half"):
            whole = moments[key].mean() / expected[key].mean()
            assert abs(whole.log2()) <= 0.5, (replicas, key)
            rows = by_rows(moments[key]).mean(1) / by_rows(expected[key]).mean(1)
            assert rows.log2().abs().max() <= 1.5, (replicas, key)
        assert shares["noise"].mean() <= shares["half"].mean() - 0.1, replicas
        for _, others in results[1:]:
            for key, other in others.items():
                assert torch.allclose(by_rows(other).mean(1), by_rows(moments[key]).mean(1), rtol=1e-5), (replicas, key)


def test_a_row_with_a_gradient_on_one_replica_is_as_large_on_the_others(trained: dict[int, list[Result]]) -> None:
    """1 / R of the squares of the one gradient, for the mean over R."""
    (shares, moments), (_, others) = trained[2]
    assert shares["lone"][LONE] <= 0.5 + 0.25
    expected = torch.zeros(SHAPE[1])
    for step in range(STEPS):
        expected.lerp_((lone(step, 1)[LONE] / 2).square(), 1 - CONFIG.betas[1])
    for row in (moments["lone"][LONE], others["lone"][LONE]):
        assert abs((row.mean() / expected.mean()).log2()) <= 1.0
    assert (moments["lone"][LONE] == moments["lone"][LONE][0]).all(), "rows of zeros are filled with the mean"


def moments_with_muon(rank: int, peers: Peers) -> tuple[bool, list[int], set[str]]:
    """Return whether moments equal those of AdamW alone, the bytes of AdamW and of both, and what has moments."""
    plain, with_hidden = Replica(peers), Replica(peers, hidden=["hidden"])
    for each in (plain, with_hidden):
        each.train(rank, range(20))
    moments = with_hidden.moments()
    equal = all(torch.equal(moments[key], moment) for key, moment in plain.moments().items())
    return equal, [plain.meter.sent_bytes, with_hidden.meter.sent_bytes], set(moments)


def measure_nothing(rank: int, peers: Peers) -> Tensor:
    """Return the shares after a measurement of a stage that has weights without second moments alone."""
    correction, moments = (
        SecondMomentCorrection({"w": torch.zeros(SHAPE)}, peers),
        SecondMoments({}, 0.9, frozenset("w")),
    )
    measuring = peers.submit(partial(correction.measure, 0, {"w": torch.ones(SHAPE)}, moments, Meter()))
    correction.update(0, moments, measuring.result(Meter()))
    return correction.shares()["w"]


def test_weights_without_second_moments_change_and_send_nothing(tmp_path: Path) -> None:
    for shares in on_replicas(2, measure_nothing, tmp_path / "nothing"):
        assert (shares == 1).all()
    for equal, sent_bytes, keys in on_replicas(2, moments_with_muon, tmp_path / "store"):
        assert equal
        assert sent_bytes[0] == sent_bytes[1] > 0
        assert keys == set(GRADS)


def resume(rank: int, peers: Peers) -> list[int]:
    """Return the steps at which a stopped run does not continue as an uninterrupted one."""
    different = []
    for at in (1, 6, 21):
        whole, half = Replica(peers), Replica(peers)
        whole.train(rank, range(at))
        states = gather_states(copied(whole.correction.state_dict()), peers.group)
        for weight in half.weights:
            half.optimizer.load_state_of(weight, copied(whole.optimizer.state_of(whole.weights)))
        half.correction.load_state_dict(states)
        for replica in (whole, half):
            replica.train(rank, range(at, at + 20))
        if not all(torch.equal(half.moments()[key], moment) for key, moment in whole.moments().items()):
            different.append(at)
    return different


def restore_three(rank: int, peers: Peers) -> tuple[Tensor, WeightState]:
    """Return shares and state of a replica that restores the states of three, all values of which are 1, 2 and 3."""
    correction = SecondMomentCorrection({"w": torch.zeros(SHAPE)}, peers)
    shapes = {name: by_key["w"].shape for name, by_key in correction.state_dict().items()}
    saved = [{name: {"w": torch.full(shape, float(i))} for name, shape in shapes.items()} for i in (1, 2, 3)]
    correction.load_state_dict(saved)
    return correction.shares()["w"], correction.state_dict()


def resume_and_resize(rank: int, peers: Peers) -> tuple[list[int], tuple[Tensor, WeightState]]:
    return resume(rank, peers), restore_three(rank, peers)


def test_state_is_restored_and_row_means_are_averaged_over_other_replicas(tmp_path: Path) -> None:
    for different, (shares, state) in on_replicas(2, resume_and_resize, tmp_path / "store"):
        assert not different
        assert (shares == 1).all()
        assert (state["second_moment_means"]["w"] == 2).all()
        assert (state["second_moment_ratios"]["w"] == 0).all()
