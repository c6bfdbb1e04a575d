"""Memory that each rank of a run needs, by kind, from the config of its model alone."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch import nn
from transformers import PreTrainedModel

from acsgd.codecs.base import wire_bytes
from acsgd.dp.exchange.buckets import split_weights
from acsgd.dp.exchange.sharded import MAX_PENDING
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.layers.quantize import is_quantized
from acsgd.optim.offload import MAX_IN_FLIGHT
from acsgd.optim.ownership import OwnedWeights
from acsgd.pp.recompute import KEEP_ALL, Recompute
from acsgd.pp.schedules.actions import Action, Op
from acsgd.pp.wire.cache_plan import plan_capacity
from acsgd.pp.wire.coder import EXACT, TensorSpec
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.pp.wire.mailbox import MAX_SENDS_IN_FLIGHT
from acsgd.run.plan.dry_run import UpdateMemory, dry_run
from acsgd.run.plan.layer_trace import LayerTrace, trace_layers
from acsgd.run.plan.limits import ParameterCount
from acsgd.run.plan.partition import Partition
from acsgd.shards.layer_tensors import hidden_matrices
from acsgd.shards.plan import StageSpec
from acsgd.shards.weights import Weight


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

    @property
    def on_host(self) -> int:
        """Memory of the host on a rank whose device is a GPU."""
        return self.messages + self.caches + self.offloaded

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
        return self.weights + (0 if self.offloaded else state)


KINDS = tuple(field.name for field in fields(RankMemory) if field.name not in ("cache_per_sequence", "offloaded"))
"""Fields that add up to the total."""


@dataclass(frozen=True)
class TracedModel:
    """A model whose layers were traced with micro-batches of one size."""

    built: PreTrainedModel
    """With its adapter, on the meta device."""
    layers: Sequence[LayerTrace]
    dequantized: Mapping[int, int]
    """By layer, bytes of the largest weight that is quantized, in the dtype of the run."""
    again: Sequence[LayerTrace] = ()
    """Layers whose activations are kept: those of a group of several layers while its backward runs. Empty = none."""


def trace_model(partition: Partition, built: PreTrainedModel | None = None) -> TracedModel:
    """Trace the model of a run with its micro-batches; the result depends on no rank.

    built: the model on the meta device, if it is there; it is only read.
    """
    config, model, shapes, recompute = partition.config, partition.model, partition.shapes, partition.plugins.recompute

    def trace(recompute: Recompute) -> list[LayerTrace]:
        return trace_layers(
            model.task,
            model._replace(quantization=None).build(shapes.dtype),
            model.description,
            shapes.sizes,
            dtype=shapes.dtype,
            label_smoothing=config.optim.label_smoothing,
            recompute=recompute,
            splits_backward=partition.programs.splits_backward,
            logits_at_once=partition.streams.logits_at_once,
        )

    traces = trace(recompute._replace(layers=min(recompute.layers, 1)))
    again = trace(KEEP_ALL) if recompute.layers > 1 else []
    built, largest = built or model.build(shapes.dtype), dict[int, int]()
    for layer in model.layers:
        sizes = [param.numel() for key in layer.parameters if is_quantized(param := built.get_parameter(key))]
        largest[layer.index] = max(sizes, default=0) * shapes.dtype.itemsize
    return TracedModel(built, traces, largest, again)


class RankWeights:
    """The weights of one rank, on the meta device."""

    def __init__(self, partition: Partition, built: PreTrainedModel) -> None:
        model, layers, dtype = partition.model, partition.layout, partition.shapes.dtype
        me, is_master = partition.topology.rank, dtype == torch.float32 and partition.config.optim.offload == "none"
        looked_up = {each.key for each in partition.tied if me in each.lookups}
        sent = {each.key for each in partition.tied if each.lookups and me == each.owner}
        hidden, frozen, seen = hidden_matrices(built, model.description), {*model.description.frozen}, set[str]()
        self.stages: dict[int, list[Weight]] = {}
        for stage, span in layers.spans.items():
            keys = dict.fromkeys(key for layer in model.layers[slice(*span)] for key in layer.parameters)
            own = [key for key in keys if key not in seen and key not in looked_up]
            seen.update(own)
            self.stages[stage] = [
                Weight(
                    key,
                    param := built.get_parameter(key),
                    param if is_master else nn.Parameter(torch.empty(param.shape, device="meta")),
                    has_remote_lookups=key in sent,
                    is_hidden_matrix=key in hidden,
                    is_tied=len(model.description.tied().get(key, ())) > 1,
                )
                for key in own
                if key not in frozen
            ]
        self.count = ParameterCount.of(built, seen, frozen & seen)
        self.buffer_bytes = sum(buffer.nbytes for buffer in built.buffers()) + sum(
            8 * len(built.get_parameter(key))
            for key in looked_up  # positions in a table
        )


class PlanCache:
    """What plans of runs of one model have in common: the weights of ranks, and the memory of their updates."""

    def __init__(self) -> None:
        self._weights: dict[object, RankWeights] = {}
        self._updates: dict[object, UpdateMemory] = {}

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


@dataclass(frozen=True)
class _Peak:
    """Memory of the forwards and backwards of a step when it is largest, bytes."""

    activations: int = 0
    logits: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.gradients


class _StepMemory:
    """Memory during the forwards and backwards of a step, bytes. last: index of the layer that makes the logits."""

    def __init__(self, last: int, gradients: int) -> None:
        self._last = last
        self.activations = self.logits = 0
        self.gradients = gradients
        self.peak = _Peak()

    def keep(self, layer: int, nbytes: int) -> None:
        """Add what a layer keeps for its backward, or remove it."""
        if layer == self._last:
            self.logits += nbytes
        else:
            self.activations += nbytes

    def reach(self, layer: int, nbytes: int) -> None:
        """Note the largest memory of a layer while it runs, beyond what is there."""
        is_head = layer == self._last
        now = _Peak(self.activations + nbytes * (not is_head), self.logits + nbytes * is_head, self.gradients)
        self.peak = max(self.peak, now, key=lambda each: each.total)


SUM_COPIES = 3
"""Bytes that the sum of a bucket of gradients takes, in messages, received parts and sums, per byte of the bucket."""


def gradients_in_flight(buckets: Sequence[int], made: int) -> int:
    """Return the bytes of gradients of a backward that are whole, since the link is slow, with those of their sum.

    buckets: bytes of each, in the order in which the backward makes them; made: bytes of the gradients so far.
    """
    ends = [*accumulate(buckets)]
    complete = sum(end <= made for end in ends)
    filling = made - (ends[complete - 1] if complete else 0)
    waiting = buckets[max(0, complete - MAX_PENDING) : complete]
    return sum(waiting) + filling + SUM_COPIES * max(waiting, default=0)


class _RankPlan:
    """The memory of one rank."""

    def __init__(self, partition: Partition, traced: TracedModel, cache: PlanCache) -> None:
        self._partition = partition
        self._traced = traced
        self._cache = cache
        self._weights = cache.weights(partition, traced.built)
        self._last = len(partition.model.layers) - 1
        self._ownership = partition.ownership(self._weights.stages.values())
        owned = OwnedWeights([*chain.from_iterable(self._weights.stages.values())], self._ownership)
        self._parts = owned.of(owned.weights)

    @property
    def least_bytes(self) -> int:
        """Memory on the device without that of the update and the mode. Activations: if the layers were traced."""
        peak = self._walk(has_buckets=False).total if self._traced.layers else 0
        if self._offloads:
            return self._weight_bytes + 2 * self._in_flight_bytes + peak
        return self._weight_bytes + self._master_bytes + self._moment_bytes + max(peak, self._gradient_bytes)

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
    def _weight_bytes(self) -> int:
        return self._weights.count.weight_bytes(self._partition.shapes.dtype) + self._weights.buffer_bytes

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
        return sum(part.master.nbytes for part in self._parts)

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
            ),
        )

    def memory(self, sequences: int | None) -> RankMemory:
        partition = self._partition
        update = self._update()
        peak = self._walk(has_buckets=update.has_buckets)
        gradients = self._gradient_bytes
        updates = max(update.reduction_peak, update.update_peak)
        offloaded = 0
        if self._offloads:
            in_flight = self._in_flight_bytes
            offloaded = self._master_bytes + gradients + in_flight + self._moment_bytes + update.state + updates
            gradients += 2 * in_flight
        elif peak.total > gradients + updates:
            updates, gradients = 0, peak.gradients
        else:
            peak = _Peak()
        delta = partition.plugins.delta
        is_bounded = sequences is not None or (delta is not None and delta.cache_gib > 0)
        return RankMemory(
            weights=self._weight_bytes,
            masters=self._master_bytes,
            gradients=gradients,
            moments=self._moment_bytes,
            replicas=update.state,
            activations=peak.activations,
            logits=peak.logits,
            updates=updates,
            messages=self._message_bytes(),
            caches=self._cache_bytes(sys.maxsize if sequences is None else sequences) if is_bounded else 0,
            cache_per_sequence=0 if is_bounded else self._cache_bytes(1),
            offloaded=offloaded,
        )

    @cached_property
    def _actions(self) -> Sequence[Action]:
        return self._partition.programs.actions(len(self._partition.micro_ids)).train

    def _walk(self, *, has_buckets: bool) -> _Peak:
        """Follow the program of a step. has_buckets: whether gradients lie in buffers that the mode keeps."""
        keeps_gradients = not self._offloads
        in_buckets = keeps_gradients and has_buckets
        memory = _StepMemory(self._last, self._weights.count.gradient_bytes if in_buckets else 0)
        buckets = self._summed_buckets() if keeps_gradients else ()
        started = set[int]()
        """Stages whose gradients exist."""
        for action in self._actions:
            if not action.is_compute:
                continue
            if action.operation.phase == "forward":
                self._run_forward(action, memory)
                continue
            completes = action.operation.completes
            creates = keeps_gradients and completes and action.stage not in started and not has_buckets
            self._run_backward(action, memory, creates_gradients=creates, buckets=buckets)
            if completes:
                started.add(action.stage)
        return memory.peak

    @property
    def _sums_passes(self) -> bool:
        """Whether gradients are summed over replicas after each backward, and whole ones are dropped then."""
        return self._partition.config.dp.shard == "gradients" and self._partition.topology.replicas > 1

    def _summed_buckets(self) -> Sequence[int]:
        """Return the bytes of the buckets that are summed after each backward; none unless `_sums_passes`."""
        mode = self._partition.plugins.mode
        if not self._sums_passes or not isinstance(mode, AllReduce):
            return ()
        [stage] = self._weights.stages.values()
        early = [weight for weight in stage if not weight.has_remote_lookups]
        return [sum(weight.master.nbytes for weight in bucket) for bucket in split_weights(early, mode.bucket_mb)]

    def _run_forward(self, action: Action, memory: _StepMemory) -> None:
        span = self._partition.layout.spans[action.stage]
        before = memory.activations, memory.logits
        memory.activations += self._entering_bytes(span.first)
        for group in self._groups(span):
            self._run_layers(group, self._traced.layers, memory)
            for layer in group[:-1]:  # of which backward starts from the inputs of the first
                memory.keep(layer, -self._traced.layers[layer].kept)
        if span.last <= self._partition.model.description.first_trained:  # without a backward
            memory.activations, memory.logits = before

    def _run_backward(
        self, action: Action, memory: _StepMemory, *, creates_gradients: bool, buckets: Sequence[int]
    ) -> None:
        """Follow a backward. buckets: of gradients that are summed after each one."""
        span, made = self._partition.layout.spans[action.stage], 0
        traces, ends = self._traced.layers, dict[int, range]()
        if self._traced.again:
            traces, ends = self._traced.again, {group[-1]: group for group in self._groups(span)}
        for layer in reversed(range(*span)):
            if group := ends.get(layer):
                self._run_layers(group, traces, memory)
                memory.keep(layer, -self._traced.layers[layer].kept)  # its output is counted in its trace
            trace = traces[layer]
            needed = trace.first_backward_peak if creates_gradients or buckets else trace.backward_peak
            if action.op is Op.I:
                needed = trace.inputs_peak
            whole = gradients_in_flight(buckets, made)
            memory.gradients += whole
            memory.reach(layer, needed + self._traced.dequantized[layer] + self._entering_bytes(layer + 1))
            memory.gradients -= whole
            early = (each for each in self._last_used(action.stage, layer) if not each.has_remote_lookups)
            made += sum(weight.master.nbytes for weight in early) * bool(buckets)
            if action.operation.completes:
                memory.keep(layer, -trace.kept)
            if action.op in (Op.I, Op.W):
                memory.keep(layer, trace.kept_between * (1 if action.op is Op.I else -1))
            if creates_gradients:
                memory.gradients += self._layer_gradient_bytes(action.stage, layer)
        whole = gradients_in_flight(buckets, made)
        memory.gradients += whole
        memory.reach(span.first, 0)
        memory.gradients -= whole
        if action.operation.completes:
            memory.activations -= self._entering_bytes(span.first)

    def _groups(self, span: StageSpec) -> Iterator[range]:
        """Yield the layers of a stage in groups of which backward starts from the inputs of the first one."""
        together = self._partition.plugins.recompute.layers or 1
        for first in range(*span, together):
            yield range(first, min(first + together, span.last))

    def _run_layers(self, layers: range, traces: Sequence[LayerTrace], memory: _StepMemory) -> None:
        """Follow the forward of some layers."""
        for layer in layers:
            memory.reach(layer, traces[layer].forward_peak + self._traced.dequantized[layer])
            memory.keep(layer, traces[layer].kept)

    def _entering_bytes(self, layer: int) -> int:
        """Return the bytes of the tensors that enter a layer, of a micro-batch."""
        return sum(spec_bytes(spec) for spec in self._entering(layer).values())

    def _entering(self, layer: int) -> dict[str, TensorSpec]:
        if not 0 < layer <= self._last:
            return {}
        shapes = self._partition.shapes
        return {
            name: TensorSpec(*shape.resolve(shapes.sizes, shapes.dtype), shape.dims)
            for name, shape in self._partition.model.description.boundary(layer).items()
        }

    def _layer_gradient_bytes(self, stage: int, layer: int) -> int:
        """Return the bytes of the gradients that stay of the weights that a layer is the last of its stage to use."""
        own, replicas = self._last_used(stage, layer), self._partition.topology.replicas
        return sum(
            weight.master.nbytes // (replicas if self._sums_passes and not weight.has_remote_lookups else 1)
            for weight in own
        )

    def _last_used(self, stage: int, layer: int) -> list[Weight]:
        """Return the weights that a layer is the last of its stage to use."""
        model, specs = self._partition.model, self._partition.layout.specs
        later = {key for other in model.layers[layer + 1 : specs[stage].last] for key in other.parameters}
        keys = {*model.layers[layer].parameters} - later
        return [weight for weight in self._weights.stages[stage] if weight.key in keys]

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
        for spec in self._entering(self._partition.layout.specs[stage].first).values():
            if is_gradient and not spec.dtype.is_floating_point:
                continue
            used = [each for each in codecs if not isinstance(each, Delta)] if spec.dtype.is_floating_point else []
            total += HEADER_BYTES + max(wire_bytes(each.wire(spec.shape, spec.dtype)) for each in (EXACT, *used))
        return total

    def _cache_bytes(self, sequences: int) -> int:
        """Return the bytes of the activation caches in host memory. sequences: number in the data."""
        partition, total = self._partition, 0
        delta, per_step = partition.plugins.delta, len(partition.micro_ids) * partition.config.pp.micro
        if delta is None or delta.cache != "ram":
            return 0
        for boundary in partition.cached_boundaries:
            specs = partition.shapes.boundaries[boundary]
            entry = sum(delta.entry_bytes(spec) for spec in specs.values() if spec.dtype.is_floating_point)
            total += entry * plan_capacity(delta, entry, samples=sequences, per_step=per_step)
        return total


def spec_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a tensor of a shape."""
    return math.prod(spec.shape) * spec.dtype.itemsize
