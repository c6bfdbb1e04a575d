"""Memory that each rank of a run needs, by kind, from the config of its model alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, reduce
from itertools import chain, zip_longest
from operator import or_

import torch
from transformers import PreTrainedModel

from acsgd.codecs.base import wire_bytes
from acsgd.layers.description import are_connected
from acsgd.optim.offload import MAX_IN_FLIGHT
from acsgd.optim.ownership import OwnedWeights
from acsgd.pp.schedules.actions import Action, Op
from acsgd.pp.wire.cache_plan import plan_capacity
from acsgd.pp.wire.coder import EXACT
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.pp.wire.mailbox import MAX_SENDS_IN_FLIGHT
from acsgd.run.plan.dry_run import ExchangeMemory, UpdateMemory, dry_run
from acsgd.run.plan.partition import Partition
from acsgd.run.plan.step_memory import (
    RankWeights,
    StepPeak,
    StepWalk,
    TracedModel,
    entering_tensors,
    fetched_bytes,
    layer_groups,
)


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank at the peak of a step, bytes. Not counted: the process itself, libraries, data on the host."""

    weights: int
    """Parameters in the dtype of the run, and buffers."""
    masters: int
    """fp32 masters of trained parameters."""
    gradients: int
    moments: int
    """State of the optimizer."""
    replicas: int
    """State of the data-parallel mode: global weights, residuals, outer momentum."""
    activations: int
    """Kept for backward, or temporary, without those of the head."""
    logits: int
    """The same of the layer with the head and the loss."""
    updates: int
    """Temporary tensors of the reduction, the optimizer step or the exchange of updates, if these have the peak."""
    messages: int
    """Buffers of the links, in host memory."""
    caches: int
    """Activation caches of delta, in host memory; 0 if the number of sequences that they hold is not known."""
    cache_per_sequence: int
    """Then: what they need for each sequence of the data. In no sum."""
    offloaded: int = 0
    """The part of masters, gradients, moments, state of replicas and updates that optim.offload keeps in host memory.
    In no sum."""
    host_weights: int = 0
    """The part of weights that model.offload keeps in host memory. In no sum."""
    host_activations: int = 0
    """The part of activations that model.offload_activations keeps in host memory. In no sum."""

    @property
    def on_host(self) -> int:
        """Memory of the host on a rank whose device is a GPU."""
        return self.messages + self.caches + self.offloaded + self.host_weights + self.host_activations

    @property
    def on_device(self) -> int:
        """Memory of the device."""
        return self.total - self.on_host

    @property
    def total(self) -> int:
        """Sum of KINDS."""
        return sum(getattr(self, name) for name in KINDS)

    @property
    def constant(self) -> int:
        """The part on the device that no micro-batch, schedule or recomputation changes."""
        state = self.masters + self.gradients + self.moments + self.replicas
        return self.weights - self.host_weights + (0 if self.offloaded else state)


PARTS = ("cache_per_sequence", "offloaded", "host_weights", "host_activations")
"""Fields that are in no sum."""
KINDS = tuple(field.name for field in fields(RankMemory) if field.name not in PARTS)
"""Fields that add up to the total."""


class PlanCache:
    """What plans of runs of one model have in common: the weights of ranks, and the memory of their updates."""

    def __init__(self) -> None:
        self._weights: dict[object, RankWeights] = {}
        self._updates: dict[object, UpdateMemory] = {}
        self.exchanges: dict[object, ExchangeMemory] = {}
        """See `dry_run`."""

    def weights(self, partition: Partition, built: PreTrainedModel) -> RankWeights:
        """Return the weights of a rank. built: see `TracedModel`."""
        cut, config = partition.layout.cut, partition.config
        key = cut, partition.layout.placement, partition.topology.stage_rank, config.pp.tied, config.optim.offload
        if key not in self._weights:
            self._weights[key] = RankWeights(partition, built)
        return self._weights[key]

    def update(self, key: object, run: Callable[[], UpdateMemory]) -> UpdateMemory:
        """Return the memory of an update. key: all that it depends on; run: plans it."""
        if key not in self._updates:
            self._updates[key] = run()
        return self._updates[key]


def plan_memory(
    partition: Partition, traced: TracedModel, sequences: int | None = None, cache: PlanCache | None = None
) -> Iterator[RankMemory]:
    """Yield the memory of each rank of a pipeline, first to last.

    traced: of the partition's model; sequences: number in the data, None if it is not known; cache: of the same model.
    """
    cache = cache or PlanCache()
    for rank in partition.topology.ranks_along("pipeline"):
        yield _RankPlan(partition.seen_from(rank), traced, cache).memory(sequences)


def least_memory(partition: Partition, traced: TracedModel, cache: PlanCache) -> int:
    """Return the memory on its device of the rank that has most, without what only the update shows.

    traced: may be without layers, whose activations are not counted then; cache: of the same model.
    """
    return max(
        _RankPlan(partition.seen_from(rank), traced, cache).least_bytes
        for rank in partition.topology.ranks_along("pipeline")
    )


GATHER_COPIES = 2
"""Bytes that a gather takes in messages, sent and received, per byte that it gathers."""


class _RankPlan:
    """The memory of one rank."""

    def __init__(self, partition: Partition, traced: TracedModel, cache: PlanCache) -> None:
        self._partition = partition
        self._traced = traced
        self._cache = cache
        self._weights = cache.weights(partition, traced.built)
        self._ownership = partition.ownership(self._weights.stages.values())
        owned = OwnedWeights([*chain.from_iterable(self._weights.stages.values())], self._ownership)
        self._parts = owned.of(owned.weights)
        self._fetched = self._ownership.gathered | partition.offloaded

    @property
    def least_bytes(self) -> int:
        """Memory on the device without that of the update and the mode. Activations: if the layers were traced."""
        peak = self._peak(has_buckets=False).total if self._traced.layers else 0
        if self._offloads:
            return self._device_weight_bytes + self._in_flight_bytes + peak
        return self._device_weight_bytes + self._master_bytes + self._moment_bytes + max(peak, self._gradient_bytes)

    @property
    def _offloads(self) -> bool:
        """Whether masters, gradients and the optimizer's state are in another memory than the weights."""
        return self._partition.config.optim.offload == "cpu" and self._partition.streams.device.type != "cpu"

    @property
    def _in_flight_bytes(self) -> int:
        """Memory of the gradients that are on their way to the host, on each side."""
        of_stages = ([weight.param.nbytes for weight in stage] for stage in self._weights.stages.values())
        sizes, count = [*chain.from_iterable(of_stages)], MAX_IN_FLIGHT + 1
        return max((sum(sizes[first : first + count]) for first in range(len(sizes))), default=0)

    @property
    def _device_weight_bytes(self) -> int:
        """Memory of the weights on the device: those that stay, parts of divided ones, and what is fetched."""
        whole = self._weights.count.weight_bytes(self._partition.shapes.dtype) + self._weights.buffer_bytes
        divided = sum(map(self._bytes_of, self._ownership.gathered))
        part = -(-divided // self._partition.num_owners)
        return whole - sum(map(self._bytes_of, self._fetched)) + part + self._fetched_at_once

    @property
    def _host_weight_bytes(self) -> int:
        """Memory of the weights on the host: copies, of which trained ones in fp32 are masters, or buffers of reads."""
        partition = self._partition
        if partition.config.model.offload == "disk":  # a buffer is used again for parameters of its size
            if partition.streams.device.type == "cpu":  # read to where they are used
                return 0
            # also by the group that is read next: the first or last one of a stage again, or that of another stage
            return 2 * _total(reduce(or_, self._fetched_sizes, Counter[int]()))
        frozen, is_fp32 = partition.model.description.frozen, partition.shapes.dtype == torch.float32
        return sum(self._bytes_of(key) for key in partition.offloaded if key in frozen or not is_fp32)

    @property
    def _fetched_at_once(self) -> int:
        """Bytes of the fetched parameters that are on the device at the same time: those of two groups.

        A part of a backward for weights alone that needs all layers of its stage at once has those of the stage.
        """
        partition, sizes = self._partition, [*map(_total, self._fetched_sizes)]
        at_once = [one + other for one, other in zip_longest(sizes, sizes[1:], fillvalue=0)]
        if partition.programs.splits_backward:
            spans = partition.layout.spans.values()
            connected = (span for span in spans if are_connected(partition.model.layers[slice(*span)]))
            at_once += [_total(self._sizes_of(range(*span))) for span in connected]
        return max(at_once, default=0)

    @cached_property
    def _fetched_sizes(self) -> list[Counter[int]]:
        """Number of the parameters that each group of layers fetches, by size, bytes, in the order of the groups."""
        spans = self._partition.layout.spans.values()
        return [self._sizes_of(group) for span in spans for group in layer_groups(self._partition, span)]

    def _sizes_of(self, group: range) -> Counter[int]:
        """Return the number of the fetched parameters of some layers, by size, bytes."""
        layers = self._partition.model.layers[slice(group.start, group.stop)]
        keys = dict.fromkeys(key for layer in layers for key in layer.parameters if key in self._fetched)
        return Counter(map(self._bytes_of, keys))

    def _bytes_of(self, key: str) -> int:
        return fetched_bytes(self._traced.built.get_parameter(key), self._partition.shapes.dtype)

    @property
    def _master_bytes(self) -> int:
        return sum(part.master.nbytes for part in self._parts if part.master is not part.param)

    @property
    def _moment_bytes(self) -> int:
        return sum(
            state.nbytes(part.master, is_hidden_matrix=part.is_hidden_matrix)
            for part in self._parts
            for state in self._partition.plugins.optimizer.states
        )

    @property
    def _gradient_bytes(self) -> int:
        """Memory of the gradients that the optimizer steps with."""
        return sum(part.grad_bytes for part in self._parts)

    def _update(self) -> UpdateMemory:
        """Return the memory of the update, that of another rank with weights of the same shapes."""
        partition, stages = self._partition, [*self._weights.stages.values()]
        config, plugins, domains = partition.config, partition.plugins, partition.domains
        shapes = [[(each.master.shape, each.has_remote_lookups, each.is_hidden_matrix) for each in s] for s in stages]
        members = next(len(domain) for domain in domains if partition.topology.replica in domain)
        parts = partition.topology.replica if self._ownership.parts else None
        key = shapes, plugins.mode, plugins.optimizer, config.optim, len(domains), members, parts, config.dp.shard
        return self._cache.update(
            repr(key),
            lambda: dry_run(
                plugins.mode,
                plugins.optimizer,
                config.optim,
                stages,
                len(domains),
                members,
                self._ownership,
                config.dp.shard,
                self._cache.exchanges,
            ),
        )

    def memory(self, sequences: int | None) -> RankMemory:
        partition = self._partition
        update = self._update()
        peak = self._peak(has_buckets=update.has_buckets)
        gradients, on_host = self._gradient_bytes, peak.on_host
        updates = max(update.reduction_peak, update.update_peak)
        offloaded = 0
        gathered = GATHER_COPIES * max(map(_total, self._fetched_sizes), default=0) if self._ownership.gathered else 0
        if self._offloads:
            in_flight = self._in_flight_bytes
            offloaded = self._master_bytes + gradients + in_flight + self._moment_bytes + update.state + updates
            gradients += 2 * in_flight
        elif peak.total > gradients + updates:
            updates, gradients = 0, peak.gradients
        else:
            peak = StepPeak()
        delta = partition.plugins.delta
        is_bounded = sequences is not None or (delta is not None and delta.cache_gib > 0)
        return RankMemory(
            weights=self._device_weight_bytes + self._host_weight_bytes,
            masters=self._master_bytes,
            gradients=gradients,
            moments=self._moment_bytes,
            replicas=update.state,
            activations=peak.activations + on_host,
            logits=peak.logits,
            updates=updates,
            messages=self._message_bytes() + gathered,
            caches=self._cache_bytes(sys.maxsize if sequences is None else sequences) if is_bounded else 0,
            cache_per_sequence=0 if is_bounded else self._cache_bytes(1),
            offloaded=offloaded,
            host_weights=self._host_weight_bytes,
            host_activations=on_host,
        )

    @cached_property
    def _actions(self) -> Sequence[Action]:
        return self._partition.programs.actions(self._partition.most_micros).train

    def _peak(self, *, has_buckets: bool) -> StepPeak:
        walk = StepWalk(self._partition, self._traced, self._weights, offloads=self._offloads)
        return walk.peak(self._actions, has_buckets=has_buckets)

    def _message_bytes(self) -> int:
        """Return the bytes of the buffers of all links."""
        waiting, most, sent = Counter[tuple[Op, int]](), Counter[tuple[Op, int]](), Counter[tuple[Op, int]]()
        takes = {Op.F: Op.RF, Op.B: Op.RB, Op.I: Op.RB}
        for action in self._actions:
            if action.op in (Op.RF, Op.RB):
                waiting[action.op, action.stage] += 1
                most[action.op, action.stage] = max(most[action.op, action.stage], waiting[action.op, action.stage])
            elif action.op in (Op.SF, Op.SB):
                sent[action.op, action.stage] += 1
            elif action.op in takes and waiting[takes[action.op], action.stage]:
                waiting[takes[action.op], action.stage] -= 1
        buffers = {**most, **{key: min(count, MAX_SENDS_IN_FLIGHT + 1) for key, count in sent.items()}}
        firsts = {Op.RF: 0, Op.SF: 1, Op.RB: 1, Op.SB: 0}
        return sum(
            count * self._longest_message(stage + firsts[op], is_gradient=op in (Op.RB, Op.SB))
            for (op, stage), count in buffers.items()
        )

    def _longest_message(self, stage: int, *, is_gradient: bool) -> int:
        """Return the bytes of the messages that carry a micro-batch over the boundary before a stage."""
        plugins, total = self._partition.plugins, 0
        codecs = [*(plugins.backward if is_gradient else plugins.forward)]
        for spec in entering_tensors(self._partition, self._partition.layout.specs[stage].first).values():
            if is_gradient and not spec.dtype.is_floating_point:
                continue
            used = [each for each in codecs if not isinstance(each, Delta)] if spec.dtype.is_floating_point else []
            total += HEADER_BYTES + max(wire_bytes(each.wire(spec.shape, spec.dtype)) for each in (EXACT, *used))
        return total

    def _cache_bytes(self, sequences: int) -> int:
        """Return the bytes of the activation caches in host memory. sequences: number in the data."""
        partition, total = self._partition, 0
        delta, per_step = partition.plugins.delta, partition.most_micros * partition.config.pp.micro
        if delta is None or delta.cache != "ram":
            return 0
        tensors = partition.cached_tensors
        for boundary in partition.cached_boundaries:
            entry = sum(map(delta.entry_bytes, tensors[boundary]))
            total += entry * plan_capacity(delta, entry, samples=sequences, per_step=per_step)
        return total


def _total(sizes: Counter[int]) -> int:
    """Return the bytes of parameters. sizes: their number by size, bytes."""
    return sum(size * count for size, count in sizes.items())
