"""Laws of the data-parallel modes in which every replica makes steps of its own and weights are exchanged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks, told_to_all
from test_dp import TIMEOUT, count_sent, gradient, make_weights
from torch import Tensor

from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.errors import RunError
from acsgd.optim.base import SecondMoments
from acsgd.shards.weights import Weight, WeightState
from acsgd.topology import Topology, connect

LR = 0.1
STEPS = 7
SPECS = [
    "local",
    "cocktail",
    "cocktail:random=0.4,topk=0.3,bits=2,group=16,sampling=shuffled,outer_lr=2,exact_steps=2",
    "cocktail:random=1,topk=1,bits=8,sampling=random",
    "diloco:inner=3",
    "diloco:inner=4,fragments=2,delay=1,mix=0.5,bits=4,moment_correction=true",
    "sparseloco:inner=2,chunk=16,topk=0.25,moment_correction=true",
    "sparseloco:inner=1,chunk=0,topk=0.1,bits=1,outer_lr=0.5",
    "cocktail_grad:topk=0.1",
    "cocktail_grad:topk=0.3,bits=2,group=16,exact_steps=2",
    "quantized:exact_steps=2",
    "quantized:exact_steps=1,bits=1,group=32",
]
LOSSLESS = {
    "cocktail:random=1,topk=1,bits=8": 1,
    "diloco:inner=1,outer_lr=1,momentum=0": 0,
    "sparseloco:inner=1,topk=1,chunk=0,bits=8,outer_lr=1": 0,
    "cocktail_grad:topk=1,bits=8": 0,
    "quantized:exact_steps=1,bits=8": 0,
}
"""What agrees on nearly all of every change, and so many steps later."""


def make_step(
    sync: GradSync,
    weights: Sequence[Weight],
    step: int,
    grads: Sequence[Tensor],
) -> None:
    """Make a step of plain gradient descent, as a worker makes it."""
    sync.begin_step(step)
    for weight, grad in zip(weights, grads, strict=True):
        weight.master.grad = grad.clone()
        sync.grad_ready(weight, is_final=True)
    sync.reduce()
    sync.wait()
    with torch.no_grad():
        for weight in weights:
            assert weight.master.grad is not None
            scale = 1.0 if sync.local_step(step) else 1.0 / dist.get_world_size()
            weight.master.sub_(LR * scale * weight.master.grad)
    sync.after_step(step, SecondMoments({}, 0.999))


def gradients(rank: int, step: int) -> list[Tensor]:
    return [gradient(rank, step, index) for index in range(len(make_weights()))]


def copied(state: WeightState) -> WeightState:
    return {name: {key: tensor.detach().clone() for key, tensor in by_key.items()} for name, by_key in state.items()}


class Run:
    """A replica's training under way."""

    def __init__(self, spec: str, peers: Peers) -> None:
        self.weights = make_weights()
        self.sync = from_spec(spec, MODES, key="dp.mode").open(self.weights, peers)

    def go(self, rank: int, steps: range) -> None:
        for step in steps:
            make_step(self.sync, self.weights, step, gradients(rank, step))

    def model(self) -> dict[str, Tensor]:
        shared = self.sync.global_weights()
        assert shared is not None
        return {key: tensor.detach().clone() for key, tensor in shared.items()}

    def restore(self, model: dict[str, Tensor], saved: Sequence[WeightState]) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.master.copy_(model[weight.key])
        self.sync.load_state_dict(saved)


def on_replicas(world_size: int, body: Any, store: Path, *args: Any) -> list[Any]:
    return on_ranks(world_size, partial(_connected, body), store, *args)


def _connected(body: Any, rank: int, world_size: int, store: Path, *args: Any) -> Any:
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology(rank, world_size, 1), timeout=TIMEOUT, store=file_store) as groups:
        result = body(rank, Peers(groups.dp), *args)
        dist.barrier()  # a rank that leaves while another still connects would end that one
        return result


def train(rank: int, peers: Peers, spec: str) -> list[dict[str, Tensor]]:
    """Return the model after each step."""
    run, models = Run(spec, peers), []
    for step in range(STEPS):
        run.go(rank, range(step, step + 1))
        models.append(run.model())
    return models


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_shared_is_equal_on_all_replicas_and_moves(spec: str, world_size: int, tmp_path: Path) -> None:
    first, *others = on_replicas(world_size, train, tmp_path / "store", spec)
    assert any(tensor.any() for tensor in first[-1].values())
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def train_alike(rank: int, peers: Peers, spec: str) -> list[dict[str, Tensor]]:
    return train(0, peers, spec)


@pytest.mark.parametrize(("spec", "late"), LOSSLESS.items())
def test_with_identical_data_the_model_is_that_of_one_process(spec: str, late: int, tmp_path: Path) -> None:
    """The mean of the changes, not their sum. 8 bits leave less than a hundredth of the norm of what is exchanged.

    That stays owed, at both ends, beside the next change.
    """
    models = on_replicas(2, train_alike, tmp_path / "store", spec)[0]
    expected = [torch.zeros_like(weight.master) for weight in make_weights()]
    largest = 0.0
    for step in range(STEPS - late):
        change = [LR * grad for grad in gradients(0, step)]
        largest = max(largest, norm(change))
        expected = [value - each for value, each in zip(expected, change, strict=True)]
        model = [models[step + late][weight.key] for weight in make_weights()]
        missing = [ours - value for ours, value in zip(model, expected, strict=True)]
        assert norm(missing) <= 2 * 0.01 * 1.02 * largest


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def train_and_resume(rank: int, peers: Peers, spec: str, at: int) -> bool:
    """Whether a run that was stopped after `at` steps ends as one that was not."""
    whole = Run(spec, peers)
    whole.go(rank, range(at))
    model, state = whole.model(), copied(whole.sync.state_dict())
    states = told_to_all(state, peers.group)
    whole.go(rank, range(at, STEPS))
    half = Run(spec, peers)
    half.restore(model, states)
    half.go(rank, range(at, STEPS))
    ends = [{**run.model(), **{f"own {w.key}": w.master.detach() for w in run.weights}} for run in (whole, half)]
    return all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize(("spec", "at"), list(itertools.product(SPECS, [1, 4])))
def test_a_resumed_run_is_the_undisturbed_one(spec: str, at: int, tmp_path: Path) -> None:
    assert on_replicas(2, train_and_resume, tmp_path / "store", spec, at) == [True, True]


def count(rank: int, peers: Peers, spec: str) -> tuple[int, int]:
    """Return the bytes of a run that the mode counts, and those that torch.distributed was given."""
    with pytest.MonkeyPatch.context() as patch:
        sent = count_sent(patch)
        run = Run(spec, peers)
        run.go(rank, range(STEPS))
        return run.sync.meter.sent_bytes, sum(sent)


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_sent_is_counted(spec: str, tmp_path: Path) -> None:
    for counted, sent in on_replicas(3, count, tmp_path / "store", spec):
        assert counted == sent
        assert (sent == 0) == (spec == "local")


def lose(rank: int, world_size: int, store: Path, spec: str) -> tuple[int, ...] | None:
    """Train until replica 1 dies before its fourth step; return whom the others say they waited for."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology(rank, world_size, 1), timeout=TIMEOUT, store=file_store) as groups:
        run = Run(spec, Peers(groups.dp))
        run.go(rank, range(3))
        dist.barrier()
        if rank == 1:
            return None  # its connections close
        with pytest.raises(RunError, match="exchanging updates with replica 1, rank 1") as failed:
            run.go(rank, range(3, STEPS))
        return failed.value.awaited


@pytest.mark.parametrize("spec", ["cocktail", "diloco:inner=4", "sparseloco:inner=4"])
def test_a_replica_that_is_gone_is_named(spec: str, tmp_path: Path) -> None:
    assert on_ranks(2, lose, tmp_path / "store", spec) == [(1,), None]


def change_mode(rank: int, peers: Peers, before: str, after: str) -> str:
    """Train in one mode and go on in another; return why that cannot be, or ""."""
    run = Run(before, peers)
    run.go(rank, range(4))
    states = told_to_all(copied(run.sync.state_dict()), peers.group)
    other = Run(after, peers)
    try:
        other.restore(run.model(), states)
    except RunError as error:
        return str(error)
    other.go(rank, range(4, STEPS))
    return ""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("local", "cocktail", ""),
        ("local", "sparseloco:inner=2", ""),
        ("local", "diloco:inner=2", ""),
        ("cocktail", "diloco:inner=2", "the checkpoint holds ['server_residual'] of another data-parallel mode"),
        ("diloco:inner=2", "local", "the checkpoint holds ['outer_momentum'] of another data-parallel mode"),
        (
            "cocktail",
            "allreduce",
            "the checkpoint holds ['local_weights', 'second_moment_means', 'second_moment_ratios', 'server_residual'] "
            "of another data-parallel mode",
        ),
    ],
)
def test_another_mode_goes_on_where_nothing_is_lost(before: str, after: str, said: str, tmp_path: Path) -> None:
    for each in on_replicas(2, change_mode, tmp_path / "store", before, after):
        assert each.startswith(said)
        assert bool(each) == bool(said)
