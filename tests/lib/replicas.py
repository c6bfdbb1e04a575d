"""Replicas that train a few weights without a model: their gradients and their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.groups import connect
from acsgd.optim.base import SecondMoments
from acsgd.shards.weights import Weight, WeightState
from acsgd.topology import Topology
from lib.patience import NO_LIMIT_S
from lib.ranks import on_ranks

SHAPES = [(7,), (3, 5), (1,), (64, 9), (2, 2, 2)]
TIMEOUT = timedelta(seconds=NO_LIMIT_S)
LR = 0.1
STEPS = 7
LOCAL_SPECS = [
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
"""Specs of every mode with local steps."""


def make_weights() -> list[Weight]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    return [Weight(f"w{i}", param, param) for i, param in enumerate(params)]


def gradient(rank: int, step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(SHAPES[index], generator=generator)


def gradients(rank: int, step: int) -> list[Tensor]:
    return [gradient(rank, step, index) for index in range(len(SHAPES))]


def copied(state: WeightState) -> WeightState:
    return {name: {key: tensor.detach().clone() for key, tensor in by_key.items()} for name, by_key in state.items()}


def make_step(
    sync: GradSync,
    weights: Sequence[Weight],
    step: int,
    grads: Sequence[Tensor],
    *,
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Make a step of plain gradient descent as the training loop does."""
    sync.begin_step(step)
    for weight, grad in zip(weights, grads, strict=True):
        weight.master.grad = grad.clone()
        sync.grad_ready(weight, is_final=True)
    sync.reduce()
    sync.wait()
    before_commit()
    sync.commit()
    with torch.no_grad():
        for weight in weights:
            assert weight.master.grad is not None
            scale = 1.0 if sync.local_step(step) else 1.0 / dist.get_world_size()
            weight.master.sub_(LR * scale * weight.master.grad)
    moments = SecondMoments({}, 0.999)
    sync.exchange(step, moments)
    sync.after_step(step, moments)


class LocalRun:
    """Training of one replica in a mode with local steps."""

    def __init__(self, spec: str, peers: Peers) -> None:
        self.weights = make_weights()
        self.sync: GradSync = from_spec(spec, MODES, key="dp.mode").open(self.weights, peers)

    def train(self, rank: int, steps: range) -> None:
        for step in steps:
            make_step(self.sync, self.weights, step, gradients(rank, step))

    def model(self) -> dict[str, Tensor]:
        """Return a copy of the global weights."""
        global_weights = self.sync.global_weights()
        assert global_weights is not None
        return {key: tensor.detach().clone() for key, tensor in global_weights.items()}

    def restore(self, model: dict[str, Tensor], saved: Sequence[WeightState]) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.master.copy_(model[weight.key])
        self.sync.load_state_dict(saved)


def on_replicas(world_size: int, body: Any, store: Path, *args: Any, connections: int = 1) -> list[Any]:
    """Return body(rank, peers, *args) of each replica, each in a process of its own."""
    return on_ranks(world_size, partial(_connected, body, connections), store, *args)


def _connected(body: Any, connections: int, rank: int, world_size: int, store: Path, *args: Any) -> Any:
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    topology = Topology.of(rank, world_size, 1)
    with connect(topology, timeout=TIMEOUT, store=file_store, connections=connections) as groups:
        result = body(rank, Peers(groups.dp, groups.waits), *args)
        dist.barrier()  # a rank that leaves early would disturb the others' connections
        return result


def count_sent(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the bytes of each message of this process are appended."""
    sent: list[int] = []
    isend, all_reduce = dist.isend, dist.all_reduce

    def counted_isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **options)

    def counted_all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        ranks = dist.get_world_size()
        sent.append(2 * (ranks - 1) * tensor.nbytes // ranks)
        return all_reduce(tensor, *args, **options)

    patch.setattr(dist, "isend", counted_isend)
    patch.setattr(dist, "all_reduce", counted_all_reduce)
    return sent
