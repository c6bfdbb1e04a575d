"""Laws of PowerSGD: what it applies is Algorithm 1 of Vogels et al., and what it leaves out stays owed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lib.ranks import told_to_all
from test_own_weights import copied, on_replicas
from torch import Tensor, nn

from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.sync import GradSync
from acsgd.errors import RunError
from acsgd.optim.base import SecondMoments
from acsgd.shards.weights import Weight, WeightState

SHAPES = {"exact": (40,), "wide": (12, 50), "tall": (64, 9), "cube": (6, 5, 4), "narrow": (2, 2)}
"""Of weights; "exact" has no matrix, and of "narrow" a product of rank 1 would be no shorter."""
COMPRESSED = ("wide", "tall", "cube")
SMALL = "bucket_mb=1e-6"
SPECS = ["powersgd:rank=2", f"powersgd:rank=1,{SMALL}", f"powersgd:rank=2,warm_start=false,exact_steps=2,{SMALL}"]
STEPS = 6
U = 2.0**-24
"""Largest relative error of one operation in fp32."""


def gradient(replica: int, step: int, key: str) -> Tensor:
    number = 1000 * step + 10 * replica + list(SHAPES).index(key)
    return torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(number))


class Step(NamedTuple):
    """What a replica has before and after one step."""

    before: WeightState
    applied: dict[str, Tensor]
    after: WeightState

    def error(self, key: str, *, before: bool = False) -> Tensor:
        errors = (self.before if before else self.after).get("gradient_residual", {})
        return errors.get(key, torch.zeros(SHAPES[key])).view(SHAPES[key])


class Run:
    """A replica's training under way, of which only gradients are looked at."""

    def __init__(self, spec: str, peers: Peers) -> None:
        self.weights = []
        for key, shape in SHAPES.items():
            param = nn.Parameter(torch.zeros(shape))
            self.weights.append(Weight(key, param, param))
        self.sync: GradSync = from_spec(spec, MODES, key="dp.mode").open(self.weights, peers)
        self._replica = peers.replica

    def make(self, step: int, *, times: float = 1.0, scale: float = 1.0, update: bool = True) -> Step:
        """Make a step; scale: of its gradients; update: whether the optimizer makes it, too."""
        before = copied(self.sync.state_dict())
        self.sync.begin_step(step, scale)
        for weight in self.weights:
            weight.master.grad = times * scale * gradient(self._replica, step, weight.key)
            self.sync.grad_ready(weight, is_final=True)
        self.sync.reduce()
        self.sync.wait()
        applied = {weight.key: _grad(weight).clone() for weight in self.weights}
        for weight in self.weights:
            _grad(weight).mul_(0.5)  # clipping does so
        if update:
            self.sync.after_step(step, SecondMoments({}, 0.999))
        return Step(before, applied, copied(self.sync.state_dict()))


def _grad(weight: Weight) -> Tensor:
    assert weight.master.grad is not None
    return weight.master.grad


def train(rank: int, peers: Peers, spec: str) -> list[Step]:
    run = Run(spec, peers)
    return [run.make(step) for step in range(STEPS)]


@pytest.fixture(scope="module", params=list(itertools.product(SPECS, [2, 3])), ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PowerSGD, list]:
    """Return a mode, and what each of some replicas had in each step."""
    spec, replicas = request.param
    steps = on_replicas(replicas, train, tmp_path_factory.mktemp("train") / "store", spec)
    return from_spec(spec, MODES, key="k"), steps


def test_what_is_applied_and_what_is_owed_is_what_was_due(trained: tuple[PowerSGD, list[list[Step]]]) -> None:
    """Over all steps and replicas. u is the rounding of one operation, r the rank, R the replicas.

    To a replica's M = g + e, and to M - P Q^T, one operation each; the product has r terms of each element, in the
    error and in what is applied, and Q is summed over R. P has orthonormal columns, so by Cauchy and Schwarz the terms
    of an element in column j of M add up to no more than the norm of that column. What is exact has R additions.
    """
    mode, replicas = trained
    for key, shape in SHAPES.items():
        applied, due, bound = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        for step in range(STEPS):
            applied += replicas[0][step].applied[key]
            for replica, steps in enumerate(replicas):
                given, error = gradient(replica, step, key).double(), steps[step].error(key, before=True)
                due += given
                owed = (given + error).flatten(1) if len(shape) > 1 else given.view(-1, 1)
                products = (2 * mode.rank + len(replicas)) * owed.norm(dim=0).expand_as(owed) + owed.abs()
                bound += U * (2 * owed.abs() + products).view(shape) * 1.01
        left = sum(steps[-1].error(key).double() for steps in replicas)
        assert ((applied + left - due).abs() <= bound).all(), key
        assert bool(torch.as_tensor(left).any()) == (key in COMPRESSED), key


def algorithm(owed: Sequence[Tensor], basis: Tensor) -> tuple[Tensor, float]:
    """Apply Algorithm 1 in fp64 to what replicas owe, [rows, cols] each; return the sum, and how far fp32 may be off.

    P is orthonormal(S), S = sum M Q. By rounding S is off by E1, at most (cols + R) u sum |M| |Q|, and by what makes
    Householder's P not quite span it, E2 of norm at most c rows r u |S| (Higham 2002, theorem 19.4; c = 4 is ample):
    projections on both differ by at most |E1 + E2| / smallest singular value of S. P's columns are c rows r**1.5 u
    from orthonormal ones. The products of P have rows, r and R terms.
    """
    rows, rank, replicas = len(owed[0]), basis.shape[1], len(owed)
    total = torch.stack([each.double() for each in owed]).sum(0)
    sketch = total @ basis.double()
    left = torch.linalg.qr(sketch).Q
    magnitudes = torch.stack([each.double().abs() for each in owed]).sum(0)
    off = (len(basis) + replicas) * U * (magnitudes @ basis.double().abs()).norm() + 4 * rows * rank * U * sketch.norm()
    angle = float(off / torch.linalg.svdvals(sketch)[-1])
    norms = sum(float(each.norm()) for each in owed)
    bound = angle * float(total.norm()) + (8 * rows * rank**1.5 + (rows + rank + replicas) * rank**0.5) * U * norms
    return left @ (left.T @ total), bound


def test_each_step_is_the_published_one(trained: tuple[PowerSGD, list[list[Step]]]) -> None:
    mode, replicas = trained
    for step, key in itertools.product(range(STEPS), COMPRESSED):
        owed = [
            (gradient(replica, step, key) + steps[step].error(key, before=True)).flatten(1)
            for replica, steps in enumerate(replicas)
        ]
        applied = replicas[0][step].applied[key].flatten(1)
        if step < mode.exact_steps:
            assert torch.equal(applied, torch.stack(owed).sum(0)) or len(owed) > 2
            continue
        bases = [steps[step].before.get("basis", {}).get(key) for steps in replicas]
        basis = mode.first_basis(key, owed[0], step) if bases[0] is None else bases[0]
        assert all(other is None or torch.equal(other, basis) for other in bases)
        assert (bases[0] is None) == (step == mode.exact_steps or not mode.warm_start), "it starts warm where it can"
        expected, bound = algorithm(owed, basis)
        assert bound < 0.05 * expected.norm(), "nothing is shown"
        assert (applied - expected).norm() <= bound


def apply_low_rank(rank: int, peers: Peers, ranks: int) -> dict[str, Tensor]:
    """Apply gradients which are, summed over the replicas, of rank `ranks`."""
    run = Run("powersgd:rank=2", peers)
    run.sync.begin_step(0)
    for weight in run.weights:
        weight.master.grad = low_rank(rank, weight.key, ranks)
        run.sync.grad_ready(weight, is_final=True)
    run.sync.reduce()
    run.sync.wait()
    return {weight.key: _grad(weight) for weight in run.weights}


def low_rank(replica: int, key: str, ranks: int) -> Tensor:
    """Return small integers, so that sums are exact; of two replicas, each has half of the rank."""
    generator = torch.Generator().manual_seed(replica)
    rows, rest = SHAPES[key][0], math.prod(SHAPES[key][1:])
    half = ranks // 2
    left, right = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((rows, half), (half, rest)))
    return (left @ right).view(SHAPES[key])


def test_a_sum_of_no_higher_rank_is_exact(tmp_path: Path) -> None:
    for ranks, is_exact in ((2, True), (6, False)):
        applied = on_replicas(2, apply_low_rank, tmp_path / f"store-{ranks}", ranks)[0]
        for key in COMPRESSED:
            given = [low_rank(replica, key, ranks).flatten(1) for replica in range(2)]
            total = sum(each.double() for each in given)
            wrong = float((applied[key].flatten(1) - total).norm())
            if is_exact:
                assert wrong <= algorithm(given, PowerSGD(rank=2).first_basis(key, given[0], 0))[1], key
            else:
                assert wrong >= 0.999 * float(torch.linalg.svdvals(total)[2:].norm()), key


def train_and_resume(rank: int, peers: Peers, spec: str, at: int) -> bool:
    """Whether a run that was stopped after `at` steps goes on as one that was not."""
    whole, half = Run(spec, peers), Run(spec, peers)
    for step in range(at):
        whole.make(step)
    half.sync.load_state_dict(told_to_all(copied(whole.sync.state_dict()), peers.group))
    pairs = [(whole.make(step), half.make(step)) for step in range(at, STEPS)]
    return all(
        torch.equal(one.applied[key], other.applied[key]) and torch.equal(one.error(key), other.error(key))
        for one, other in pairs
        for key in SHAPES
    )


@pytest.mark.parametrize(("spec", "at"), list(itertools.product(SPECS, [1, 4])))
def test_a_resumed_run_is_the_undisturbed_one(spec: str, at: int, tmp_path: Path) -> None:
    assert on_replicas(3, train_and_resume, tmp_path / "store", spec, at) == [True] * 3


def take_over(rank: int, peers: Peers, spec: str, saved: list[WeightState]) -> Step:
    """Take over from other replicas; return the next step, of gradients that are 0."""
    run = Run(spec, peers)
    run.sync.load_state_dict(saved)
    return run.make(STEPS, times=0.0)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_is_owed_outlives_a_change_of_the_number_of_replicas(replicas: int, tmp_path: Path) -> None:
    """Each share is rounded once, and so is what several old errors add up to."""
    steps = on_replicas(3 if replicas == 2 else 2, train, tmp_path / "before", "powersgd:rank=2")
    ends = [of_replica[-1] for of_replica in steps]
    after = on_replicas(replicas, take_over, tmp_path / "after", "powersgd:rank=1", [end.after for end in ends])
    for key in COMPRESSED:
        owed = torch.stack([end.error(key).double() for end in ends]).sum(0)
        now = torch.stack([step.error(key, before=True).double() for step in after]).sum(0)
        assert owed.any()
        assert ((now - owed).abs() <= U * replicas * (owed.abs() / replicas)).all()
        if replicas == 1:
            assert torch.equal(after[0].applied[key], owed.float()), "it is paid at once"
            assert "gradient_residual" not in after[0].after
        else:
            assert after[0].applied[key].any(), "it is paid little by little"


def leave_out(rank: int, peers: Peers, spec: str) -> bool:
    """Whether a step that the optimizer does not make, for a gradient is not finite, leaves what was remembered."""
    run = Run(spec, peers)
    for step in range(3):
        run.make(step)
    left_out = run.make(3, times=float("nan") if rank else 1.0, update=False)
    again = run.make(3)
    same = {name: left_out.before[name].keys() for name in left_out.before} == {
        name: left_out.after[name].keys() for name in left_out.after
    } and all(
        torch.equal(tensor, left_out.after[name][key])
        for name, by_key in left_out.before.items()
        for key, tensor in by_key.items()
    )
    told = all(left_out.applied[key].isnan().any() for key in SHAPES)
    return same and told and all(again.applied[key].isfinite().all() for key in SHAPES)


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_that_is_left_out_is_forgotten(spec: str, tmp_path: Path) -> None:
    assert on_replicas(2, leave_out, tmp_path / "store", spec) == [True, True]


def pay(rank: int, peers: Peers) -> tuple[Step, Step]:
    """Go on in a mode that compresses nothing yet: what is owed is paid at once, to the bit as in all-reduce."""
    run = Run("powersgd:rank=2", peers)
    run.make(0)
    states = told_to_all(copied(run.sync.state_dict()), peers.group)
    exact, plain = Run("powersgd:exact_steps=9", peers), Run("allreduce", peers)
    exact.sync.load_state_dict(states)
    return exact.make(1), plain.make(1)


def test_exact_steps_pay_what_is_owed(tmp_path: Path) -> None:
    by_replica = on_replicas(2, pay, tmp_path / "store")
    for key in SHAPES:
        due = [gradient(replica, 1, key) + steps[0].error(key, before=True) for replica, steps in enumerate(by_replica)]
        for paid, plain in by_replica:
            assert torch.equal(paid.applied[key], due[0] + due[1])
            assert torch.equal(plain.applied[key], paid.applied[key]) == (key not in COMPRESSED)
            assert not paid.after


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_another_mode_remembers_is_not_lost_in_silence(replicas: int, tmp_path: Path) -> None:
    assert on_replicas(replicas, refuse, tmp_path / "store") == [True] * replicas


def refuse(rank: int, peers: Peers) -> bool:
    run, saved = Run("powersgd", peers), {"local_weights": {"wide": torch.zeros(12, 50)}}
    with pytest.raises(RunError, match=r"holds \['local_weights'\] of another data-parallel mode"):
        run.sync.load_state_dict([saved] * peers.size)
    return True
