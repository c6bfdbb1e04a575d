"""Memory of the forwards and backwards of a step: traced layers and weights, followed through the program of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from acsgd.dp.exchange.buckets import bucket_mb, split_weights
from acsgd.dp.exchange.sharded import MAX_PENDING
from acsgd.layers.quantize import is_quantized
from acsgd.pp.recompute import KEEP_ALL, Recompute
from acsgd.pp.schedules.actions import Action, Op
from acsgd.pp.wire.coder import TensorSpec
from acsgd.run.plan.layer_trace import LayerTrace, trace_layers
from acsgd.run.plan.limits import ParameterCount
from acsgd.run.plan.partition import Partition
from acsgd.run.plan.plugins import has_masters
from acsgd.shards.layer_tensors import hidden_matrices
from acsgd.shards.plan import StageSpec
from acsgd.shards.weights import Weight, as_own_master


class RankWeights:
    """The weights of one rank, on the meta device."""

    def __init__(self, partition: Partition, built: PreTrainedModel) -> None:
        model, layers = partition.model, partition.layout
        me, is_apart = partition.topology.rank, has_masters(partition.config)
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
                    nn.Parameter(torch.empty(param.shape, device="meta")) if is_apart else as_own_master(param),
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
            has_masters=has_masters(config),
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


@dataclass(frozen=True)
class StepPeak:
    """Memory of the forwards and backwards of a step when it is largest, bytes."""

    activations: int = 0
    logits: int = 0
    gradients: int = 0
    on_host: int = 0
    """Largest memory of activations that wait in host memory, at any time. In no sum."""

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.gradients


class _StepMemory:
    """Memory during the forwards and backwards of a step, bytes. last: index of the layer that makes the logits."""

    def __init__(self, last: int, gradients: int) -> None:
        self._last = last
        self.activations = self.logits = 0
        self.gradients = gradients
        self.on_host = self.most_on_host = 0
        self.peak = StepPeak()

    def move(self, layer: int, nbytes: int) -> None:
        """Move what a layer keeps to host memory; negative = back."""
        self.keep(layer, -nbytes)
        self.on_host += nbytes
        self.most_on_host = max(self.most_on_host, self.on_host)

    def keep(self, layer: int, nbytes: int) -> None:
        """Add what a layer keeps for its backward, or remove it."""
        if layer == self._last:
            self.logits += nbytes
        else:
            self.activations += nbytes

    def reach(self, layer: int, nbytes: int) -> None:
        """Note the largest memory of a layer while it runs, beyond what is there."""
        is_head = layer == self._last
        now = StepPeak(self.activations + nbytes * (not is_head), self.logits + nbytes * is_head, self.gradients)
        self.peak = max(self.peak, now, key=lambda each: each.total)


class SummedBuckets(NamedTuple):
    """Buckets of gradients that a backward makes, of which each replica gets the sums of its parts (dp.shard)."""

    sizes: Sequence[int] = ()
    """Bytes of each, in the order in which the backward makes them."""
    replicas: int = 1
    keeps_whole: bool = False
    """Whether the gradients of the whole weights exist before, from earlier backwards."""

    def in_flight(self, made: int) -> int:
        """Return the bytes of whole gradients, if there are none before, and of messages, where the link is slow.

        made: bytes of the gradients so far.
        """
        ends = [*accumulate(self.sizes)]
        complete = sum(end <= made for end in ends)
        if self.keeps_whole:
            return self._sum_bytes(max(self.sizes[:complete], default=0))
        filling = made - (ends[complete - 1] if complete else 0)
        waiting = self.sizes[max(0, complete - MAX_PENDING - 1) : complete]  # the first of them is being summed
        return sum(waiting) + filling + self._sum_bytes(max(waiting, default=0))

    def _sum_bytes(self, bucket: int) -> int:
        """Return the bytes of the messages of a bucket: one per replica, framed ones to others, and those of others."""
        return bucket + 2 * bucket * (self.replicas - 1) // self.replicas


class StepWalk:
    """Follows the program of a step of one rank. offloads: whether gradients are in another memory than the weights."""

    def __init__(self, partition: Partition, traced: TracedModel, weights: RankWeights, *, offloads: bool) -> None:
        self._partition = partition
        self._traced = traced
        self._weights = weights
        self._offloads = offloads
        self._last = len(partition.model.layers) - 1

    def peak(self, actions: Sequence[Action], *, has_buckets: bool) -> StepPeak:
        """Follow the program of a step; return its peak.

        has_buckets: whether gradients lie in buffers that the mode keeps.
        """
        keeps_gradients = not self._offloads
        in_buckets = keeps_gradients and has_buckets
        memory = _StepMemory(self._last, self._weights.count.gradient_bytes if in_buckets else 0)
        last = {action.stage: action for action in actions if action.operation.completes}
        started = set[int]()
        """Stages whose gradients exist."""
        for action in actions:
            if not action.is_compute:
                continue
            if action.operation.phase == "forward":
                self._run_forward(action, memory)
                continue
            completes = action.operation.completes
            creates = keeps_gradients and completes and action.stage not in started and not has_buckets
            buckets = self._summed_buckets(action.stage, is_last=last[action.stage] is action)
            self._run_backward(action, memory, creates_gradients=creates, buckets=buckets)
            if completes:
                started.add(action.stage)
        return replace(memory.peak, on_host=memory.most_on_host)

    def _move(self, group: range, memory: _StepMemory, *, is_back: bool) -> None:
        """Move what a group of layers keeps to host memory, or back, if activations wait there."""
        if self._partition.offloads_activations:
            kept = self._traced.layers[group[-1]].kept
            memory.move(group[-1], -kept if is_back else kept)

    @property
    def _sums_passes(self) -> bool:
        """Whether gradients are summed over replicas after each backward, and whole ones are dropped then."""
        return self._partition.config.dp.sums_passes and self._partition.topology.replicas > 1

    def _summed_buckets(self, stage: int, *, is_last: bool) -> SummedBuckets:
        """Return the buckets that are summed behind a backward of a stage. is_last: whether it is its last one."""
        partition = self._partition
        replicas = partition.num_owners
        is_divided = partition.config.dp.shard != "none" and replicas > 1 and not self._offloads
        if not (is_divided and (is_last or self._sums_passes)):
            return SummedBuckets()
        early = [weight for weight in self._weights.stages[stage] if not weight.has_remote_lookups]
        buckets = split_weights(early, bucket_mb(partition.plugins.mode))
        sizes = [sum(weight.grad_bytes for weight in bucket) for bucket in buckets]
        return SummedBuckets(sizes, replicas, keeps_whole=not self._sums_passes)

    def _run_forward(self, action: Action, memory: _StepMemory) -> None:
        span = self._partition.layout.spans[action.stage]
        before = memory.activations, memory.logits
        memory.activations += entering_bytes(self._partition, span.first)
        copied, has_backward = None, span.last > self._partition.model.description.first_trained
        for group in layer_groups(self._partition, span):
            self._run_layers(group, self._traced.layers, memory)
            for layer in group[:-1]:  # of which backward starts from the inputs of the first
                memory.keep(layer, -self._traced.layers[layer].kept)
            if copied is not None and has_backward:  # while this group ran
                self._move(copied, memory, is_back=False)
            copied = group
        if not has_backward:
            memory.activations, memory.logits = before
        elif copied is not None:
            self._move(copied, memory, is_back=False)

    def _run_backward(
        self, action: Action, memory: _StepMemory, *, creates_gradients: bool, buckets: SummedBuckets
    ) -> None:
        """Follow a backward. buckets: of gradients that are summed behind it."""
        span, made = self._partition.layout.spans[action.stage], 0
        traces, groups = self._traced.again or self._traced.layers, [*layer_groups(self._partition, span)]
        ends, completes = {group[-1]: group for group in groups}, action.operation.completes
        if action.op is not Op.W:
            self._move(groups[-1], memory, is_back=True)
        for layer in reversed(range(*span)):
            if (group := ends.get(layer)) and group is not groups[0] and action.op is not Op.W:
                self._move(groups[groups.index(group) - 1], memory, is_back=True)
            if group and self._traced.again:
                self._run_layers(group, traces, memory)
                memory.keep(layer, -self._traced.layers[layer].kept)  # its output is counted in its trace
            trace = traces[layer]
            is_new = creates_gradients or (buckets.sizes and not buckets.keeps_whole)
            needed = trace.first_backward_peak if is_new else trace.backward_peak
            if action.op is Op.I:
                needed = trace.inputs_peak
            whole = buckets.in_flight(made)
            memory.gradients += whole
            memory.reach(layer, needed + self._traced.dequantized[layer] + entering_bytes(self._partition, layer + 1))
            memory.gradients -= whole
            early = (each for each in self._last_used(action.stage, layer) if not each.has_remote_lookups)
            made += sum(weight.grad_bytes for weight in early) * bool(buckets.sizes)
            if completes:
                memory.keep(layer, -trace.kept)
            if action.op in (Op.I, Op.W):
                memory.keep(layer, trace.kept_between * (1 if action.op is Op.I else -1))
            if creates_gradients:
                memory.gradients += self._layer_gradient_bytes(action.stage, layer)
        whole = buckets.in_flight(made)
        memory.gradients += whole
        memory.reach(span.first, 0)
        memory.gradients -= whole
        if completes:
            memory.activations -= entering_bytes(self._partition, span.first)

    def _run_layers(self, layers: range, traces: Sequence[LayerTrace], memory: _StepMemory) -> None:
        """Follow the forward of some layers."""
        for layer in layers:
            memory.reach(layer, traces[layer].forward_peak + self._traced.dequantized[layer])
            memory.keep(layer, traces[layer].kept)

    def _layer_gradient_bytes(self, stage: int, layer: int) -> int:
        """Return the bytes of the gradients that stay of the weights that a layer is the last of its stage to use."""
        own, replicas = self._last_used(stage, layer), self._partition.num_owners
        return sum(
            weight.grad_bytes // (replicas if self._sums_passes and not weight.has_remote_lookups else 1)
            for weight in own
        )

    def _last_used(self, stage: int, layer: int) -> list[Weight]:
        """Return the weights that a layer is the last of its stage to use."""
        model, specs = self._partition.model, self._partition.layout.specs
        later = {key for other in model.layers[layer + 1 : specs[stage].last] for key in other.parameters}
        keys = {*model.layers[layer].parameters} - later
        return [weight for weight in self._weights.stages[stage] if weight.key in keys]


def fetched_bytes(param: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a parameter on the meta device that are fetched: of a quantized one, without its scales."""
    if is_quantized(param):
        return param.numel() // (2 if type(param).__name__ == "Params4bit" else 1)
    return param.numel() * dtype.itemsize


def layer_groups(partition: Partition, span: StageSpec) -> Iterator[range]:
    """Yield the layers of a stage in groups of which backward starts from the inputs of the first one."""
    together = partition.plugins.recompute.layers or 1
    for first in range(*span, together):
        yield range(first, min(first + together, span.last))


def entering_bytes(partition: Partition, layer: int) -> int:
    """Return the bytes of the tensors that enter a layer, of a micro-batch."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in entering_tensors(partition, layer).values())


def entering_tensors(partition: Partition, layer: int) -> dict[str, TensorSpec]:
    """Return the tensors that enter a layer from the one before, of a micro-batch; none for the first layer."""
    if not 0 < layer < len(partition.model.layers):
        return {}
    shapes = partition.shapes
    return {
        name: TensorSpec(*shape.resolve(shapes.sizes, shapes.dtype), shape.dims)
        for name, shape in partition.model.description.boundary(layer).items()
    }
