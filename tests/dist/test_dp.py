"""Laws of the data-parallel modes that reduce gradients, and of the gradient norm across stages."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.patience import NO_LIMIT_S, stretched
from lib.processes import started
from lib.ranks import on_ranks
from lib.replicas import (
    LOCAL_SPECS,
    SHAPES,
    TIMEOUT,
    copied,
    count_sent,
    gradient,
    gradients,
    make_step,
    make_weights,
    on_replicas,
)
from torch import Tensor, nn

from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.buckets import make_buckets
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.errors import RunError
from acsgd.groups import connect
from acsgd.optim.base import SecondMoments
from acsgd.optim.gradient_scale import clip_factor, scale_gradients_, squared_norm
from acsgd.run.report import Gather
from acsgd.shards.weights import Weight
from acsgd.topology import Topology

USED = (3, 0, 4, 1)
"""Weights in the order of their gradients; weight 2 has none."""
SMALL = "bucket_mb=1e-6"
"""One bucket per weight, so that one of them is shorter than the number of replicas."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative rounding error of one number."""
SERVERS = ["sharded_ps", "central_ps"]
EXACT = {
    f"{mode}:dtype={dtype}{more}": dtype
    for mode, dtype, more in itertools.product(["allreduce", *SERVERS], DTYPES, ["", f",{SMALL}"])
}
"""Specs of exact modes, with the dtype of their messages."""
SPECS = ["allreduce", *EXACT, "powersgd", "powersgd:rank=1,exact_steps=1", f"powersgd:rank=2,warm_start=false,{SMALL}"]
"""Specs of every mode in which all replicas apply the same gradients."""
STEPS = 3


class Reduced(NamedTuple):
    """Result of one step of a replica."""

    grads: list[Tensor]
    """Gradients after the reduction, by weight."""
    metered: int
    """Bytes sent, according to the meter."""
    sent: int
    """Bytes given to torch.distributed; for an all-reduce, what a ring sends."""
    messages: int


def reduce_all(rank: int, world_size: int, store: Path, specs: Sequence[str], size: float = 1.0) -> list[list[Reduced]]:
    """Reduce the gradients of two micro-batches in some steps of each mode. size: factor on the gradients."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology.of(rank, world_size, 1), timeout=TIMEOUT, store=file_store) as groups:
        peers = Peers(groups.dp, groups.waits)
        results = []
        for spec in specs:
            weights = make_weights()
            sync = from_spec(spec, MODES, key="dp.mode").open(weights, peers)
            results.append([_make_step(sync, weights, rank, step, size) for step in range(STEPS)])
            restored = from_spec(spec, MODES, key="dp.mode").open(make_weights(), peers)
            restored.load_state_dict([sync.state_dict()] * world_size)
        dist.barrier()  # a rank that leaves early would disturb the others' connections
        return results


def _make_step(sync: GradSync, weights: Sequence[Weight], rank: int, step: int, size: float) -> Reduced:
    sync.meter.reset()
    with pytest.MonkeyPatch.context() as patch:
        sent = count_sent(patch)
        sync.begin_step(step)
        for last in (False, True):
            for index in USED:
                master = weights[index].master
                half = gradient(rank, step, index) * size / 2
                master.grad = half if master.grad is None else master.grad.add_(half)
                sync.grad_ready(weights[index], is_final=last)
        sync.reduce()
        sync.wait()
        sync.commit()
    masters = [weight.master for weight in weights]
    grads = [torch.zeros_like(m) if m.grad is None else m.grad.clone() for m in masters]
    sync.exchange(step, SecondMoments({}, 0.999))
    sync.after_step(step, SecondMoments({}, 0.999))
    return Reduced(grads, sync.meter.sent_bytes, sum(sent), len(sent))


def numbers_sent(spec: str, rank: int, replicas: int, step: int) -> float:
    """Return how many numbers a replica sends in a step, according to the mode's docstring."""
    mode, rows_and_columns = from_spec(spec, MODES, key="k"), [(s[0], math.prod(s[1:])) for s in SHAPES]
    numbers = [rows * columns for rows, columns in rows_and_columns]
    if isinstance(mode, PowerSGD) and step >= mode.exact_steps:
        numbers = [min(rows * columns, mode.rank * (rows + columns)) for rows, columns in rows_and_columns]
    if replicas > 1 and spec.startswith("central_ps"):
        return (replicas - 1 if rank == 0 else 1) * sum(numbers)
    return 2 * (replicas - 1) / replicas * sum(numbers)


def test_every_mode_is_tested() -> None:
    assert {spec.partition(":")[0] for spec in [*SPECS, *LOCAL_SPECS]} == MODES.keys()


def changes_before_commit(rank: int, peers: Peers, specs: Sequence[str]) -> list[str]:
    """Run some steps of each mode; return those in which weights or states changed before they may."""
    changed: list[str] = []
    for spec in specs:
        final = []
        for is_watched in (True, False):
            weights = make_weights()
            sync = from_spec(spec, MODES, key="dp.mode").open(weights, peers)
            if is_watched:
                exchange_twice(changed, sync, weights, spec)
            for step in range(2 * STEPS):
                before = state_of(sync, weights, spec)
                compare = partial(note_change, changed, before, sync, weights, spec)
                make_step(sync, weights, step, gradients(rank, step), before_commit=compare)
            final.append(state_of(sync, weights, spec))
        if not all(torch.equal(one, final[1][key]) for key, one in final[0].items()):
            changed.append(f"{spec}: another result if an exchange is run again")
    return changed


def state_of(sync: GradSync, weights: Sequence[Weight], spec: str) -> dict[tuple[str, str], Tensor]:
    """Return copies of everything that lasts; NaN, which stands for a statistic without a value yet, as -1."""
    shared = None if spec == "local" else sync.global_weights()  # of "local": computed when they are read
    masters = {weight.key: weight.master for weight in weights}
    state = copied({**sync.state_dict(), "masters": masters, "shared": dict(shared or {})})
    return {(name, key): tensor.nan_to_num(-1.0) for name, by_key in state.items() for key, tensor in by_key.items()}


def note_change(
    changed: list[str], before: dict[tuple[str, str], Tensor], sync: GradSync, weights: Sequence[Weight], spec: str
) -> None:
    now = state_of(sync, weights, spec)
    if now.keys() != before.keys() or not all(torch.equal(now[key], before[key]) for key in now):
        changed.append(spec)


def exchange_twice(changed: list[str], sync: GradSync, weights: Sequence[Weight], spec: str) -> None:
    """Run each exchange after an optimizer step twice; note the mode if that changes anything."""
    exchange = sync.exchange

    def watched(step: int, moments: SecondMoments) -> None:
        before = state_of(sync, weights, spec)
        for _ in range(2):
            exchange(step, moments)
            note_change(changed, before, sync, weights, spec)

    sync.exchange = watched  # type: ignore[method-assign]


FEW = [next(spec for spec in [*SPECS[::-1], *LOCAL_SPECS[::-1]] if spec.partition(":")[0] == mode) for mode in MODES]
"""One spec of each mode."""
OTHERS = [spec for spec in [*SPECS, *LOCAL_SPECS] if spec not in FEW]


@pytest.mark.parametrize("specs", [FEW, pytest.param(OTHERS, marks=pytest.mark.soak)], ids=["few", "others"])
def test_communication_changes_gradients_alone(specs: Sequence[str], tmp_path: Path) -> None:
    """Until a step is committed, and in the exchange after it, so that both can be run again if a rank fails."""
    assert on_replicas(2, changes_before_commit, tmp_path / "store", specs) == [[], []]


ByReplica = list[dict[str, list[Reduced]]]


@pytest.fixture(scope="module", params=[1, 2, 3])
def by_replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ByReplica:
    """Return the steps of each replica in each mode."""
    store = tmp_path_factory.mktemp("reduce") / "store"
    return [dict(zip(SPECS, made, strict=True)) for made in on_ranks(request.param, reduce_all, store, SPECS)]


def test_gradients_are_equal_on_all_replicas_bit_for_bit(by_replica: ByReplica) -> None:
    for spec, replica in itertools.product(SPECS, by_replica):
        for ours, first in zip(replica[spec], by_replica[0][spec], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(ours.grads, first.grads, strict=True)), spec
            assert all(ours.grads[index].any() for index in USED), spec
            assert not ours.grads[2].any(), spec


def test_exact_modes_sum_the_gradients(by_replica: ByReplica) -> None:
    """One rounding per addition, of sums no larger than that of the magnitudes, and one in each direction.

    fp16 rounds small numbers by up to 2**-25, and its result is multiplied by the number of replicas.
    """
    replicas = len(by_replica)
    for spec in ("allreduce", *EXACT):
        dtype = EXACT.get(spec, "fp32") if replicas > 1 else "fp32"
        least, is_rounded = replicas * 2.0**-25 if dtype == "fp16" else 0.0, False
        for step, reduced in enumerate(by_replica[0][spec]):
            for index in USED:
                grads = [gradient(replica, step, index).double() for replica in range(replicas)]
                error = (reduced.grads[index].double() - torch.stack(grads).sum(0)).abs()
                magnitude = torch.stack(grads).abs().sum(0)
                assert (error <= (replicas + 2) * (ROUNDING[dtype] * magnitude + least)).all(), (spec, step, index)
                is_rounded |= bool((error > (replicas + 2) * ROUNDING["fp32"] * magnitude).any())
        assert is_rounded == (dtype != "fp32"), f"{spec}: messages are not of this dtype"


def test_the_number_of_servers_changes_no_bit(by_replica: ByReplica) -> None:
    for dtype, more in itertools.product(DTYPES, ["", f",{SMALL}"]):
        sharded, central = (by_replica[0][f"{mode}:dtype={dtype}{more}"] for mode in SERVERS)
        for one, other in zip(sharded, central, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one.grads, other.grads, strict=True)), (dtype, more)


def test_the_bytes_sent_are_metered_and_as_documented(by_replica: ByReplica) -> None:
    """Each message may have a header of 16 bytes and up to 16 more, since parts are split at whole elements."""
    for spec, (rank, replica) in itertools.product(SPECS, enumerate(by_replica)):
        itemsize = DTYPES[EXACT.get(spec, "fp32")].itemsize
        for step, reduced in enumerate(replica[spec]):
            expected = itemsize * numbers_sent(spec, rank, len(by_replica), step)
            assert reduced.metered == reduced.sent, (spec, rank, step)
            assert abs(reduced.sent - expected) <= 32 * reduced.messages, (spec, rank, step)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_sum_overflows_fp16_no_sooner_than_a_gradient(replicas: int, tmp_path: Path) -> None:
    specs = [spec for spec, dtype in EXACT.items() if dtype == "fp16"]
    by_step = [[[gradient(r, s, i) for r in range(replicas)] for i in USED] for s in range(STEPS)]
    grads = [grad for of_step in by_step for of_weight in of_step for grad in of_weight]
    largest = max(float(grad.abs().max()) for grad in grads)
    largest_sum = max(float(torch.stack(w).sum(0).abs().max()) for of_step in by_step for w in of_step)
    limit = torch.finfo(torch.float16).max
    assert largest_sum > 1.1 * largest
    for size, overflows in ((0.95 * limit / largest, False), (1.05 * limit * replicas / largest_sum, True)):
        results = on_ranks(replicas, reduce_all, tmp_path / f"store-{size}", specs, size)[0]
        for spec, of_spec in zip(specs, results, strict=True):
            sums = torch.cat([grad.flatten().abs() for reduced in of_spec for grad in reduced.grads])
            assert not (sums <= limit).all(), spec
            assert bool(sums.isfinite().all()) != overflows, spec


def lose(rank: int, world_size: int, store: Path, spec: str, victim: int, how: str) -> None:
    """Make a step in which one replica ends or hangs after its first bucket; write the error of the other."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    seconds = NO_LIMIT_S if how == "ends" else stretched(2.0)
    with connect(Topology.of(rank, world_size, 1), timeout=timedelta(seconds=seconds), store=file_store) as groups:
        peers, weights = Peers(groups.dp, groups.waits), make_weights()
        sync = from_spec(spec, MODES, key="dp.mode").open(weights, peers)
        dist.barrier()
        if rank == victim:
            exchange, calls = peers.exchange, itertools.count()

            def exchange_at_first(*args: Any) -> Any:
                if next(calls) == 2:
                    if how == "hangs":
                        file_store.wait(["failed"], TIMEOUT)
                    os._exit(0)
                return exchange(*args)

            peers.exchange = exchange_at_first  # type: ignore[method-assign]
        try:
            _make_step(sync, weights, rank, 0, 1.0)
        except RunError as error:
            store.with_name(f"error-{rank}").write_text(f"{error.awaited} {error}")
            file_store.set("failed", "")


@pytest.mark.parametrize(
    ("spec", "victim", "how"),
    [("sharded_ps", 0, "ends"), ("sharded_ps", 1, "hangs"), ("central_ps", 0, "hangs"), ("central_ps", 1, "ends")],
)
def test_the_error_names_a_replica_that_is_lost_within_a_step(spec: str, victim: int, how: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(started(lose, rank, 2, store, f"{spec}:{SMALL}", victim, how)) for rank in range(2)
        ]
        for process in ranks:
            process.join(stretched(50.0))  # many times the timeout of a hang
        assert not any(process.is_alive() for process in ranks)
    error = (tmp_path / f"error-{1 - victim}").read_text()
    assert error.startswith(f"({victim},) rank {1 - victim} on ")
    assert f"exchanging updates with replica {victim}, rank {victim}, failed after" in error


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
    with connect(Topology.of(rank, world_size, world_size), timeout=TIMEOUT, store=file_store) as groups:
        weights = make_weights()
        if rank == 1:
            weights[1] = Weight("copy", weights[1].param, weights[1].master, is_copy=True)
        for index, weight in enumerate(weights):
            weight.master.grad = gradient(0 if index == 1 else rank, 0, index)
        squared = torch.tensor([squared_norm(weights)], dtype=torch.float64)
        norm = float(sum(Gather([1] * world_size, groups).rows(squared))) ** 0.5
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
