"""Laws of the communication hooks on plain DistributedDataParallel."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.hooked import CLIP, LR, SMALL_MB, Run, batch, net, on_plain_ranks
from lib.ordered import register_ordered_transport
from lib.replicas import count_sent
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from acsgd.dp.exchange.error_feedback import ErrorFeedback
from acsgd.dp.exchange.second_moments import by_rows

STEPS = 6
RATES = (0, 0.5, 1, 0, 0.25, 0.125)
"""Learning rates by step, where the hook knows them. Powers of two, so that products and quotients are exact."""
U = 2.0**-24
"""Largest relative error of one operation in fp32."""


class Sums(NamedTuple):
    """Results of one replica: sums over all steps, by parameter, fp64."""

    made: dict[str, Tensor]
    """Its gradients, clipped if they are, times the learning rates that the hook knows."""
    applied: dict[str, Tensor]
    """Gradients after the hook, times these."""
    residual: Mapping[str, Tensor]
    server_residual: Mapping[str, Tensor]
    largest: float
    """Largest magnitude of any exchanged value or residual."""
    dropped: int
    """Number of gradients that DDP removed, since no replica has used the parameter."""
    buckets: list[list[int]]


def add_up(rank: int, form: str, may_be_unused: bool) -> Sums:
    """Compute gradients of two micro-batches each, the first under no_sync; the weights do not change."""
    run = Run(form, find_unused_parameters=may_be_unused, gradient_as_bucket_view=not may_be_unused)
    run.optimizer.load_state_dict(run.optimizer.state_dict())  # as scripts resume; it replaces the parameter groups
    alone = net()
    made, applied = ({name: torch.zeros_like(p).double() for name, p in alone.named_parameters()} for _ in range(2))
    dropped = 0
    with pytest.MonkeyPatch.context() as patch:
        magnitudes = record_magnitudes(patch)
        for step in range(STEPS):
            rate = RATES[step] if "with learning rates" in form else 1
            run.optimizer.param_groups[0]["lr"] = rate
            # branch 0 is used by replica 0 alone in the first two steps, and then by none until the last
            used = [1] if may_be_unused and (step >= 2 or rank) and step != STEPS - 1 else [0, 1]
            for module in (alone, run.model):
                module.zero_grad()
            with run.model.no_sync():
                run.model(batch(rank, 2 * step), used).backward()
            run.model(batch(rank, 2 * step + 1), used).backward()
            for micro in (2 * step, 2 * step + 1):
                alone(batch(rank, micro), used).backward()
            if "clipped" in form:
                assert torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIP) > CLIP
            for total, module in ((made, alone), (applied, run.model.module)):
                for name, param in module.named_parameters():
                    total[name] += 0 if param.grad is None else rate * param.grad.double()
            dropped += sum(param.grad is None for param in run.model.parameters())
    saved = run.state.state_dict()
    order = {id(param): index for index, param in enumerate(run.model.parameters())}
    buckets = [[order[each] for each in bucket] for bucket in run.buckets]
    residuals = (of_kind(saved, kind) for kind in ("residual", "server_residual"))
    return Sums(made, applied, *residuals, max(magnitudes), dropped, buckets)


def record_magnitudes(patch: pytest.MonkeyPatch) -> list[float]:
    sharded_mean, magnitudes = ErrorFeedback.sharded_mean, []

    def recorded(feedback: ErrorFeedback, *args: Any) -> Tensor:
        magnitudes.append(float(feedback.residual.abs().max()))
        mean = sharded_mean(feedback, *args)
        tensors = (feedback.residual, feedback.server_residual, mean)
        magnitudes.extend(float(x.abs().max()) for x in tensors if len(x))
        return mean

    patch.setattr(ErrorFeedback, "sharded_mean", recorded)
    return magnitudes


def add_up_all(rank: int, forms: Sequence[str]) -> list[Sums]:
    return [add_up(rank, form, may_be_unused) for form, may_be_unused in itertools.product(forms, (False, True))]


@pytest.mark.parametrize(
    ("replicas", "forms"),
    [
        (3, ["few, clipped, with learning rates"]),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, ["few", "bf16"]), (3, ["few bits"]))),
    ],
)
def test_applied_gradients_and_residuals_add_up_to_all_gradients(
    replicas: int, forms: Sequence[str], tmp_path: Path
) -> None:
    """In the mean over the replicas.

    M = largest magnitude of anything. A step rounds a replica's residual twice, to no more than M, and a server's sum
    of R messages, each up to 2 M, R - 1 times, which the mean divides by R; then the mean, its sum with the residual,
    and the new residual: 2 + 2 (R - 1) + 2 + 3 + 1 times u M. The residual of an unused parameter is rounded twice
    more, to 2 M. A factor that clips is rounded a few times.
    """
    by_rank = on_plain_ranks(replicas, add_up_all, tmp_path / "store", forms)
    for case, sums in zip(itertools.product(forms, (False, True)), zip(*by_rank, strict=True), strict=True):
        bound = STEPS * (2 * replicas + 16) * U * max(each.largest for each in sums) * 1.01
        for name, applied in sums[0].applied.items():
            assert all(torch.equal(applied, each.applied[name]) for each in sums), (case, name)
            residual = torch.stack([each.residual[name].double() for each in sums]).mean(0)
            server = torch.stack([each.server_residual[name].double() for each in sums]).sum(0)
            made = torch.stack([each.made[name] for each in sums]).mean(0)
            assert (applied + residual + server - made).abs().max() <= bound, (case, name)
            assert bound < 1e-3 * made.abs().max(), "the bound is too wide to show anything"
            assert (residual.any() and server.any()) or len(residual) == 1, (case, name)
        may_be_unused = case[1]
        first, later = sums[0].buckets[0], sums[0].buckets[-len(sums[0].buckets[0]) :]
        assert sums[0].dropped == (3 * 2 if may_be_unused else 0), case
        assert len(sums[0].buckets) > 2 * STEPS, case
        if not may_be_unused:  # DDP has rebuilt its buckets
            assert len(first) == 9, case
            assert first not in later, case


TRAINED = 9
"""Number of steps of the runs that are compared with plain DDP and AdamW."""


def train(rank: int, forms: Sequence[str], same: bool) -> list[dict[str, Tensor]]:
    """Return the weights after training with each form; "" = plain DDP. same: whether replicas have equal data."""
    weights = []
    for form in forms:
        run = Run(form or "all")
        if not form:
            run.model = DistributedDataParallel(net(), bucket_cap_mb=SMALL_MB)
            run.optimizer = torch.optim.SGD(run.model.parameters(), lr=LR, weight_decay=0.1)
        for step in range(TRAINED):
            run.step(0 if same else rank, step)
        weights.append(run.weights())
    return weights


FORMS = ["", "all", "nearly all", "few"]


def train_all(rank: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return the weights of FORMS, with other data on each replica, and of preconditioned forms, with equal data."""
    return train(rank, FORMS, False), train(rank, ["preconditioned, all", "preconditioned"], True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_plain_ranks(2, train_all, tmp_path_factory.mktemp("train") / "store")


def test_the_hook_returns_the_mean_gradient(trained: list[Any]) -> None:
    """In fp32 the mean of 2 replicas is DDP's to the bit: halves are exact. 8 bits leave a hundredth at both ends."""
    ranks = [of_forms for of_forms, _ in trained]
    plain, everything, nearly, few = ranks[0]
    start = dict(net().named_parameters())
    for mine, other in zip(*ranks, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine), "replicas have the same weights"
    for name in plain:
        assert torch.equal(everything[name], plain[name]), name
    moved, missed, missed_by_few = (distance(each, plain) for each in (start, nearly, few))
    assert missed <= 2 * 0.01 * moved
    assert 0.01 * moved < missed_by_few < 0.5 * moved


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return float(torch.cat([(one[name] - other[name]).detach().flatten() for name in one]).norm())


def test_preconditioned_gradients_are_the_updates_of_adamw(trained: list[Any]) -> None:
    """Of AdamW without first moment, on the same data; each of 9 steps may round a weight's update a few times."""
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.0, 0.999), eps=1e-8, weight_decay=0.1)
    for step in range(TRAINED):
        optimizer.zero_grad()
        module(batch(0, step)).backward()
        optimizer.step()
    hooked, few = trained[0][1]
    expected = dict(module.named_parameters())
    for name, param in expected.items():
        torch.testing.assert_close(hooked[name], param.detach(), rtol=1e-4, atol=1e-4 * LR)
    assert 0 < distance(few, expected) < 0.7 * distance(expected, dict(net().named_parameters()))


MEASURED = 65
"""A step after which second moments are measured, for the fifth time."""


def second_moments_of_both(rank: int) -> list[list[dict[str, Tensor]]]:
    return [second_moments(rank, may_be_unused) for may_be_unused in (False, True)]


def second_moments(rank: int, may_be_unused: bool) -> list[dict[str, Tensor]]:
    """Return those of a corrected and an uncorrected hook, and of the mean gradients; the weights do not change."""
    runs = [Run(form, find_unused_parameters=may_be_unused, bucket_cap_mb=25) for form in ("corrected", "uncorrected")]
    alone, decay = net(), 0.97
    expected = {name: torch.zeros_like(param) for name, param in alone.named_parameters()}
    for step in range(MEASURED):
        # branch 0 is unused in every sixth step, which changes none of its state; in others replica 0 alone uses it
        used = [0, 1] if not may_be_unused or (step % 6 != 1 and not rank) else [1]
        for run in runs:
            run.model.zero_grad()
            run.model(batch(rank, step), used).backward()
        alone.zero_grad()
        alone(batch(rank, step), used).backward()
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in alone.parameters()])
        dist.all_reduce(flat)
        sizes = [param.numel() for param in alone.parameters()]
        for (name, param), total in zip(alone.named_parameters(), flat.split(sizes), strict=True):
            mean = total.view_as(param)
            if mean.any():
                expected[name].lerp_((mean / dist.get_world_size()).square(), 1 - decay)
    return [*(of_kind(run.state.state_dict(), "second_moment") for run in runs), expected]


def test_corrected_second_moments_are_those_of_the_mean_gradient(tmp_path: Path) -> None:
    """Messages are exact to 19 % in each direction; row means are equal on all replicas. Without correction second
    moments are those of each replica's own gradients."""
    for ranks in zip(*on_plain_ranks(3, second_moments_of_both, tmp_path / "store"), strict=True):
        corrected, uncorrected, expected = ranks[0]
        for name in expected:
            assert abs((corrected[name].mean() / expected[name].mean()).log2()) <= 0.5, name
            assert expected[name].dim() == 1 or (uncorrected[name].mean() / expected[name].mean()).log2() > 0.5, name
            for other, _, _ in ranks[1:]:
                torch.testing.assert_close(
                    by_rows(other[name]).mean(1), by_rows(corrected[name]).mean(1), rtol=1e-5, atol=0
                )


def train_images(rank: int, last: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of a model of images and what its hook keeps; last: its channels are, in memory."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(32, 4))
    module.register_parameter("empty", torch.nn.Parameter(torch.zeros(4, 0)))
    module.register_forward_hook(lambda module, _, out: out + module.empty.sum())
    run = Run("corrected", module.to(memory_format=torch.channels_last) if last else module)
    for step in range(9):
        run.optimizer.zero_grad()
        image = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        run.model(image).square().mean().backward()
        run.optimizer.step()
    return run.weights(), dict(run.state.state_dict())


RESUMED = ("few", "preconditioned", "few, clipped, with learning rates")


def check_many(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "images": [train_images(rank, last) for last in (False, True)],
        "resumed": [train_and_resume(rank, form, folder) for form in RESUMED],
        "two models": train_two(rank),
        "transports": [trained_over(each, rank) for each in ("auto", register_ordered_transport(rank))],
    }


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of `check_many` of 2 replicas."""
    folder = tmp_path_factory.mktemp("check")
    return on_plain_ranks(2, check_many, folder / "store", folder)


def test_any_memory_layout_and_parameters_without_elements(checked: list[dict[str, Any]]) -> None:
    """Replicas have the same weights, and equal row means of second moments after a measurement."""
    for (weights, mine), (others, theirs) in zip(*(each["images"] for each in checked), strict=True):
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        second, other = (of_kind(saved, "second_moment") for saved in (mine, theirs))
        assert not torch.equal(second["0.weight"], other["0.weight"])
        for name in ("0.weight", "2.weight"):
            torch.testing.assert_close(by_rows(second[name]).mean(1), by_rows(other[name]).mean(1), rtol=1e-5, atol=0)


def train_and_resume(rank: int, form: str, folder: Path) -> tuple[bool, bool, bool]:
    """Return whether a stopped run ends as an uninterrupted one, whether DDP's buckets differed, and whether buffers of
    another size restore the same residuals in total."""
    whole = Run(form)
    for step in range(STEPS):
        whole.step(rank, step)
    module = copy.deepcopy(whole.model.module)
    save_file(whole.state.state_dict(), folder / f"hook-{rank}.safetensors")
    saved = load_file(folder / f"hook-{rank}.safetensors")
    half, other = Run(form, module), Run(form, copy.deepcopy(module), bucket_cap_mb=25)
    half.state.load_state_dict(saved)
    other.state.load_state_dict(saved)
    before = len(whole.buckets)
    for run in (whole, half):
        for step in range(STEPS, 2 * STEPS):
            run.step(rank, step)
    ends = [whole.weights(), half.weights()]
    same = all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    totals = [total_residual(each) for each in (saved, other.state.state_dict())]
    conserved = all(torch.allclose(totals[0][name], totals[1][name], rtol=0, atol=1e-6) for name in totals[0])
    has_residual = any(x.any() for x in totals[0].values())
    return same, len(whole.buckets) - before > len(half.buckets), conserved and has_residual


def of_kind(saved: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the saved tensors of one kind, by parameter."""
    return {key.partition("/")[2]: tensor for key, tensor in saved.items() if key.startswith(f"{kind}/")}


def total_residual(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the residuals of all replicas in the mean, with those of the servers, by parameter."""
    residual, server = (of_kind(saved, kind) for kind in ("residual", "server_residual"))
    total = {name: residual[name] / dist.get_world_size() + server[name] for name in residual}
    for tensor in total.values():
        dist.all_reduce(tensor)
    return total


def test_a_resumed_run_equals_an_uninterrupted_one(checked: list[dict[str, Any]]) -> None:
    assert [each["resumed"] for each in checked] == [[(True, True, True)] * len(RESUMED)] * 2


def train_two(rank: int) -> bool:
    """Whether two models that are trained together end as each alone."""
    alone, both = [Run("few"), Run("bf16")], [Run("few"), Run("bf16")]
    for step in range(STEPS):
        for run in alone:
            run.step(rank, step)
        for run in both:
            run.optimizer.zero_grad()
        torch.stack([run.model(batch(rank, step)) for run in both]).sum().backward()
        for run in both:
            run.optimizer.step()
    return all(distance(*(run.weights() for run in pair)) == 0 for pair in zip(alone, both, strict=True))


def test_messages_of_two_models_do_not_mix(checked: list[dict[str, Any]]) -> None:
    assert all(each["two models"] for each in checked)


def trained_over(transport: str, rank: int) -> tuple[list[Any], int]:
    """Return the weights, the state and the sent bytes of two models that are trained together over a transport, and
    the size of the longest message over gloo."""
    runs = [Run(form, transport=transport, find_unused_parameters=True) for form in ("few", "corrected")]
    with pytest.MonkeyPatch.context() as patch:
        over_gloo = count_sent(patch)
        for step in range(STEPS):
            for run in runs:
                run.optimizer.zero_grad()
            used = [1] if rank and step % 2 else [0, 1]
            torch.stack([run.model(batch(rank, step), used) for run in runs]).sum().backward()
            for run in runs:
                run.optimizer.step()
    return [(run.weights(), run.state.state_dict(), run.state.meter.sent_bytes) for run in runs], max(over_gloo)


def test_an_ordered_transport_trains_as_gloo(checked: list[dict[str, Any]]) -> None:
    """Bit for bit, and with as many bytes, of which only headers travel over gloo."""
    for each in checked:
        (over_gloo, longest), (over_ordered, longest_header) = each["transports"]
        for (weights, saved, sent), (others, theirs, sent_by_others) in zip(over_gloo, over_ordered, strict=True):
            assert all(torch.equal(weights[name], x) for name, x in others.items())
            assert all(torch.equal(saved[name], x) for name, x in theirs.items())
            assert sent == sent_by_others > 0
        assert longest > longest_header == 16
