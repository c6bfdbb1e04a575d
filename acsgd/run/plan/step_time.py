"""Time of a step by its parts, and the bytes on each link, as the simulator of the schedule predicts them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.dp.exchange.buckets import bucket_mb
from acsgd.dp.modes import compression, measured_work, overlaps_next_step
from acsgd.layers.description import LayerSpec
from acsgd.pp.recompute import Recompute, attention_modules
from acsgd.pp.schedules.programs import RankPrograms
from acsgd.pp.schedules.simulate import Cost, Simulator
from acsgd.pp.wire.ladder import BACKWARD, FORWARD, NO_CACHE, NO_CACHE_BACKWARD, Rung
from acsgd.run.plan.memory import PlanCache
from acsgd.run.plan.partition import Partition
from acsgd.run.plan.rates import ADAMW_BYTES, DISK_BYTES_PER_S, SPLIT, LinkRate, Rates
from acsgd.run.plan.step_memory import RankWeights, fetched_bytes, layer_groups
from acsgd.shards.plan import training_costs

CHOSEN = "fixpoint:bits=8"
"""Codec that is planned where pp.compress chooses."""
MEASURED = (
    *FORWARD,
    *NO_CACHE,
    Rung("transform:step=0.15", 0.0088, 2.33),
    Rung("delta:step=0.5", 0.0004, 3.12),
    Rung("delta:step=2.5", 0.0227, 1.05),
    Rung("delta:step=0.2,transform=true", 0.0006, 2.64),
)
"""Codecs of activations whose bits after entropy coding are in docs/measurements/stages.md."""
OF_GRADIENTS = (
    *BACKWARD,
    *NO_CACHE_BACKWARD,
    Rung("delta:step=1,transform=true", 0.0032, 1.41),
    Rung("delta:step=0.5,transform=true", 0.0011, 2.12),
)
"""The same of activation gradients. Those of other kinds are planned with the bits of activations, and the reverse."""
MAX_MICROS = 32
"""Number of micro-batches that are simulated at most, unless more fill the pipeline; each more takes as long as those
before."""
STEP_BYTES, COPY_BYTES, SUM_BYTES = 16, 4, 8
"""Bytes that clipping and the optimizer read and write of a gradient, of an fp32 master that is copied, and of a sum of
gradients that is added to."""
ROUNDED_WORK, AVERAGED_WORK = 2.0, 3.5
"""Time beyond that of AdamW's step that it takes to round weights without masters, and to average weights, in multiples
of AdamW's; see docs/measurements/speed.md, "Optimizers"."""
COPY_PASSES = 3
"""Times that the bytes of a copy cross the memory of a host: what is copied, and what is written over, which the core
reads first."""


@dataclass(frozen=True)
class LinkLoad:
    """What a link carries in a step, in one direction."""

    name: str
    nbytes: float
    busy_s: float


@dataclass(frozen=True)
class PlannedStep:
    """Predicted time of a step, seconds, by parts that add up to it."""

    compute_s: float
    """Forwards and backwards of the rank that computes longest."""
    bubble_s: float
    """Waits of that rank for other stages, if links took no time."""
    messages_s: float
    """By how much messages between stages make the step longer."""
    replicas_s: float
    """The same of what replicas exchange and all ranks report, and the time of what dp.mode computes."""
    update_s: float
    """Clipping and the step of the optimizer; of offloaded gradients, parameters and activations,
    also what computation does not hide."""
    links: tuple[LinkLoad, ...] = ()

    @property
    def total_s(self) -> float:
        """Time of the step."""
        return self.compute_s + self.bubble_s + self.messages_s + self.replicas_s + self.update_s


class StepPlanner:
    """Predicts steps of one model on devices and links with given rates.

    built: the model on the meta device; costs: of its layers by `layer_costs` with micro-batches of `micro` sequences;
    link: between ranks; default: that of `rates`, else messages take no time. cache: of plans of the same model.
    """

    def __init__(
        self,
        built: PreTrainedModel,
        costs: Sequence[float],
        micro: int,
        rates: Rates,
        link: LinkRate | None,
        cache: PlanCache | None = None,
    ) -> None:
        self._built = built
        self._costs = costs
        self._micro = micro
        self._rates = rates
        self._link = link or rates.link or LinkRate(math.inf)
        self._cache = cache or PlanCache()
        self._simulated: dict[str, list[float]] = {}

    @property
    def has_layer_times(self) -> bool:
        """Whether times of layers were measured, so that `plan` needs a key."""
        return self._rates.layers is not None

    def plan(
        self, partition: Partition, key: str, saved: Sequence[int] = (), *, splits_waits: bool = True
    ) -> PlannedStep:
        """Return the time of a step. key: `measure.layers_key` of the partition.

        saved: bytes of activations of a micro-batch that each rank of a pipeline offloads; default: none. splits_waits:
        whether to report waits for messages and the pipeline bubble separately, which needs a second simulation.
        False = all idle time counts as messages.
        """
        sizes, link = message_bytes(partition), self._link
        forward, backward = self._stage_times(partition, key, sizes)
        micros, placement = partition.micros_per_replica, partition.layout.placement
        ranks = [placement.stages_of(rank) for rank in range(placement.ranks)]
        split = SPLIT if self._rates.layers is None else self._rates.layers.split
        longer, parts = 1 + (split - 1) * partition.programs.split_share(micros), [split / 2 * s for s in backward]
        compute_s = micros * max(sum(forward[stage] + longer * backward[stage] for stage in stages) for stages in ranks)
        messages, gradients = ([size / link.bytes_per_s for size in of_direction] for of_direction in sizes)
        rows = row_bytes(partition, self._built) / link.bytes_per_s
        free = Cost(forward, backward, weight=parts, inputs=parts)
        plain = max(self._ends_of(partition, free)) if splits_waits else compute_s
        cost = Cost(forward, backward, messages, gradients, link.delay_s, rows, rows, weight=parts, inputs=parts)
        ends = self._ends_of(partition, cost)
        last = [sum(backward[stage] for stage in stages) for stages in ranks]
        exchanges, exposed = self.exchanges(partition, ends, last)
        reports_s = link.delay_s * (partition.topology.world_size > 1)
        done = max(end + late for end, late in zip(ends, exposed, strict=True)) + reports_s
        works_s = max(self._mode_s(partition, each) for each in self.weights(partition))
        loads = self._loads(partition, sizes, micros) + [
            LinkLoad(f"replicas of stage rank {rank}", each.nbytes, each.busy_s)
            for rank, each in enumerate(exchanges)
            if each.nbytes
        ]
        return PlannedStep(
            compute_s,
            max(0.0, plain - compute_s),
            max(0.0, max(ends) - plain),
            done - max(ends) + works_s,
            max(self._update_s(partition, each, compute_s) for each in self.weights(partition))
            + max(
                self._fetch_s(partition.seen_from(rank), key, compute_s, nbytes)
                for rank, nbytes in zip_longest(ranks_of(partition), saved, fillvalue=0)
            ),
            tuple(loads),
        )

    def _ends_of(self, partition: Partition, cost: Cost) -> list[float]:
        """Return when each rank ends its computations. Runs with equal computations and messages are simulated once."""
        key = repr((partition.seen_from(0).programs, partition.micros_per_replica, cost))
        if key not in self._simulated:
            self._simulated[key] = ends_of(partition, partition.micros_per_replica, cost)
        return self._simulated[key]

    def exchanges(
        self,
        partition: Partition,
        ends: Sequence[float],
        last: Sequence[float],
        links: Sequence[LinkRate] | None = None,
    ) -> tuple[list[LinkLoad], list[float]]:
        """Return what each rank of a pipeline sends to other replicas, and how long it waits for that.

        ends: when each rank ends its computations; last: times of the backwards of its last micro-batch; links: to the
        other replicas, by rank of the pipeline; default: that between all ranks.
        """
        weights, micros = self.weights(partition), partition.micros_per_replica
        links = links or [self._link] * len(weights)
        loads = [self._exchange(partition, *each, micros) for each in zip(weights, links, strict=True)]
        exposed = [_exposed(partition, *each) for each in zip(loads, ends, last, weights, strict=True)]
        exposed = [late + self._within_s(partition, each, micros) for late, each in zip(exposed, weights, strict=True)]
        if (times := self._rates.messages) is not None and times.delays_layers(partition.local_world_size):
            works = [self._cpu_s(partition, of, each.nbytes) for of, each in zip(weights, loads, strict=True)]
            exposed = [*map(max, exposed, works)]
        return loads, exposed

    def weights(self, partition: Partition) -> list[RankWeights]:
        """Return the weights of each rank of a pipeline."""
        return [self._cache.weights(partition.seen_from(rank), self._built) for rank in ranks_of(partition)]

    def _stage_times(
        self, partition: Partition, key: str, sizes: Sequence[Sequence[float]]
    ) -> tuple[list[float], list[float]]:
        """Return the times of forward and backward of each stage, with those of its context and its ends of messages.

        key: see `plan`; sizes: see `message_bytes`. On a GPU's host, the ends are hidden.
        """
        layers = self._rates.layers
        context_s = layers.context_s if layers is not None and layers.key == key else 0.0
        times = None if self._rates.on_gpu else self._rates.messages
        rank_of, found = partition.layout.placement.rank_of, list[list[float]]()
        for of_layers, of_boundaries in zip(self._layer_times(partition, key), sizes, strict=True):
            of_stages = [sum(of_layers[slice(*spec)]) for spec in partition.layout.specs]
            for boundary, nbytes in enumerate(of_boundaries):
                if times is not None and nbytes and rank_of(boundary) != rank_of(boundary + 1):
                    for stage in (boundary, boundary + 1):
                        of_stages[stage] += times.end_s + nbytes * times.end_byte_s
            found.append(of_stages)
        forward, backward = found
        return [context_s + each for each in forward], backward

    def _layer_times(self, partition: Partition, key: str) -> tuple[Sequence[float], Sequence[float]]:
        """Return the times of forward and backward of each layer: measured ones, or estimated from costs."""
        measured = self._rates.layers
        if measured is not None and measured.key == key:
            return measured.forward_s, measured.backward_s
        scale = partition.config.pp.micro / self._micro / self._rates.operations_per_s
        forward, backward = layer_operations(partition, self._costs, self._built)
        return [scale * each for each in forward], [scale * each for each in backward]

    def _loads(self, partition: Partition, sizes: Sequence[Sequence[float]], micros: int) -> list[LinkLoad]:
        """Return what links between stages carry. sizes: see `message_bytes`."""
        rank_of, loads = partition.layout.placement.rank_of, list[LinkLoad]()
        for boundary, of_both in enumerate(zip(*sizes, strict=True)):
            for size, arrow in zip(of_both, ("->", "<-"), strict=True):
                if size and rank_of(boundary) != rank_of(boundary + 1):
                    name, nbytes = f"stages {boundary} {arrow} {boundary + 1}", micros * size
                    loads.append(LinkLoad(name, nbytes, nbytes / self._link.bytes_per_s))
        return loads

    def _exchange(self, partition: Partition, weights: RankWeights, link: LinkRate, micros: int) -> LinkLoad:
        """Return what a rank sends to other replicas in a step, and its time."""
        config, replicas = partition.config, len(partition.domains)
        trained = sum(weight.master.numel() for weight in chain.from_iterable(weights.stages.values()))
        share, divides_all = (replicas - 1) / replicas, not partition.divides_in_domains
        nbytes = 2 * share * 4 * trained / compression(config.dp.mode)
        if config.dp.shard != "none" and divides_all:
            passes = micros if config.dp.sums_passes else 1
            gradients = passes * 4 / compression(config.dp.mode)
            nbytes = share * trained * (gradients + partition.shapes.dtype.itemsize)
        delay_s = 2 * (replicas - 1) * link.delay_s if nbytes else 0.0
        if config.dp.shard == "weights" and divides_all:  # for each forward and each backward, from all at once
            gathered = 2 * micros * weights.count.weight_bytes(partition.shapes.dtype)
            nbytes = share * (trained * micros * 4 / compression(config.dp.mode) + gathered)
            groups = -(-len(partition.layout.layers) // (partition.plugins.recompute.layers or 1))
            delay_s = 2 * micros * groups * link.delay_s * (replicas > 1)
        busy_s = max(nbytes / link.bytes_per_s + delay_s, self._cpu_s(partition, weights, nbytes))
        return LinkLoad("replicas", nbytes, busy_s)

    def _cpu_s(self, partition: Partition, weights: RankWeights, nbytes: float) -> float:
        """Return the CPU time of a process that sends some bytes of gradients and weights to other replicas.

        As dp.mode was measured here, else by the bytes; 0 if it is not known. nbytes: of a replica, or of a domain.
        """
        times = self._rates.messages
        if times is None or self._rates.on_gpu or not nbytes or partition.plugins.mode.exchanges != "gradients":
            return 0.0
        if times.mode == partition.config.dp.mode:
            return times.mode_param_s * _exchanged_params(partition, weights)
        if partition.divides_in_domains:
            return nbytes / partition.num_owners * times.sum_byte_s
        return nbytes * (times.sum_byte_s if partition.config.dp.shard == "none" else times.part_byte_s)

    def _within_s(self, partition: Partition, weights: RankWeights, micros: int) -> float:
        """Return the CPU time of what a replica sends to those that divide the weights with it in one of several
        domains: gradients, and weights. 0 if it is not known."""
        times, config = self._rates.messages, partition.config
        if times is None or self._rates.on_gpu or not partition.divides_in_domains:
            return 0.0
        trained = sum(weight.master.numel() for weight in chain.from_iterable(weights.stages.values()))
        sent = 2 * micros * weights.count.weight_bytes(partition.shapes.dtype)
        if config.dp.shard != "weights":
            sent = trained * partition.shapes.dtype.itemsize
        gradients = 4 * trained * (micros if config.dp.sums_passes else 1)
        return (1 - 1 / partition.num_owners) * (gradients + sent) * times.part_byte_s

    def _mode_s(self, partition: Partition, weights: RankWeights) -> float:
        """Return the time of what dp.mode computes in a step: as it was measured here, else as in the docs.

        0 if it computes with gradients, and was measured: then it is part of the exchange, see `_cpu_s`.
        """
        if len(partition.domains) == 1:
            return 0.0
        rates, mode, count = self._rates, partition.config.dp.mode, _exchanged_params(partition, weights)
        if rates.messages is not None and rates.messages.mode == mode and not rates.on_gpu:
            return 0.0 if partition.plugins.mode.exchanges == "gradients" else rates.messages.mode_param_s * count
        return measured_work(mode) * ADAMW_BYTES * count / rates.bytes_per_s

    def _update_s(self, partition: Partition, weights: RankWeights, compute_s: float) -> float:
        """Return the time of the update. compute_s: of forwards and backwards, behind which gradients are offloaded."""
        owned = partition.num_owners if partition.config.dp.shard != "none" else 1
        nbytes = 0.0
        for weight in chain.from_iterable(weights.stages.values()):
            state = sum(
                each.nbytes(weight.master, is_hidden_matrix=weight.is_hidden_matrix)
                for each in partition.plugins.optimizer.states
            )
            nbytes += STEP_BYTES * weight.master.numel() + 2 * (state + weight.master.nbytes)
            if weight.master is not weight.param:
                nbytes += COPY_BYTES * weight.master.numel() + weight.param.nbytes
        trained = [weight.param for weight in chain.from_iterable(weights.stages.values())]
        work = ROUNDED_WORK * (partition.config.optim.masters == "none")
        work += AVERAGED_WORK * partition.plugins.optimizer.averages
        nbytes += work * ADAMW_BYTES * sum(param.numel() for param in trained)
        micros, rates = partition.micros_per_replica, self._rates
        if partition.config.optim.offload == "none":
            return nbytes / owned / rates.bytes_per_s
        if not rates.on_gpu:  # the thread that computes copies each gradient, the first one once more, to the master's
            copied = COPY_PASSES * (micros + 1) * sum(param.nbytes for param in trained)
            return (nbytes / owned + copied) / rates.bytes_per_s
        added = micros * sum(param.nbytes + SUM_BYTES * param.numel() for param in trained)
        return nbytes / owned / rates.host_bytes_per_s + max(0.0, added / rates.host_bytes_per_s - compute_s)

    def _fetch_s(self, partition: Partition, key: str, compute_s: float, saved: int) -> float:
        """Return the time of a rank's fetches of offloaded parameters and activations that is not hidden.

        A GPU copies behind its computations, but parameters that are read from files only once a layer waits for them.
        A CPU copies in the thread that computes, but reads to where parameters are used. compute_s: as `_update_s`;
        key, saved: see `plan`.
        """
        rates, micros = self._rates, partition.micros_per_replica
        fetches = micros * (2 + partition.programs.split_share(micros))
        nbytes = self._fetched_bytes(partition, range(len(partition.model.layers)))
        params_s, saved_s = (each / rates.host_bytes_per_s for each in (fetches * nbytes, 2 * micros * saved))
        if partition.config.model.offload == "disk":
            copies_s = params_s + max(0.0, saved_s - compute_s) if rates.on_gpu else 0.0
            return copies_s + micros * self._reads_s(partition, key)
        return max(0.0, params_s + saved_s - compute_s) if rates.on_gpu else params_s

    def _reads_s(self, partition: Partition, key: str) -> float:
        """Return how long a rank waits in a micro-batch for parameters that are read from files. key: see `plan`.

        A thread reads those of the first group of layers of a pass before it, and those of each other one while the
        group before it runs, unless the thread has no core of its own.
        """
        forward, backward = self._layer_times(partition, key)
        split = partition.programs.split_share(partition.micros_per_replica)
        passes = [(forward, 1, 1.0), (backward, -1, 1 - split), ([each / 2 for each in backward], -1, 2 * split)]
        bytes_per_s = min(DISK_BYTES_PER_S, self._rates.host_bytes_per_s)
        messages = self._rates.messages
        hides = messages is None or not messages.delays_layers(partition.local_world_size)
        waits_s = 0.0
        for span in partition.layout.spans.values():
            groups = [*layer_groups(partition, span)]
            reads = [self._fetched_bytes(partition, group) / bytes_per_s for group in groups]
            for of_layers, order, count in passes:
                runs = [hides * sum(of_layers[group.start : group.stop]) for group in groups]
                first, *others = reads[::order]
                late = (max(0.0, read - run) for read, run in zip(others, runs[::order], strict=False))
                waits_s += count * (first + sum(late))
        return waits_s

    def _fetched_bytes(self, partition: Partition, layers: range) -> int:
        """Return the size of the parameters of some layers that a rank fetches."""
        used = {key for layer in partition.model.layers[layers.start : layers.stop] for key in layer.parameters}
        keys, dtype = used & partition.offloaded, partition.shapes.dtype
        return sum(fetched_bytes(self._built.get_parameter(key), dtype) for key in keys)


def ranks_of(partition: Partition) -> Sequence[int]:
    """Return the ranks of a pipeline, first to last."""
    return partition.topology.ranks_along("pipeline")


def message_bytes(partition: Partition) -> tuple[list[float], list[float]]:
    """Return the sizes of the messages of a micro-batch by boundary: of activations, and of their gradients."""
    pp, first = partition.config.pp, partition.programs.first_backward
    specs = (CHOSEN, CHOSEN) if pp.compress else (pp.forward, pp.backward)
    sizes: tuple[list[float], list[float]] = ([], [])
    for boundary, tensors in enumerate(partition.shapes.boundaries):
        floats = [spec for spec in tensors.values() if spec.dtype.is_floating_point]
        sizes[0].append(_rung(specs[0], MEASURED, OF_GRADIENTS).message_bytes([*tensors.values()]))
        sizes[1].append(_rung(specs[1], OF_GRADIENTS, MEASURED).message_bytes(floats) * (boundary >= first))
    return sizes


def row_bytes(partition: Partition, built: PreTrainedModel) -> float:
    """Return the size of the rows of tied tables that a micro-batch uses, at most. built: on the meta device."""
    total = 0.0
    for tied in partition.tied:
        table = built.get_parameter(tied.key)
        for inputs in tied.lookups.values():
            rows = min(len(table), partition.shapes.max_lookups(inputs, 1))
            total += rows * table[0].numel() * partition.shapes.dtype.itemsize
    return total


def layer_operations(
    partition: Partition, costs: Sequence[float], built: PreTrainedModel
) -> tuple[list[float], list[float]]:
    """Return the operations of forward and of backward of each layer.

    costs: of layers that are trained whole; built: the model on the meta device.
    """
    layers = partition.model.layers
    forward = [
        cost / (1 + (layer.index > 0) + bool(layer.parameters)) for cost, layer in zip(costs, layers, strict=True)
    ]
    whole = training_costs(costs, partition.model.description)
    backward = [both - ahead for both, ahead in zip(whole, forward, strict=True)]
    recompute, sequence = partition.plugins.recompute, partition.shapes.sizes["sequence"]
    again = [_recomputed_share(recompute, layer, built, sequence) for layer in layers]
    backward = [back + share * ahead * (back > 0) for back, share, ahead in zip(backward, again, forward, strict=True)]
    return forward, backward


def _recomputed_share(recompute: Recompute, layer: LayerSpec, built: PreTrainedModel, sequence: int) -> float:
    """Return the fraction of a layer's forward that its backward repeats: of attention, that of its products."""
    if not recompute.attention or layer.block is None:
        return float(recompute.layers > 0)
    return attention_share(built.get_submodule(layer.block), built.config, sequence)


def attention_share(block: nn.Module, config: PreTrainedConfig, sequence: int) -> float:
    """Return the fraction of the operations of a block's forward that its attention modules have.

    A token is multiplied by all parameters, and in attention with the keys and values of `sequence` tokens; these are
    left out of a model whose config names no heads.
    """
    config, modules = config.get_text_config(), [*attention_modules(block)]
    heads = getattr(config, "num_attention_heads", 0)
    head = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    scores = len(modules) * 2 * sequence * heads * head
    whole, attention = (
        sum(param.numel() for module in each for param in module.parameters()) for each in ([block], modules)
    )
    return (attention + scores) / (whole + scores)


def _rung(spec: str, *tables: Sequence[Rung]) -> Rung:
    """Return the codec with the mean bits that were measured of its kind with the nearest step.

    Of the first table that has some; without bits if none has.
    """
    kind, step = _kind_and_step(spec)
    for rungs in tables:
        measured = [(*_kind_and_step(each.spec), each.bits) for each in rungs if each.bits]
        alike = {math.log(of / step): bits for of_kind, of, bits in measured if of_kind == kind and step}
        if alike:
            return Rung(spec, 0.0, alike[min(alike, key=abs)])
    return Rung(spec, 0.0)


def _kind_and_step(spec: str) -> tuple[tuple[type, bool, str], float]:
    """Return what the bits of a codec with a quantization step depend on: its kind and the step; 0 = it has none."""
    codec = Rung(spec, 0.0).codec
    kind = type(codec), getattr(codec, "transform", False), getattr(codec, "rounding", "nearest")
    return kind, getattr(codec, "step", 0.0)


def _exchanged_params(partition: Partition, weights: RankWeights) -> float:
    """Return of how many trained parameters a replica exchanges gradients or updates with other domains."""
    trained = sum(weight.master.numel() for weight in chain.from_iterable(weights.stages.values()))
    return trained / partition.num_owners if partition.divides_in_domains else trained


def _exposed(partition: Partition, exchange: LinkLoad, step_s: float, backward_s: float, weights: RankWeights) -> float:
    """Return the time of an exchange that is not hidden.

    step_s: of the computations of a step; backward_s: of those of the backward of the last micro-batch of the rank.
    """
    if partition.plugins.mode.exchanges != "gradients":
        return max(0.0, exchange.busy_s - step_s * overlaps_next_step(partition.plugins.mode))
    if partition.divides_in_domains:  # once the last gradient is summed within the domain
        return exchange.busy_s
    trained = [weight.grad_bytes for weight in chain.from_iterable(weights.stages.values())]
    buckets = max(1, math.ceil(sum(trained) / (1e6 * bucket_mb(partition.plugins.mode))))
    passes, gathered = 1, 0.0
    if partition.config.dp.shard == "weights":  # each layer's weights travel while the one before it runs
        return max(exchange.busy_s / len(partition.layout.layers), exchange.busy_s - step_s)
    if partition.config.dp.shard != "none":
        passes = partition.micros_per_replica if partition.config.dp.sums_passes else 1
        itemsize = partition.shapes.dtype.itemsize
        gathered = exchange.busy_s * itemsize / (itemsize + 4 * passes)
    reduced = (exchange.busy_s - gathered) / passes
    return gathered + passes * max(reduced / buckets, reduced - backward_s * (1 - 1 / buckets))


def ends_of(partition: Partition, micros: int, cost: Cost) -> list[float]:
    """Return when each rank of a pipeline has computed all of its gradients, and has those of its tied tables."""
    ranks, lead = partition.topology.stages, getattr(partition.plugins.schedule, "lead", 1)
    fewer = max(-(-MAX_MICROS // 2 // ranks), lead) * ranks  # at least as many as fill the pipeline
    if micros <= max(MAX_MICROS, 2 * fewer):
        return _simulated_ends(partition, micros, cost)
    some, more = (_simulated_ends(partition, count, cost) for count in (fewer, 2 * fewer))
    return [b + (b - a) * (micros - 2 * fewer) / fewer for a, b in zip(some, more, strict=True)]


@functools.lru_cache(maxsize=8)  # a search simulates the same program with many costs
def _simulator(programs: RankPrograms, micros: int) -> Simulator:
    return Simulator(programs.program(micros))


def _simulated_ends(partition: Partition, micros: int, cost: Cost) -> list[float]:
    timeline = _simulator(replace(partition.programs, rank=0), micros).run(cost)
    return [
        float(max(timeline.spans[action].end for action in actions if action.operation.kind in ("compute", "reduce")))
        for actions in timeline.program
    ]
