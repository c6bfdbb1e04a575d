"""Laws of every data-parallel mode in the table, and of what is agreed across stages."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.ranks import PRELOAD, on_ranks
from torch import Tensor, nn

from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.buckets import make_buckets
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.sync import GradSync
from acsgd.errors import RunError
from acsgd.optim.base import SecondMoments
from acsgd.optim.clipping import clip_factor, scale_gradients_, squared_norm
from acsgd.run.control import Gather
from acsgd.shards.weights import Weight
from acsgd.topology import Topology, connect

SHAPES = [(7,), (3, 5), (1,), (64, 9), (2, 2, 2)]
MADE = (3, 0, 4, 1)
"""Weights in the order in which their gradients are made; weight 2 takes no part."""
SMALL = "bucket_mb=1e-6"
"""A bucket for each weight, so that one of them is shorter than there are replicas."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Of one number, relative."""
SERVED = ["sharded_ps", "central_ps"]
EXACT = {
    f"{mode}:dtype={dtype}{more}": dtype
    for mode, dtype, more in itertools.product(["allreduce", *SERVED], DTYPES, ["", f",{SMALL}"])
}
"""Modes whose gradients are the sum, with what travels."""
SPECS = ["allreduce", *EXACT, "powersgd", "powersgd:rank=1,exact_steps=1", f"powersgd:rank=2,warm_start=false,{SMALL}"]
"""Every mode that agrees on gradients, so that all replicas make the same step."""
TIMEOUT = timedelta(seconds=60)
STEPS = 3


def make_weights() -> list[Weight]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    return [Weight(f"w{i}", param, param) for i, param in enumerate(params)]


def gradient(rank: int, step: int, index: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(SHAPES[index], generator=draw)


class Agreed(NamedTuple):
    """What a replica has of one step."""

    grads: list[Tensor]
    """By weight."""
    metered: int
    """Bytes sent, as the meter says."""
    sent: int
    """As torch.distributed was told; of a ring all-reduce, what its algorithm sends."""
    messages: int


def agree(rank: int, world_size: int, store: Path, specs: Sequence[str], size: float = 1.0) -> list[list[Agreed]]:
    """Accumulate two micro-batches' gradients as a stage does, in some steps of each mode. size: of a gradient."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology(rank, world_size, 1), timeout=TIMEOUT, store=file_store) as groups:
        peers = Peers(groups.dp)
        agreed = []
        for spec in specs:
            weights = make_weights()
            sync = from_spec(spec, MODES, key="dp.mode").open(weights, peers)
            agreed.append([_make_step(sync, weights, rank, step, size) for step in range(STEPS)])
            restored = from_spec(spec, MODES, key="dp.mode").open(make_weights(), peers)
            restored.load_state_dict([sync.state_dict()] * world_size)
        dist.barrier()  # a rank that leaves while another still connects would end that one
        return agreed


def _make_step(sync: GradSync, weights: Sequence[Weight], rank: int, step: int, size: float) -> Agreed:
    sync.meter.reset()
    with pytest.MonkeyPatch.context() as patch:
        sent = count_sent(patch)
        sync.begin_step(step)
        for last in (False, True):
            for index in MADE:
                master = weights[index].master
                half = gradient(rank, step, index) * size / 2
                master.grad = half if master.grad is None else master.grad.add_(half)
                sync.grad_ready(weights[index], is_final=last)
        sync.reduce()
        sync.wait()
    masters = [weight.master for weight in weights]
    grads = [torch.zeros_like(m) if m.grad is None else m.grad.clone() for m in masters]
    sync.after_step(step, SecondMoments({}, 0.999))
    return Agreed(grads, sync.meter.sent_bytes, sum(sent), len(sent))


def count_sent(patch: pytest.MonkeyPatch) -> list[int]:
    """Have the bytes of each message that leaves this process added to the list that is returned."""
    sent: list[int] = []
    isend, all_reduce = dist.isend, dist.all_reduce

    def noted_isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **options)

    def noted_all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        ranks = dist.get_world_size()
        sent.append(2 * (ranks - 1) * tensor.nbytes // ranks)
        return all_reduce(tensor, *args, **options)

    patch.setattr(dist, "isend", noted_isend)
    patch.setattr(dist, "all_reduce", noted_all_reduce)
    return sent


def travelling(spec: str, rank: int, replicas: int, step: int) -> float:
    """Return how many numbers a replica sends in a step, as the mode's docstring says."""
    mode, rows_and_columns = from_spec(spec, MODES, key="k"), [(s[0], math.prod(s[1:])) for s in SHAPES]
    numbers = [rows * columns for rows, columns in rows_and_columns]
    if isinstance(mode, PowerSGD) and step >= mode.exact_steps:
        numbers = [min(rows * columns, mode.rank * (rows + columns)) for rows, columns in rows_and_columns]
    if replicas > 1 and spec.startswith("central_ps"):
        return (replicas - 1 if rank == 0 else 1) * sum(numbers)
    return 2 * (replicas - 1) / replicas * sum(numbers)


def test_every_mode_is_tested() -> None:
    import test_own_weights

    assert {spec.partition(":")[0] for spec in [*SPECS, *test_own_weights.SPECS]} == MODES.keys()


@pytest.fixture(scope="module", params=[1, 2, 3])
def by_replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of some replicas has of the steps of each mode."""
    store = tmp_path_factory.mktemp("agree") / "store"
    return [dict(zip(SPECS, made, strict=True)) for made in on_ranks(request.param, agree, store, SPECS)]


@pytest.mark.parametrize("spec", SPECS)
def test_replicas_get_the_same_gradients_bit_for_bit(spec: str, by_replica: list[dict[str, Any]]) -> None:
    for replica in by_replica:
        for ours, first in zip(replica[spec], by_replica[0][spec], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(ours.grads, first.grads, strict=True))
            assert all(ours.grads[index].any() for index in MADE)
            assert not ours.grads[2].any()


@pytest.mark.parametrize("spec", ["allreduce", *EXACT])
def test_replicas_get_the_sum_of_their_gradients(spec: str, by_replica: list[dict[str, Any]]) -> None:
    """One rounding per addition, of sums no larger than that of the magnitudes, one on the way there, one back.

    fp16 rounds what is small by up to 2**-25, and its result is multiplied by the number of replicas.
    """
    replicas, dtype = len(by_replica), EXACT.get(spec, "fp32") if len(by_replica) > 1 else "fp32"
    least = replicas * 2.0**-25 if dtype == "fp16" else 0.0
    are_rounded = False
    for step, agreed in enumerate(by_replica[0][spec]):
        for index in MADE:
            given = [gradient(replica, step, index).double() for replica in range(replicas)]
            wrong = (agreed.grads[index].double() - torch.stack(given).sum(0)).abs()
            magnitude = torch.stack(given).abs().sum(0)
            assert (wrong <= (replicas + 2) * (ROUNDING[dtype] * magnitude + least)).all()
            are_rounded |= bool((wrong > (replicas + 2) * ROUNDING["fp32"] * magnitude).any())
    assert are_rounded == (dtype != "fp32"), "what travels is not of this dtype"


@pytest.mark.parametrize(("dtype", "more"), list(itertools.product(DTYPES, ["", f",{SMALL}"])))
def test_how_many_serve_changes_no_bit(dtype: str, more: str, by_replica: list[dict[str, Any]]) -> None:
    sharded, central = (by_replica[0][f"{mode}:dtype={dtype}{more}"] for mode in SERVED)
    for one, other in zip(sharded, central, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.grads, other.grads, strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_sent_is_counted_and_is_what_the_mode_says(spec: str, by_replica: list[dict[str, Any]]) -> None:
    """Each message may have a header of 16 bytes and up to 16 more, for its parts are cut at whole elements."""
    itemsize = DTYPES[EXACT.get(spec, "fp32")].itemsize
    for rank, replica in enumerate(by_replica):
        for step, agreed in enumerate(replica[spec]):
            expected = itemsize * travelling(spec, rank, len(by_replica), step)
            assert agreed.metered == agreed.sent
            assert abs(agreed.sent - expected) <= 32 * agreed.messages


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_sum_overflows_fp16_no_sooner_than_a_gradient(replicas: int, tmp_path: Path) -> None:
    specs = [spec for spec, dtype in EXACT.items() if dtype == "fp16"]
    given = [[[gradient(r, s, i) for r in range(replicas)] for i in MADE] for s in range(STEPS)]
    grads = [grad for of_step in given for of_weight in of_step for grad in of_weight]
    largest = max(float(grad.abs().max()) for grad in grads)
    largest_sum = max(float(torch.stack(w).sum(0).abs().max()) for of_step in given for w in of_step)
    limit = torch.finfo(torch.float16).max
    assert largest_sum > 1.1 * largest
    for size, overflows in ((0.95 * limit / largest, False), (1.05 * limit * replicas / largest_sum, True)):
        for of_spec in on_ranks(replicas, agree, tmp_path / f"store-{size}", specs, size)[0]:
            sums = torch.cat([grad.flatten().abs() for agreed in of_spec for grad in agreed.grads])
            assert not (sums <= limit).all()
            assert bool(sums.isfinite().all()) != overflows


def lose(rank: int, world_size: int, store: Path, spec: str, victim: int, how: str) -> None:
    """Make a step in which one replica dies, or falls silent, after its first bucket; note what the others say."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    seconds = 60 if how == "dies" else 3
    with connect(Topology(rank, world_size, 1), timeout=timedelta(seconds=seconds), store=file_store) as groups:
        peers, weights = Peers(groups.dp), make_weights()
        sync = from_spec(spec, MODES, key="dp.mode").open(weights, peers)
        dist.barrier()
        if rank == victim:
            exchange, calls = peers.exchange, itertools.count()

            def exchange_at_first(*args: Any) -> Any:
                if next(calls) == 2:
                    if how == "is silent":
                        file_store.wait(["failed"], TIMEOUT)
                    os._exit(0)
                return exchange(*args)

            peers.exchange = exchange_at_first  # type: ignore[method-assign]
        try:
            _make_step(sync, weights, rank, 0, 1.0)
        except RunError as error:
            store.with_name(f"said-{rank}").write_text(f"{error.awaited} {error}")
            file_store.set("failed", "")


@pytest.mark.parametrize(("spec", "victim", "how"), list(itertools.product(SERVED, [0, 1], ["dies", "is silent"])))
def test_a_replica_that_is_lost_in_the_middle_is_named(spec: str, victim: int, how: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = tmp_path / "store"
    ranks = [context.Process(target=lose, args=(rank, 2, store, f"{spec}:{SMALL}", victim, how)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(50)  # less than the 60 s of the one case, many times the 3 s of the other
    assert not any(process.is_alive() for process in ranks)
    said = (tmp_path / f"said-{1 - victim}").read_text()
    assert said.startswith(f"({victim},) rank {1 - victim} on ")
    assert f"exchanging updates with replica {victim}, rank {victim}, failed after" in said


def test_buckets_hold_every_gradient_once_last_layer_first() -> None:
    weights = make_weights()
    for megabytes in (1e-6, 1e-4, 1e3):
        buckets = make_buckets(weights, megabytes)
        assert [w.key for bucket in buckets for w in bucket.weights] == [w.key for w in reversed(weights)]
        for bucket in buckets:
            bucket.reset()
            for weight in bucket.weights:
                weight.master.grad = torch.ones_like(weight.master)
                bucket.adopt(weight)
                weight.master.grad += 1.0
                bucket.adopt(weight)
            assert torch.equal(bucket.flat, torch.full_like(bucket.flat, 2.0))
            bucket.reset()
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
        squared = torch.tensor([squared_norm(weights)], dtype=torch.float64)
        norm = float(Gather(1, groups.world).rows(squared).sum()) ** 0.5
        scale_gradients_(weights, clip_factor(norm, 1.0))
        return norm, squared_norm(weights)


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
