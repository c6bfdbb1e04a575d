"""Laws of PowerSGD: it applies Algorithm 1 of Vogels et al., and keeps what that omits as residual."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lib.ranks import gather_states
from lib.replicas import copied, on_replicas
from torch import Tensor, nn

from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.errors import RunError
from acsgd.optim.base import SecondMoments
from acsgd.shards.weights import Weight, WeightState

SHAPES = {"exact": (40,), "wide": (12, 50), "tall": (64, 9), "cube": (6, 5, 4), "narrow": (2, 2)}
"""Shapes of weights; "exact" has no matrix, and factors of rank 1 of "narrow" are not smaller."""
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
    """State of a replica before and after a step, and the gradients that the step applies."""

    before: WeightState
    applied: dict[str, Tensor]
    after: WeightState

    def residual(self, key: str, *, before: bool = False) -> Tensor:
        residuals = (self.before if before else self.after).get("gradient_residual", {})
        return residuals.get(key, torch.zeros(SHAPES[key])).view(SHAPES[key])


class Run:
    """Training of one replica, of which only gradients matter."""

    def __init__(self, spec: str, peers: Peers) -> None:
        self.weights = []
        for key, shape in SHAPES.items():
            param = nn.Parameter(torch.zeros(shape))
            self.weights.append(Weight(key, param, param))
        self.sync: GradSync = from_spec(spec, MODES, key="dp.mode").open(self.weights, peers)
        self._replica = peers.replica

    def make(self, step: int, *, times: float = 1.0, scale: float = 1.0, update: bool = True) -> Step:
        """Make a step. scale: loss scale; update: whether the optimizer makes the step, too."""
        before = copied(self.sync.state_dict())
        grads = {key: times * scale * gradient(self._replica, step, key) for key in SHAPES}
        applied = self.reduce(step, grads, scale)
        for weight in self.weights:
            _grad(weight).mul_(0.5)  # as clipping does
        if update:
            self.sync.exchange(step, SecondMoments({}, 0.999))
            self.sync.after_step(step, SecondMoments({}, 0.999))
        return Step(before, applied, copied(self.sync.state_dict()))

    def reduce(self, step: int, grads: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        self.sync.begin_step(step, scale)
        for weight in self.weights:
            weight.master.grad = grads[weight.key]
            self.sync.grad_ready(weight, is_final=True)
        self.sync.reduce()
        self.sync.wait()
        self.sync.commit()
        return {weight.key: _grad(weight).clone() for weight in self.weights}


def _grad(weight: Weight) -> Tensor:
    assert weight.master.grad is not None
    return weight.master.grad


def train_all(rank: int, peers: Peers) -> dict[str, list[Step]]:
    return {spec: [run.make(step) for step in range(STEPS)] for spec in SPECS for run in [Run(spec, peers)]}


Trained = list[tuple[str, PowerSGD, list[list[Step]]]]
"""Spec, mode, and the steps of each replica."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the steps of 2 and of 3 replicas in each mode."""
    directory, cases = tmp_path_factory.mktemp("train"), []
    for replicas in (2, 3):
        results = on_replicas(replicas, train_all, directory / f"store-{replicas}")
        cases += [(spec, from_spec(spec, MODES, key="k"), [result[spec] for result in results]) for spec in SPECS]
    return cases


def test_applied_gradients_and_residuals_add_up_to_all_gradients(trained: Trained) -> None:
    """Over all steps and replicas. u is the rounding of one operation, r the rank, R the number of replicas.

    A replica's M = g + residual and M - P Q^T take one operation each; the product has r terms per element, in the
    residual and in what is applied, and Q is summed over R. P has orthonormal columns, so by Cauchy and Schwarz the
    terms of an element in column j of M add up to no more than the norm of that column. Exact gradients take R
    additions.
    """
    for (spec, mode, replicas), (key, shape) in itertools.product(trained, SHAPES.items()):
        applied, total, bound = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        for step in range(STEPS):
            applied += replicas[0][step].applied[key]
            for replica, steps in enumerate(replicas):
                grad, residual = gradient(replica, step, key).double(), steps[step].residual(key, before=True)
                total += grad
                matrix = (grad + residual).flatten(1) if len(shape) > 1 else grad.view(-1, 1)
                products = (2 * mode.rank + len(replicas)) * matrix.norm(dim=0).expand_as(matrix) + matrix.abs()
                bound += U * (2 * matrix.abs() + products).view(shape) * 1.01
        left = sum(steps[-1].residual(key).double() for steps in replicas)
        assert ((applied + left - total).abs() <= bound).all(), (spec, len(replicas), key)
        assert bool(torch.as_tensor(left).any()) == (key in COMPRESSED), (spec, len(replicas), key)


def algorithm(matrices: Sequence[Tensor], basis: Tensor) -> tuple[Tensor, float]:
    """Apply Algorithm 1 in fp64 to the matrices [rows, cols] of all replicas; return the sum and the error of fp32.

    P is orthonormal(S), S = sum M Q. By rounding S is off by E1, at most (cols + R) u sum |M| |Q|, and by what makes
    Householder's P not quite span it, E2 of norm at most c rows r u |S| (Higham 2002, theorem 19.4; c = 4 is ample):
    projections on both differ by at most |E1 + E2| / smallest singular value of S. P's columns are c rows r**1.5 u
    from orthonormal ones. The products of P have rows, r and R terms.
    """
    rows, rank, replicas = len(matrices[0]), basis.shape[1], len(matrices)
    total = torch.stack([each.double() for each in matrices]).sum(0)
    sketch = total @ basis.double()
    left = torch.linalg.qr(sketch).Q
    magnitudes = torch.stack([each.double().abs() for each in matrices]).sum(0)
    off = (len(basis) + replicas) * U * (magnitudes @ basis.double().abs()).norm() + 4 * rows * rank * U * sketch.norm()
    angle = float(off / torch.linalg.svdvals(sketch)[-1])
    norms = sum(float(each.norm()) for each in matrices)
    bound = angle * float(total.norm()) + (8 * rows * rank**1.5 + (rows + rank + replicas) * rank**0.5) * U * norms
    return left @ (left.T @ total), bound


def test_each_step_is_the_published_one(trained: Trained) -> None:
    for (spec, mode, replicas), step, key in itertools.product(trained, range(STEPS), COMPRESSED):
        matrices = [
            (gradient(replica, step, key) + steps[step].residual(key, before=True)).flatten(1)
            for replica, steps in enumerate(replicas)
        ]
        applied, case = replicas[0][step].applied[key].flatten(1), (spec, len(replicas), step, key)
        if step < mode.exact_steps:
            assert torch.equal(applied, torch.stack(matrices).sum(0)) or len(matrices) > 2, case
            continue
        bases = [steps[step].before.get("basis", {}).get(key) for steps in replicas]
        basis = mode.first_basis(key, matrices[0], step) if bases[0] is None else bases[0]
        assert all(other is None or torch.equal(other, basis) for other in bases), case
        assert (bases[0] is None) == (step == mode.exact_steps or not mode.warm_start), case
        expected, bound = algorithm(matrices, basis)
        assert bound < 0.05 * expected.norm(), "the bound is too wide to show anything"
        assert (applied - expected).norm() <= bound, case


def apply_low_rank(rank: int, peers: Peers) -> dict[int, dict[str, Tensor]]:
    """Reduce gradients whose sum has rank 2 or 6; return the applied gradients."""
    return {
        ranks: Run("powersgd:rank=2", peers).reduce(0, {key: low_rank(rank, key, ranks) for key in SHAPES})
        for ranks in (2, 6)
    }


def low_rank(replica: int, key: str, ranks: int) -> Tensor:
    """Return small integers, so that sums are exact; each of two replicas has half of the rank."""
    generator = torch.Generator().manual_seed(replica)
    rows, rest = SHAPES[key][0], math.prod(SHAPES[key][1:])
    half = ranks // 2
    left, right = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((rows, half), (half, rest)))
    return (left @ right).view(SHAPES[key])


def test_a_sum_of_no_higher_rank_is_exact(tmp_path: Path) -> None:
    for ranks, applied in on_replicas(2, apply_low_rank, tmp_path / "store")[0].items():
        for key in COMPRESSED:
            grads = [low_rank(replica, key, ranks).flatten(1) for replica in range(2)]
            total = sum(each.double() for each in grads)
            error = float((applied[key].flatten(1) - total).norm())
            if ranks == 2:
                assert error <= algorithm(grads, PowerSGD(rank=2).first_basis(key, grads[0], 0))[1], key
            else:
                assert error >= 0.999 * float(torch.linalg.svdvals(total)[2:].norm()), key


def train_and_resume(rank: int, peers: Peers) -> list[tuple[str, int]]:
    """Return the specs and steps at which a stopped run does not continue as an uninterrupted one."""
    different = []
    for spec, at in itertools.product(SPECS, [1, 4]):
        whole, half = Run(spec, peers), Run(spec, peers)
        for step in range(at):
            whole.make(step)
        half.sync.load_state_dict(gather_states(copied(whole.sync.state_dict()), peers.group))
        for step in range(at, STEPS):
            one, other = whole.make(step), half.make(step)
            for key in SHAPES:
                same = torch.equal(one.applied[key], other.applied[key])
                if not (same and torch.equal(one.residual(key), other.residual(key))):
                    different.append((spec, at))
    return different


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    assert on_replicas(3, train_and_resume, tmp_path / "store") == [[]] * 3


def restore(rank: int, peers: Peers, spec: str, saved: list[WeightState]) -> Step:
    """Restore the state of other replicas; return the next step, with gradients of 0."""
    run = Run(spec, peers)
    run.sync.load_state_dict(saved)
    return run.make(STEPS, times=0.0)


@pytest.mark.parametrize("replicas", [1, 3])
def test_residuals_are_conserved_when_the_number_of_replicas_changes(
    replicas: int, trained: Trained, tmp_path: Path
) -> None:
    """Each share is rounded once, and so is the sum of several residuals."""
    saving = 3 if replicas == 2 else 2
    ends = next([steps[-1] for steps in of] for spec, _, of in trained if spec == SPECS[0] and len(of) == saving)
    after = on_replicas(replicas, restore, tmp_path / "after", "powersgd:rank=1", [end.after for end in ends])
    for key in COMPRESSED:
        total = torch.stack([end.residual(key).double() for end in ends]).sum(0)
        now = torch.stack([step.residual(key, before=True).double() for step in after]).sum(0)
        assert total.any()
        assert ((now - total).abs() <= U * replicas * (total.abs() / replicas)).all()
        if replicas == 1:
            assert torch.equal(after[0].applied[key], total.float()), "a single replica applies it at once"
            assert "gradient_residual" not in after[0].after
        else:
            assert after[0].applied[key].any()


def check_one_group(rank: int, peers: Peers) -> tuple[list[str], tuple[Step, Step]]:
    """Return failed checks of skipped steps and loss scales, and a step after residuals in exact modes."""
    failed = [f"skipped {spec}" for spec in SPECS if not skip_step(rank, peers, spec)]
    failed += [f"scaled {spec}" for spec in SPECS if not scale_losses(peers, spec)]
    run = Run("powersgd:rank=2", peers)
    run.make(0)
    states = gather_states(copied(run.sync.state_dict()), peers.group)
    exact, plain = Run("powersgd:exact_steps=9", peers), Run("allreduce", peers)
    exact.sync.load_state_dict(states)
    return failed, (exact.make(1), plain.make(1))


def skip_step(rank: int, peers: Peers, spec: str) -> bool:
    """Whether a step that the optimizer skips, since a gradient is not finite, changes no state."""
    run = Run(spec, peers)
    for step in range(3):
        run.make(step)
    skipped = run.make(3, times=float("nan") if rank else 1.0, update=False)
    again = run.make(3)
    before, after = (
        {(name, key): x for name, by_key in state.items() for key, x in by_key.items()}
        for state in (skipped.before, skipped.after)
    )
    same = before.keys() == after.keys() and all(torch.equal(x, after[key]) for key, x in before.items())
    is_nan = all(skipped.applied[key].isnan().any() for key in SHAPES)
    return same and is_nan and all(again.applied[key].isfinite().all() for key in SHAPES)


def scale_losses(peers: Peers, spec: str) -> bool:
    """Whether a loss scale, another power of two in each step, changes no bit of anything but the scale."""
    plain, scaled = Run(spec, peers), Run(spec, peers)
    same = []
    for step, scale in enumerate([1.0, 2.0**12, 2.0**11, 0.5, 2.0**7, 1.0]):
        expected, found = plain.make(step), scaled.make(step, scale=scale)
        same += [torch.equal(found.applied[key], scale * expected.applied[key]) for key in SHAPES]
        same += [torch.equal(found.residual(key), expected.residual(key)) for key in SHAPES]
    return all(same)


def test_skipped_steps_loss_scales_and_exact_steps(tmp_path: Path) -> None:
    """Exact steps apply residuals at once, to the bit as all-reduce would."""
    results = on_replicas(2, check_one_group, tmp_path / "store")
    assert [failed for failed, _ in results] == [[], []]
    for key in SHAPES:
        grads = [
            gradient(replica, 1, key) + steps[0].residual(key, before=True)
            for replica, (_, steps) in enumerate(results)
        ]
        for _, (exact, plain) in results:
            assert torch.equal(exact.applied[key], grads[0] + grads[1])
            assert torch.equal(plain.applied[key], exact.applied[key]) == (key not in COMPRESSED)
            assert not exact.after


def check_single(rank: int, peers: Peers) -> list[str]:
    return [spec for spec in SPECS if not scale_losses(peers, spec)] + refuse(rank, peers)


def refuse(rank: int, peers: Peers) -> list[str]:
    """Return an error if the state of another mode is accepted."""
    run, saved = Run("powersgd", peers), {"local_weights": {"wide": torch.zeros(12, 50)}}
    try:
        run.sync.load_state_dict([saved] * peers.size)
    except RunError as error:
        return [] if "holds ['local_weights'] of another data-parallel mode" in str(error) else [str(error)]
    return ["not refused"]


def test_a_single_replica_ignores_the_loss_scale_and_refuses_the_state_of_another_mode(tmp_path: Path) -> None:
    assert on_replicas(1, check_single, tmp_path / "single") == [[]]
    assert on_replicas(2, refuse, tmp_path / "two") == [[], []]
