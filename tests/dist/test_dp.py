"""Laws of every data-parallel mode in the table, and of what is agreed across stages."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

from acsgd.dp import MODES
from acsgd.dp.base import make_buckets
from acsgd.dp.clip import clip_factor, scale_gradients_, squared_norm
from acsgd.dp.gather import Gather
from acsgd.dp.peers import Peers
from acsgd.registry import from_spec
from acsgd.shards.base import Weight
from acsgd.topology import Topology, connect

SHAPES = [(7,), (3, 5), (1,), (64, 9), (2, 2, 2)]
SPECS = ["allreduce", "allreduce:bucket_mb=0.0001"]
TIMEOUT = timedelta(seconds=60)


def make_weights() -> list[Weight]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    return [Weight(f"w{i}", param, param) for i, param in enumerate(params)]


def gradient(rank: int, step: int, index: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(SHAPES[index], generator=draw)


def agree(rank: int, world_size: int, store: Path, spec: str) -> None:
    """Accumulate two micro-batches' gradients as a stage does; weight 2 takes no part, weights come in any order."""
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology(rank, world_size, 1), timeout=TIMEOUT, store=file_store) as groups:
        weights = make_weights()
        sync = from_spec(spec, MODES, key="dp.mode").open(weights, Peers(groups.dp))
        for step in range(3):
            sync.begin(step)
            for last in (False, True):
                for index in (3, 0, 4, 1):
                    master = weights[index].master
                    half = gradient(rank, step, index) / 2
                    master.grad = half if master.grad is None else master.grad.add_(half)
                    sync.grad_made(weights[index], complete=last)
            sync.reduce()
            sync.wait()
            for index, weight in enumerate(weights):
                grad = weight.master.grad
                if index == 2:
                    assert grad is None or not grad.any()
                else:
                    expected = sum(gradient(r, step, index).double() for r in range(world_size))
                    # one rounding per addition, of sums no larger than that of the magnitudes
                    bound = sum(gradient(r, step, index).double().abs() for r in range(world_size))
                    assert grad is not None
                    assert ((grad.double() - expected).abs() <= (world_size + 2) * 2.0**-24 * bound).all()
            sync.after_step(step)
        restored = from_spec(spec, MODES, key="dp.mode").open(make_weights(), Peers(groups.dp))
        restored.load_state_dict(sync.state_dict())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_replicas_get_the_sum_of_their_gradients(spec: str, world_size: int, tmp_path: Path) -> None:
    on_ranks(world_size, agree, tmp_path / "store", spec)


def test_buckets_hold_every_gradient_once_last_layer_first() -> None:
    weights = make_weights()
    for nbytes in (1, 100, 10**9):
        buckets = make_buckets(weights, nbytes)
        assert [w.key for bucket in buckets for w in bucket.weights] == [w.key for w in reversed(weights)]
        for bucket in buckets:
            bucket.begin()
            for weight in bucket.weights:
                weight.master.grad = torch.ones_like(weight.master)
                bucket.adopt(weight)
                weight.master.grad += 1.0
                bucket.adopt(weight)
            assert torch.equal(bucket.flat, torch.full_like(bucket.flat, 2.0))
            bucket.begin()
            for weight in bucket.weights:
                bucket.adopt(weight)
            assert not bucket.flat.any()


def clip(rank: int, world_size: int, store: Path) -> tuple[float, float]:
    """Clip the gradients of stages 0 and 1 to norm 1; rank 1 also holds a copy of a weight of rank 0."""
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology(rank, world_size, world_size), timeout=TIMEOUT, store=file_store) as groups:
        weights = make_weights()
        if rank == 1:
            weights[1] = Weight("copy", weights[1].param, weights[1].master, copy_of="w1")
        for index, weight in enumerate(weights):
            weight.master.grad = gradient(0 if index == 1 else rank, 0, index)
        norm = float(Gather(1, groups.world).rows(squared_norm(weights)).sum()) ** 0.5
        scale_gradients_(weights, clip_factor(norm, 1.0))
        return norm, float(squared_norm(weights))


def test_the_norm_is_global_and_counts_a_tied_weight_once(tmp_path: Path) -> None:
    everything = [gradient(rank, 0, index) for rank in (0, 1) for index in range(5) if (rank, index) != (1, 1)]
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in everything]
    for param, grad in zip(params, everything, strict=True):
        param.grad = grad
    expected = float(nn.utils.clip_grad_norm_(params, 1.0))
    results = on_ranks(2, clip, tmp_path / "store")
    assert results[0][0] == results[1][0] == pytest.approx(expected, rel=1e-6)
    assert sum(squared for _, squared in results) == pytest.approx(1.0, rel=1e-5)
    assert clip_factor(0.5, 1.0) == clip_factor(1e9, float("inf")) == 1.0
