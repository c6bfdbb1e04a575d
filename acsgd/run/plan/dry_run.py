"""The update of a stage's weights on fake tensors: what its optimizer and its data-parallel mode allocate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from acsgd.codecs.identity import DTYPES
from acsgd.comm.process_groups import Group
from acsgd.comm.waits import DirectWaits, Meter
from acsgd.config.options import OptimConfig, ShardKind
from acsgd.dp.exchange.buckets import bucket_mb, split_weights
from acsgd.dp.exchange.local_weights import group_weights
from acsgd.dp.modes import initial_steps, redundant_steps
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.dp.peers import AsyncResult, Peers
from acsgd.dp.sync import GradSync, Mode
from acsgd.optim.base import Optimizer, OptimizerSpec, SecondMoments
from acsgd.optim.ownership import OwnedWeights, Ownership
from acsgd.optim.per_weight import PerWeightOptimizer, open_optimizer
from acsgd.run.plan.layer_trace import MemoryTracker
from acsgd.shards.weights import Weight, as_own_master, in_reduction_order
from acsgd.streams import Streams

T = TypeVar("T")


class UpdateMemory(NamedTuple):
    """What the update of a rank's weights needs on one of several replicas, bytes, besides the optimizer's state."""

    state: int
    """What the data-parallel mode keeps from step to step, and what an exchange needs that runs during a step."""
    has_buckets: bool
    """Whether gradients lie in buffers that the mode keeps."""
    reduction_peak: int
    """Largest memory of the gradient reduction, besides weights, gradients and state."""
    update_peak: int
    """The same of the optimizer step and of the exchange after it."""


SEARCHED = 10_000
"""Steps, after the initial ones of a mode, among which one with an exchange is looked for."""


class _FakeTensors(FakeTensorMode):
    """Context of fake tensors, in which a number that code reads is 1, such as a count of steps, and any other value 0:
    checks find neither NaN nor infinity."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return int(args[0].is_floating_point())
        return super().__torch_dispatch__(func, types, args, kwargs)


class _NoWork:
    def wait(self) -> bool:
        return True


class _AbsentGroup:
    """A group without other ranks to reach."""

    device = torch.device("cpu")

    reductions = updates = None

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.ranks = [*range(size)]

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def all_reduce(self, tensor: Tensor) -> _NoWork:
        return _NoWork()


class AbsentPeers(Peers):
    """Replicas that are not there: work runs at once, and what is received has no values.

    replicas: number of those that exchange, each of them a domain of `members` replicas.
    runs: whether submitted work runs; else its result is None.
    """

    def __init__(self, replica: int, replicas: int, members: int = 1, *, runs: bool = True) -> None:
        super().__init__(cast("Group", _AbsentGroup(replica, replicas)), DirectWaits())
        self.members = range(members)
        self._runs = runs

    def start_domain_sum(self, tensor: Tensor, meter: Meter) -> Callable[[], None]:
        return lambda: None

    def submit(self, work: Callable[[], T]) -> AsyncResult[T]:
        done = Future[T]()
        done.set_result(work() if self._runs else cast("T", None))
        return AsyncResult(done, self.waits)

    def exchange(self, outgoing: Mapping[int, Tensor], longest: Mapping[int, int], meter: Meter) -> dict[int, Tensor]:
        framed = [message.clone() for message in outgoing.values()]  # with a header each, all at once
        meter.sent_bytes += sum(message.nbytes for message in framed)
        return {peer: torch.empty(nbytes, dtype=torch.uint8) for peer, nbytes in longest.items()}


def dry_run(
    mode: Mode,
    optimizer: OptimizerSpec,
    config: OptimConfig,
    stages: Sequence[Sequence[Weight]],
    replicas: int,
    members: int = 1,
    ownership: Ownership | None = None,
    shard: ShardKind = "none",
    known: dict[object, ExchangeMemory] | None = None,
) -> UpdateMemory:
    """Make a step with the weights of some stages, on the meta device, of one of several replicas.

    replicas, members: see `AbsentPeers`. ownership: of these weights; None = each replica owns all. shard: dp.shard.
    An exchange of updates is run once for each size of the buffers in which weights are exchanged, and for two of them.
    known: results of such runs, which this adds to. Blocks in which a codec works have the size of those on a CPU.
    """
    in_domains = ownership is not None and bool(ownership.domains)
    if isinstance(mode, AllReduce) and not in_domains:
        return _exact_update(mode, optimizer, config, stages, replicas, ownership, shard)
    has_updates = mode.exchanges != "gradients"
    members = 1 if in_domains else members
    with _FakeTensors(), MemoryTracker() as tracker:
        fakes = [[_fake(weight) for weight in in_reduction_order(weights)] for weights in stages]
        weights = [weight for of_stage in fakes for weight in of_stage]
        owned = OwnedWeights(weights, ownership or Ownership(0, replicas))
        held, gradients = tracker.now, sum(each.grad_bytes for each in owned.of(weights))
        peers = AbsentPeers(0, replicas, members, runs=not has_updates)
        syncs = [mode.open(owned.of(each), peers) for each in fakes]
        step = _step_with_exchange(syncs, initial_steps(mode))
        if not has_updates:  # a mode may have no state before its first step
            _reduce(syncs, [owned.of(each) for each in fakes], step, tracker)
            for sync in syncs:
                sync.after_step(step, SecondMoments({}, 0.0))
        started = _reduce(syncs, [owned.of(each) for each in fakes], step, tracker)
        has_buckets = any(sync.has_buckets for sync in syncs)
        state = started.now - held - gradients * has_buckets
        reduction_peak = tracker.peak - held - state - gradients

        def open_own() -> Optimizer:
            return open_optimizer(optimizer, owned.of(weights), config, Streams(peers.device))

        update_peak = _update_peak(tracker, () if has_updates else syncs, step, open_own, owned.of(weights))
    if has_updates:
        groups = [*chain.from_iterable(group_weights(owned.of(each)) for each in fakes)]
        exchanging = AbsentPeers(0, replicas, members)
        # replicas that end redundant steps with different weights average these
        steps = [step] if not redundant_steps(mode) else [step, redundant_steps(mode) - 1]
        run = partial(_run_exchanges, mode, optimizer, config, exchanging, steps)
        common = repr((mode, optimizer, config, replicas, members))
        exchange = _exchange_memory(groups, run, {} if known is None else known, common)
        state, update_peak = state + exchange.in_flight, max(update_peak, exchange.peak)
    update = UpdateMemory(state, has_buckets, reduction_peak, update_peak)
    return _with_parts(update, owned, mode) if in_domains else update


def _step_with_exchange(syncs: Sequence[GradSync], first: int) -> int:
    """Return the first step from `first` on that an exchange follows, or, if there is none, one of the next."""
    steps = range(first, first + SEARCHED)
    return next((step for step in steps if any(sync.exchanges_after(step) for sync in syncs)), first + SEARCHED)


class _Started(NamedTuple):
    """Memory of a step that has been started, with buffers for gradients, bytes."""

    now: int
    peak: int


def _reduce(
    syncs: Sequence[GradSync], stages: Sequence[Sequence[Weight]], step: int, tracker: MemoryTracker
) -> _Started:
    """Start a step, make gradients, and reduce them; return the memory, and its peak, between start and gradients.

    The tracker's peak is then that of the reduction, after the gradients.
    """
    tracker.peak = tracker.now
    for sync in syncs:
        sync.begin_step(step)
    started = _Started(tracker.now, tracker.peak)
    for sync, weights in zip(syncs, stages, strict=True):
        for weight in reversed(weights):
            weight.master.grad = torch.empty(weight.master.shape)
            sync.grad_ready(weight, is_final=True)
    tracker.peak = tracker.now
    for sync in syncs:
        sync.reduce()
        sync.wait()
    return started


class ExchangeMemory(NamedTuple):
    """Memory of the exchange of updates, bytes, besides weights, gradients, and what lasts of optimizer and mode."""

    in_flight: int
    """Of what runs during forward and backward."""
    peak: int
    """Beyond that: largest memory of what runs after them."""


def _exchange_memory(
    groups: Sequence[Sequence[Weight]],
    run: Callable[[Sequence[Sequence[Weight]]], ExchangeMemory],
    known: dict[object, ExchangeMemory],
    common: str,
) -> ExchangeMemory:
    """Return the memory of an exchange of groups of weights, one group after another, all of which are then applied.

    run: exchanges some groups. It is called once for each size of a group, and for two of the largest: by how much
    these need more is what an exchanged group keeps until all are applied, by its size.
    known: results of such runs, by `common`, which is all else that they depend on, and size.
    """
    sizes = [sum(weight.master.numel() for weight in group) for group in groups]
    by_size = dict(zip(sizes, groups, strict=True))
    for size, group in by_size.items():
        if (common, size) not in known:
            known[common, size] = run([group])
    runs = {size: known[common, size] for size in by_size}
    largest = max(sizes, default=0)
    twice = runs.get(largest, ExchangeMemory(0, 0))
    if len(groups) > 1:
        if (common, largest, 2) not in known:
            known[common, largest, 2] = run([by_size[largest]] * 2)
        twice = known[common, largest, 2]
    found = list[int]()
    for alone, both in zip(zip(*(runs[size] for size in sizes), strict=True), twice, strict=True):
        kept = (both - runs[largest][len(found)]) / largest
        before = itertools.accumulate(sizes, initial=0)
        found.append(max(int(kept * size) + each for size, each in zip(before, alone, strict=False)))
    return ExchangeMemory(*found)


def _run_exchanges(
    mode: Mode,
    optimizer: OptimizerSpec,
    config: OptimConfig,
    peers: Peers,
    steps: Sequence[int],
    groups: Sequence[Sequence[Weight]],
) -> ExchangeMemory:
    """Return the largest memory of the exchanges after some steps."""
    found = [_run_exchange(mode, optimizer, config, peers, step, groups) for step in steps]
    return ExchangeMemory(*map(max, zip(*found, strict=True)))


def _run_exchange(
    mode: Mode,
    optimizer: OptimizerSpec,
    config: OptimConfig,
    peers: Peers,
    step: int,
    groups: Sequence[Sequence[Weight]],
) -> ExchangeMemory:
    """Make a step with the weights of some groups, each exchanged alone; return the memory of the exchange."""
    with _FakeTensors(), MemoryTracker() as tracker:
        fakes = [
            [_fake(each)._replace(key=f"{index}.{each.key}") for each in group] for index, group in enumerate(groups)
        ]
        weights = [*chain.from_iterable(fakes)]
        syncs = [mode.open(group, peers) for group in fakes]
        gradients = sum(each.master.nbytes for each in weights)
        tracker.peak = held = tracker.now
        started = _reduce(syncs, fakes, step, tracker)
        in_flight = started.peak - held - gradients * any(sync.has_buckets for sync in syncs)
        tracker.peak = tracker.now
        for sync in syncs:
            sync.commit()
        commit_peak = tracker.peak - held - gradients - in_flight
        before = tracker.now
        opened = open_optimizer(optimizer, weights, config, Streams(peers.device))
        opened.step(step)
        held += tracker.now - before
        tracker.peak = tracker.now
        _exchange(syncs, step, opened.second_moments(weights))
        return ExchangeMemory(in_flight, max(commit_peak, tracker.peak - held - gradients - in_flight))


def _exchange(syncs: Sequence[GradSync], step: int, moments: SecondMoments) -> None:
    for sync in syncs:
        sync.exchange(step, moments)
    for sync in syncs:
        sync.after_step(step, moments)


def _exact_update(
    mode: AllReduce,
    optimizer: OptimizerSpec,
    config: OptimConfig,
    stages: Sequence[Sequence[Weight]],
    replicas: int,
    ownership: Ownership | None,
    shard: ShardKind,
) -> UpdateMemory:
    """Return the memory of an update whose gradients are summed exactly. Arguments as in `dry_run`.

    Messages of dp.shard are counted where backwards are (`SummedBuckets`), but for those that gather weights: parts of
    this replica, once more for each other one, and those of all others.
    """
    is_alone, is_divided = replicas == 1, shard != "none" and replicas > 1
    with _FakeTensors(), MemoryTracker() as tracker:
        weights = [_fake(weight) for of_stage in stages for weight in of_stage]
        owned = OwnedWeights(weights, ownership or Ownership(0, replicas))
        for part in owned.of(weights):
            part.master.grad = torch.empty(part.master.shape)
        opened = partial(open_optimizer, optimizer, owned.of(weights), config, Streams(torch.device("cpu")))
        peak = _update_peak(tracker, (), 0, opened, weights)
    itemsize = DTYPES[mode.dtype].itemsize
    messages = 0 if itemsize == 4 or is_alone or is_divided else itemsize * sum(each.master.numel() for each in weights)
    gathers = _gather_bytes(owned, mode) * is_divided
    return UpdateMemory(0, not (is_alone or is_divided), messages, max(peak, gathers))


def _with_parts(update: UpdateMemory, owned: OwnedWeights, mode: Mode) -> UpdateMemory:
    """Return the memory of an update of what a replica owns, with that of gathering the weights.

    Buffers of the mode for gradients are not those in which the gradients are summed within the domain.
    """
    gradients = sum(each.grad_bytes for each in owned.of(owned.weights)) * update.has_buckets
    peak = max(update.update_peak - gradients, _gather_bytes(owned, mode))
    return UpdateMemory(
        update.state + gradients, has_buckets=False, reduction_peak=update.reduction_peak, update_peak=peak
    )


def _gather_bytes(owned: OwnedWeights, mode: Mode) -> int:
    """Return the memory of gathering updated weights: parts of this replica, once for each other one, and theirs."""
    gathered, buckets = owned.ownership.gathered, split_weights(owned.weights, bucket_mb(mode))
    return 2 * max(
        (sum(each.param.nbytes for each in bucket if each.key not in gathered) for bucket in buckets), default=0
    )


def _update_peak(
    tracker: MemoryTracker,
    syncs: Sequence[GradSync],
    step: int,
    open_own: Callable[[], Optimizer],
    weights: Sequence[Weight],
) -> int:
    """Make a step of the optimizer and the exchange after it; return their largest memory, beyond that before each."""
    opened = open_own()
    if isinstance(opened, PerWeightOptimizer):  # whose largest memory is that of one weight
        _keep_one_gradient_of_each_shape(weights)
    tracker.peak = before = tracker.now
    opened.step(step)
    peak = tracker.peak - max(before, tracker.now)
    tracker.peak = before = tracker.now
    _exchange(syncs, step, opened.second_moments(weights))
    return max(peak, tracker.peak - before)


def _keep_one_gradient_of_each_shape(weights: Iterable[Weight]) -> None:
    kept = set[tuple[torch.Size, bool]]()
    for weight in weights:
        if (kind := (weight.master.shape, weight.is_hidden_matrix)) in kept:
            weight.master.grad = None
        kept.add(kind)


def _fake(weight: Weight) -> Weight:
    param = nn.Parameter(torch.empty(weight.param.shape, dtype=weight.param.dtype))
    is_master = weight.param is weight.master
    master = as_own_master(param) if is_master else nn.Parameter(torch.empty(param.shape))
    return weight._replace(param=param, master=master)
