"""Measure this machine with the layers of a run: what `rates` keeps. Layers that are equal are run once."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Self

import torch
from torch import Tensor, nn

from acsgd.config.options import Config
from acsgd.dp.sync import SingleReplicaSync
from acsgd.layers.composed import ComposedModel, Inputs
from acsgd.layers.description import BATCH
from acsgd.layers.skeleton import move_buffers, parameter_names, set_tied_parameter
from acsgd.optim.fetch import FetchedParam
from acsgd.optim.pages import PagePool
from acsgd.pp.chunked_loss import HeadLoss
from acsgd.pp.schedules.schedules import is_chosen
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.run.plan.layer_trace import RecordingModel, add_weights, alike
from acsgd.run.plan.layout import sizes_of
from acsgd.run.plan.limits import check_split
from acsgd.run.plan.model import RunModel, layers_cache
from acsgd.run.plan.partition import Partition
from acsgd.run.plan.plugins import has_masters
from acsgd.run.plan.rates import SPLIT, LayerTimes, Rates
from acsgd.run.plan.step_time import layer_operations
from acsgd.shards.load import LoadedLayer
from acsgd.streams import Streams, seed_generators

COPIED_BYTES, COPIES = 2**26, 8
"""Size and number of the tensors that are added to measure a memory."""
MIN_PASSES = 3


class _Clock:
    """Records the time of forward and backward in segments, seconds."""

    def __init__(self, streams: Streams, now: Callable[[], float]) -> None:
        self._streams = streams
        self._now = now
        self._start = 0.0

    def __enter__(self) -> Self:
        self.end_segment()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def end_segment(self) -> float:
        self._streams.record_event().synchronize()
        now = self._now()
        segment, self._start = now - self._start, now
        return segment


def measure_rates(partition: Partition, seconds: float) -> Rates:
    """Measure the device of a partition. seconds: time in which layers are run."""
    config, model, streams = partition.config, partition.model, partition.streams
    costs = layers_cache(config).costs(model.config, model.derived, sizes_of(config), device=streams.device.type)
    times = measure_layers(partition, seconds)
    total = sum(times.forward_s) + sum(times.backward_s)
    built = model.build(partition.shapes.dtype)
    operations_per_s = sum(map(sum, layer_operations(partition, costs, built))) / total
    name = "a GPU of this host" if streams.gpu else "the CPU of this host"
    return Rates(
        name,
        bool(streams.gpu),
        config.model.dtype,
        operations_per_s,
        memory_rate(streams),
        copy_rate(streams),
        layers=times,
    )


def layers_key(config: Config, model: RunModel) -> str:
    """Return what the times of layers depend on, besides the device."""
    options = config.model.dtype, config.model.recompute, config.model.attention, config.adapter.spec
    parts = [model.config.to_json_string(), model.description.frozen, sizes_of(config), options, torch.__version__]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def measure_layers(partition: Partition, seconds: float, now: Callable[[], float] = time.perf_counter) -> LayerTimes:
    """Run forward and backward of the layers of a model, with random weights, on one micro-batch after another.

    Two micro-batches are run at least 1 + MIN_PASSES times, and where backwards may be split, three times as often.
    Quantized layers are run without quantization. now: the clock; on a CPU, time.process_time leaves others out.
    """
    model, config = partition.model, partition.config
    layers, clock = model.description, _Clock(partition.streams, now)
    built = model._replace(quantization=None).build(partition.shapes.dtype)
    same = alike(built, layers)
    loaded = [LoadedLayer(layer, [], {}, {}) for layer in layers.layers if layer.index not in same]
    _check_memory(built, loaded, partition)
    seed_generators(0)
    _fill(built, {key for layer in loaded for key in layer.spec.parameters}, partition)
    composed = RecordingModel(built, layers, clock)
    stage = _open_stage(partition, composed, loaded)
    batch, labels = _random_batch(partition)
    passes: list[tuple[dict[int, float], dict[int, float]]] = []
    splits = _may_split(partition)
    end = time.perf_counter() + (seconds / 3 if splits else seconds)  # the ratio takes twice as long as these passes
    while len(passes) < MIN_PASSES + 1 or time.perf_counter() < end:
        passes += composed.run_two(stage, batch, labels, partition.shapes.sizes[BATCH])[1:]  # which adds gradients
    forward, backward = (
        {index: median(each[part].get(index, 0.0) for each in passes[1:]) for index in passes[0][0]} for part in (0, 1)
    )
    for index in sorted(same):
        forward[index], backward[index] = forward[index - 1], backward[index - 1]
    forward_s, backward_s = (tuple(part[layer.index] for layer in layers.layers) for part in (forward, backward))
    split = SPLIT
    if splits:
        stage.composed = ComposedModel(built, layers)
        split = _split_ratio(stage, batch, labels, clock, len(passes))
    return LayerTimes(layers_key(config, model), forward_s, backward_s, median(composed.contexts), split)


def _open_stage(partition: Partition, composed: ComposedModel, loaded: Sequence[LoadedLayer]) -> Stage:
    """Return a stage of some layers of a model, with the options of the run, that recomputes each layer by itself."""
    model, recompute, streams = partition.model, partition.plugins.recompute, partition.streams
    weights = add_weights(composed.model, model.description, loaded, has_masters=has_masters(partition.config))
    return Stage(
        composed,
        HeadLoss(
            model.task,
            label_smoothing=partition.config.optim.label_smoothing,
            logits_at_once=streams.logits_at_once,
        ),
        loaded,
        SingleReplicaSync(weights),
        targets=1,
        seed=0,
        recompute=recompute._replace(layers=min(recompute.layers, 1)),  # or one layer would take the time of a group
        first_trained=model.description.first_trained,
    )


def _may_split(partition: Partition) -> bool:
    """Return whether a schedule of the run, or one that it may choose, splits the backward of each layer."""
    config = partition.config
    if any(layer.replicated for layer in partition.model.layers):
        return False
    if partition.topology.stages == 1 or not is_chosen(config.pp.schedule):
        return partition.programs.splits_backward
    with contextlib.suppress(ValueError):
        check_split(config)
        return True
    return False


def _split_ratio(stage: Stage, batch: Inputs, labels: Tensor, clock: _Clock, count: int) -> float:
    """Return the time of backwards in two parts relative to that of whole ones; the second parts follow all first ones.

    Backwards in two parts go through the layers one by one, as those of stages that share no weight do, although a
    table that is both embedding and head is in this one twice. batch, labels: of a micro-batch; count: number of pairs
    of micro-batches.
    """
    times: tuple[list[float], list[float]] = ([], [])
    stage.graph_per_layer = True
    for splits in [False, True] * count:
        for micro in (0, 1):
            stage.forward(MicroBatch(0, micro, micro, tuple(range(len(labels))), splits), batch, {}, labels)
        clock.end_segment()
        for micro in (0, 1):
            if splits:
                stage.backward_input(micro, None)
            else:
                stage.backward(micro, None, last=False)
        for micro in (0, 1) if splits else ():
            stage.backward_weight(micro, last=False)
        times[splits].append(clock.end_segment())
    whole, split = map(median, times)
    return split / whole


def _check_memory(built: nn.Module, loaded: Sequence[LoadedLayer], partition: Partition) -> None:
    """Raise ValueError if the weights and gradients of some layers do not fit on the device."""
    streams, keys = partition.streams, {key for layer in loaded for key in layer.spec.parameters}
    numel = sum(built.get_parameter(key).numel() for key in keys)
    needed, memory = numel * (partition.shapes.dtype.itemsize + 8), streams.memory_bytes()
    if needed > memory:
        raise ValueError(
            f"layers cannot be measured: those of each kind need {needed / 2**30:.1f} GiB with their gradients, and "
            f"{memory / 2**30:.1f} GiB are here; give a run a pp.schedule, and acsgd plan a --device NAME"
        )


def _fill(built: nn.Module, keys: set[str], partition: Partition) -> None:
    """Give some parameters of a model random values on the device, in place."""
    device, dtype = partition.streams.device, partition.shapes.dtype
    for key, names in parameter_names(built).items():
        if key in keys:
            values = torch.empty(built.get_parameter(names[0]).shape, dtype=dtype, device=device).normal_(std=0.02)
            set_tied_parameter(built, names, nn.Parameter(values, key not in partition.model.description.frozen))
    move_buffers(built, device)


def _random_batch(partition: Partition) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and labels of a micro-batch."""
    model, sizes, device = partition.model, partition.shapes.sizes, partition.streams.device
    tokens = model.config.get_text_config().vocab_size
    batch = {
        name: torch.randint(tokens, [sizes[dim] for dim in dims], device=device)
        if name.endswith("input_ids")
        else torch.ones([sizes[dim] for dim in dims], dtype=torch.long, device=device)
        for name, dims in model.inputs.items()
    }
    labels = torch.zeros([sizes[size] for size in model.task.model_class.labels], dtype=torch.long, device=device)
    return batch, labels


def memory_rate(streams: Streams, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the bytes per second that operations on single elements read and write. now: see `measure_layers`."""
    x, y = (torch.ones(COPIED_BYTES // 4, device=streams.device) for _ in range(2))
    return 3 * x.nbytes / _time_of(lambda: x.add_(y), streams, now)


def copy_rate(streams: Streams, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the bytes per second at which offloaded parameters are fetched from host memory to the device.

    now: see `measure_layers`.
    """
    host = streams.host_buffer(COPIED_BYTES).zero_()
    values = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=streams.device)
    param = FetchedParam("", nn.Parameter(values, False), PagePool())

    def fetch() -> None:
        param.release()
        param.allocate()
        param.values.copy_(host, non_blocking=True)

    return COPIED_BYTES / _time_of(fetch, streams, now)


def _time_of(work: Callable[[], object], streams: Streams, now: Callable[[], float]) -> float:
    """Return the median time of an operation on the device, without its first run."""
    clock, times = _Clock(streams, now), list[float]()
    for _ in range(COPIES + 1):
        clock.end_segment()
        work()
        times.append(clock.end_segment())
    return median(times[1:])
