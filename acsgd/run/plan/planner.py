"""Plans of a run, and of others that differ in a few options: memory, time of a step, what fits and what is fastest."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple, Self

import torch
from transformers import PreTrainedModel

from acsgd.codecs.identity import DTYPES
from acsgd.config.options import Config, Offload, OptimOffload, ShardKind
from acsgd.host_memory import host_memory
from acsgd.launch import Launch
from acsgd.pp.schedules.schedules import CANDIDATES
from acsgd.run.plan.layout import sizes_of
from acsgd.run.plan.measure import layers_key
from acsgd.run.plan.memory import PlanCache, RankMemory, least_memory, plan_memory
from acsgd.run.plan.model import RunModel, layers_cache
from acsgd.run.plan.partition import Partition, divide_model, open_grid, topology_of
from acsgd.run.plan.plugins import has_masters
from acsgd.run.plan.rates import LinkRate, Rates
from acsgd.run.plan.step_memory import TracedModel, layer_groups, trace_model
from acsgd.run.plan.step_time import PlannedStep, StepPlanner
from acsgd.streams import Streams
from acsgd.tasks import check_options

GIB = 2**30
PROCESS_BYTES = GIB
"""What a process with its libraries needs besides, in host memory and, as context and workspaces, on its GPU."""
SMALL = 1 / 8
"""Fraction of a memory that weights and gradients take in a run that is not planned at its start."""
MARGIN = 1.1
"""Planned memory relative to that which there is, from which on a run is refused."""
CODEC = "fixpoint:bits=8"
"""Codec of alternatives, in both directions."""
SHARDS: tuple[ShardKind, ...] = ("none", "optimizer", "gradients", "weights")
"""Values of dp.shard of alternatives."""
RECOMPUTED = ("attention", "layers", "every:2")
"""Values of model.recompute of alternatives, fastest first."""
GAIN = 1.02
"""Ratio of step times from which on a run is called faster."""


class Alternative(NamedTuple):
    """A run that differs in a few options."""

    flags: tuple[str, ...]
    """Flags that change the planned run into this one."""
    step: PlannedStep


class RunPlanner:
    """Plans of runs of one model. The model is traced once per kind of micro-batch.

    world, per_host: number of processes, in all and on each host; sequences: number in the data, None if not known.
    """

    def __init__(
        self,
        config: Config,
        world: int,
        model: RunModel,
        *,
        on_gpu: bool,
        sequences: int | None = None,
        per_host: int = 1,
    ) -> None:
        self._config = config
        self.world = world
        self._model = model
        self._per_host = per_host
        self.on_gpu = on_gpu
        self.sequences = sequences
        self.host_bytes: int | None = None
        """Memory of each host, which its processes share if their devices are GPUs; None = not compared."""
        self._traced: dict[tuple[int, str, bool], TracedModel] = {}
        self._cache = PlanCache()

    def on(self, world: int, *, per_host: int) -> Self:
        """Return a planner of the same run on other processes, which shares what is traced."""
        other = copy.copy(self)
        other.world, other._per_host = world, per_host
        return other

    def describe(self) -> str:
        """Return the model and the ranks in words."""
        stages = self._config.pp.stages
        device = "GPU" if self.on_gpu else "CPU"
        return f"{self._model.describe_size()}, on {stages} stages x {self.world // stages} replicas, {device}"

    def needed(self, rank: RankMemory) -> int:
        """Return the memory that a process needs where its tensors are: on its GPU, or on the host."""
        return (rank.on_device if self.on_gpu else rank.total) + PROCESS_BYTES

    def needed_on_host(self, rank: RankMemory) -> int:
        """Return the host memory of a process whose device is a GPU, with the copy of offloaded state for a checkpoint.

        That of a run without offloaded state is not counted.
        """
        copied = rank.masters + rank.moments if rank.offloaded else 0
        return rank.on_host + copied + PROCESS_BYTES

    def partition(self, config: Config) -> Partition:
        """Divide the model. Raises ValueError if the run is not possible."""
        check_options(config)
        config = replace(config, pp=replace(config.pp, hosts=None))  # which changes no rank of a pipeline
        grid = open_grid(config, Launch(world_size=self.world, local_world_size=self._per_host))
        streams = Streams(torch.device("cuda" if self.on_gpu else "cpu"))
        costs = self.costs if config.pp.blocks is None and config.pp.stages > 1 else None
        return divide_model(config, grid, self._model, streams, costs, self._built)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Cost of each layer with micro-batches of the planned run, see `layer_costs`."""
        device, sizes = "cuda" if self.on_gpu else "cpu", sizes_of(self._config)
        return layers_cache(self._config).costs(self._model.config, self._model.derived, sizes, device=device)

    def memory(self, config: Config) -> list[RankMemory]:
        """Return the memory of the ranks of a pipeline, first to last. Raises ValueError if the run is not possible."""
        return [*self._memory(config, self.partition(config))]

    def _memory(self, config: Config, partition: Partition) -> Iterator[RankMemory]:
        return plan_memory(partition, self._trace(config, partition), self.sequences, self._cache)

    def _trace(self, config: Config, partition: Partition) -> TracedModel:
        key = config.pp.micro, config.model.recompute, partition.programs.splits_backward
        if key not in self._traced:
            self._traced[key] = trace_model(partition, self._built)
        return self._traced[key]

    def needed_on_hosts(self, ranks: Sequence[RankMemory]) -> list[int]:
        """Return the memory that each host needs for its processes, whose devices are GPUs. ranks: of a pipeline."""
        of_all = [*map(self.needed_on_host, ranks)] * (self.world // len(ranks))
        return [sum(of_all[first : first + self._per_host]) for first in range(0, self.world, self._per_host)]

    def fits(self, config: Config, limit: int | None) -> bool:
        """Return whether each process needs at most `limit` bytes, and each host what it has.

        Raises ValueError if the run is not possible.
        """
        if limit is None and self.host_bytes is None:
            return True
        partition, most = self.partition(config), math.inf if limit is None else limit
        # what exceeds the limit without a trace needs none, and what does without an update no plan of it
        for trace in (lambda: TracedModel(self._built, (), {}), lambda: self._trace(config, partition)):
            if least_memory(partition, trace(), self._cache) + PROCESS_BYTES > most:
                return False
        ranks = [*self._memory(config, partition)]
        on_hosts = max(self.needed_on_hosts(ranks)) if self.on_gpu else 0
        return max(map(self.needed, ranks)) <= most and on_hosts <= (self.host_bytes or math.inf)

    @cached_property
    def _built(self) -> PreTrainedModel:
        return self._model.build(DTYPES[self._config.model.dtype])

    def step_planner(self, rates: Rates, link: LinkRate | None) -> StepPlanner:
        """Return what predicts the time of a step."""
        return StepPlanner(self._built, self.costs, self._config.pp.micro, rates, link, self._cache)

    def step(self, config: Config, steps: StepPlanner, *, splits_waits: bool = True) -> PlannedStep:
        """Return the time of a step. Raises ValueError if the run is not possible. splits_waits: see `StepPlanner`."""
        partition = self.partition(config)
        saved = self._saved_bytes(config, partition) if partition.offloads_activations else ()
        key = self.key(config) if steps.has_layer_times else ""
        return steps.plan(partition, key, saved, splits_waits=splits_waits)

    def _saved_bytes(self, config: Config, partition: Partition) -> list[int]:
        """Return the bytes of activations of a micro-batch that each rank of a pipeline moves to host memory."""
        layers = self._trace(config, partition).layers
        ranks = [partition.seen_from(rank) for rank in partition.topology.ranks_along("pipeline")]
        return [
            sum(layers[group[-1]].kept for span in each.layout.spans.values() for group in layer_groups(each, span))
            for each in ranks
        ]

    def key(self, config: Config) -> str:
        """Return what the times of layers depend on."""
        return layers_key(config, self._model)

    def first_that_fits(self, limit: int | None) -> tuple[str, ...] | None:
        """Return the flags of the nearest run that fits: with less changed, and then with fewer stages."""
        for flags, config in self.smaller():
            try:
                if self.fits(config, limit):
                    return flags
            except ValueError:
                continue
        return None

    def smaller(self) -> Iterator[tuple[tuple[str, ...], Config]]:
        """Yield runs that need less memory of the device, nearest first, with the flags that make them.

        Where the memory of hosts is compared, then those with fewer stages, which have fewer activation caches.
        """
        config, world = self._config, self.world
        numbers = [n for n in range(1, world + 1) if world % n == 0]
        more = [n for n in numbers if n % config.pp.stages == 0]
        if self.host_bytes is not None:
            more += [n for n in reversed(numbers) if n < config.pp.stages]
        micros = [config.pp.micro]
        while micros[-1] > 1:
            micros.append(max(n for n in range(1, micros[-1] // 2 + 1) if config.data.batch % n == 0))
        for placed, stages, micro in product(self._placed(config), more, micros):
            for changed in self._leaner(_with(placed, stages=stages, micro=micro)):
                yield flags_between(config, changed), changed

    def _placed(self, config: Config) -> Sequence[Config]:
        """Return a run, and that with its state in the other memory, if host and device have one each.

        Out of host memory only where that is compared. Then those with weights elsewhere.
        """
        optim, model, trains_all = config.optim, config.model, not (config.adapter.spec or config.model.freeze)
        if not self.on_gpu:
            return [config]
        places: list[tuple[OptimOffload, Offload]] = [(optim.offload, model.offload)]
        if optim.offload == "none":
            places.append(("cpu", model.offload))
        elif self.host_bytes is not None and not (trains_all and model.offload == "cpu"):
            places.append(("none", model.offload))
        if model.offload == "none" and config.dp.shard != "weights":
            places.append(("cpu" if trains_all else optim.offload, "cpu"))
            if not trains_all and model.quantize == "none" and model.init == "pretrained":
                places.append((optim.offload, "disk"))
        return [
            replace(config, optim=replace(optim, offload=state), model=replace(model, offload=weights))
            for state, weights in places
        ]

    def _leaner(self, config: Config) -> Iterator[Config]:
        """Yield a run, then those that keep or divide more of its state."""
        shards: Sequence[ShardKind] = SHARDS if config.model.offload == "none" else SHARDS[:-1]
        if config.dp.shard != "none" or self.world == config.pp.stages:
            shards = (config.dp.shard,)
        divided = [replace(config.dp, shard=shard) for shard in shards]
        if config.dp.shard != "none" and self.world > self._per_host:  # among all replicas, not those of each host
            divided.append(replace(config.dp, local="none"))
        for recompute, dp in product(dict.fromkeys((config.model.recompute, *RECOMPUTED)), divided):
            yield replace(config, model=replace(config.model, recompute=recompute), dp=dp)

    def fastest(self, steps: StepPlanner, limit: int | None, count: int = 3) -> list[Alternative]:
        """Return the fastest runs that fit, the first one first, with other options than the planned one.

        Of those with as many stages and the same codecs, the fastest.
        """
        stages_of = [n for n in range(1, self.world + 1) if self.world % n == 0]
        kinds = [each for each in product(stages_of, (False, True)) if each != (1, True)]
        bases = [sorted(self._bases(*kind, steps), key=lambda each: each[0]) for kind in kinds]
        found = list[Alternative]()
        for of_kind in sorted(filter(None, bases), key=lambda each: each[0][0]):
            slowest_s = found[count - 1].step.total_s if len(found) >= count else math.inf
            best = self._fastest_fitting(of_kind, slowest_s, limit, steps)
            if best is not None and (flags := flags_between(self._config, best)):
                found.append(Alternative(flags, self.step(best, steps)))
                found.sort(key=lambda each: each.step.total_s)
        return found[:count]

    def _bases(self, stages: int, compresses: bool, steps: StepPlanner) -> Iterator[tuple[float, Config]]:
        """Yield possible runs that keep and divide nothing, with the times of the fastest that divide some state.

        Of some number of stages: all sizes of micro-batches, and the other schedules of the fastest one.
        """
        config, batch = self._config, self._config.data.batch
        micros = [n for n in range(1, batch + 1) if batch % n == 0 and n <= 4 * config.pp.micro]
        plain = replace(
            config,
            model=replace(config.model, recompute="none", offload="none"),
            optim=replace(config.optim, offload="none"),
            dp=replace(config.dp, shard="none"),
        )
        bases = [_with(plain, stages=stages, micro=micro, compresses=compresses) for micro in micros]
        timed = [*self._with_least_times(bases, steps)]
        yield from timed
        for _, best in sorted(timed, key=lambda each: each[0])[: stages > 1]:
            others = [each for each in CANDIDATES if each != best.pp.schedule]
            scheduled = [replace(best, pp=replace(best.pp, schedule=each)) for each in others]
            yield from self._with_least_times(scheduled, steps)

    def _with_least_times(self, bases: Iterable[Config], steps: StepPlanner) -> Iterator[tuple[float, Config]]:
        """Yield runs with the times of the fastest that divide some of their state."""
        for base in bases:
            divided = [replace(base, dp=replace(base.dp, shard=shard)) for shard in SHARDS]
            if times := [seconds for seconds, _ in self._possible(divided, steps)]:
                yield min(times), base

    def _possible(self, configs: Iterable[Config], steps: StepPlanner) -> Iterator[tuple[float, Config]]:
        """Yield those runs that are possible, with the times of their steps."""
        for config in configs:
            with contextlib.suppress(ValueError):
                yield self.step(config, steps, splits_waits=False).total_s, config

    def _fastest_fitting(
        self, bases: Sequence[tuple[float, Config]], slowest_s: float, limit: int | None, steps: StepPlanner
    ) -> Config | None:
        """Return the fastest run that fits, with whatever of its state divided, computed again or elsewhere.

        bases: see `_bases`, the fastest first; recomputation and offloading make none of them faster. slowest_s: time
        of a step that it must not reach.
        """
        best = None
        for least_s, base in bases:
            if least_s >= slowest_s:
                break
            variants = chain.from_iterable(map(self._leaner, self._placed(base)))
            for seconds, config in sorted(self._possible(variants, steps), key=lambda each: each[0]):
                if seconds >= slowest_s:
                    break
                if self.fits(config, limit):
                    best, slowest_s = config, seconds
                    break
        return best


def _with(config: Config, *, stages: int, micro: int, compresses: bool = False) -> Config:
    pp = replace(config.pp, stages=stages, micro=micro)
    if stages != config.pp.stages:
        pp = replace(pp, layers=None)
    if compresses:
        pp = replace(pp, forward=CODEC, backward=CODEC, compress=None)
    return replace(config, pp=pp)


def flags_between(config: Config, changed: Config) -> tuple[str, ...]:
    """Return the flags that change a run into another."""
    pairs = {
        "--pp.stages": (config.pp.stages, changed.pp.stages),
        "--pp.layers": (config.pp.layers, changed.pp.layers),
        "--pp.micro": (config.pp.micro, changed.pp.micro),
        "--pp.schedule": (config.pp.schedule, changed.pp.schedule),
        "--pp.forward": (config.pp.forward, changed.pp.forward),
        "--pp.backward": (config.pp.backward, changed.pp.backward),
        "--pp.compress": (config.pp.compress, changed.pp.compress),
        "--model.recompute": (config.model.recompute, changed.model.recompute),
        "--dp.local": (config.dp.local, changed.dp.local),
        "--dp.shard": (config.dp.shard, changed.dp.shard),
        "--optim.offload": (config.optim.offload, changed.optim.offload),
        "--model.offload": (config.model.offload, changed.model.offload),
    }
    return tuple(f"{flag} {after}" for flag, (before, after) in pairs.items() if before != after)


def verdict(needed: Sequence[int], limit: int, fitting: tuple[str, ...] | None, place: str = "rank") -> str:
    """Return in a sentence whether ranks or hosts fit, and if not, what to type.

    needed: bytes of each; fitting: see `RunPlanner.first_that_fits`.
    """
    if max(needed) <= limit:
        return f"fits: {_largest(needed, limit, place)}"
    return f"does not fit: {_advice(needed, limit, fitting, place)}"


def _largest(needed: Sequence[int], limit: int, place: str = "rank") -> str:
    index = max(range(len(needed)), key=needed.__getitem__)
    return (
        f"{place} {index} needs {needed[index] / GIB:.2f} of {limit / GIB:.2f} GiB, of which "
        f"{'the process and its' if place == 'rank' else 'each process with its'} libraries {PROCESS_BYTES / GIB:.2f}"
    )


def _advice(needed: Sequence[int], limit: int, fitting: tuple[str, ...] | None, place: str = "rank") -> str:
    more = "more processes with more pp.stages" if place == "rank" else "fewer processes per host with more hosts"
    instead = " ".join(fitting) if fitting else f"{more}, or an adapter (adapter.spec)"
    return f"{_largest(needed, limit, place)}; use {instead}"


def check_fit(config: Config, launch: Launch, model: RunModel, streams: Streams) -> str | None:
    """Compare the memory that a run is planned to need with that of its host, or of this rank's GPU.

    Raises ValueError, with what fits, if weights, gradients and state exceed it, or, in a run on CPUs whose layers are
    not compiled, all tensors do by more than MARGIN. Returns a sentence if activations might exceed it: those on a GPU
    or of compiled layers are estimates. Runs whose weights and gradients take little of it are not planned, which takes
    seconds; elastic runs neither, whose ranks change.
    """
    memory, on_gpu = streams.memory_bytes(), bool(streams.gpu)
    processes = 1 if on_gpu else launch.local_world_size
    of_model = model.parameters.needed_bytes(DTYPES[config.model.dtype], has_masters=has_masters(config))
    least = of_model / config.pp.stages * processes
    offloads = "cpu" in (config.optim.offload, config.model.offload) or config.model.offload_activations
    least_on_host = least * launch.local_world_size * (on_gpu and offloads)
    has_room = least < SMALL * memory and least_on_host < SMALL * host_memory().total
    if config.run.memory == "ignore" or launch.daemon or has_room:
        return None
    planner = RunPlanner(config, launch.world_size, model, on_gpu=on_gpu, per_host=launch.local_world_size)
    try:
        ranks = planner.memory(config)
    except Exception as error:  # of a plug-in or a model whose code no plan can run without values
        return f"memory: not planned ({type(error).__name__}: {error})"
    first_here = launch.rank - launch.local_rank
    topology = topology_of(config, launch)
    ranks_here = range(first_here, first_here + launch.local_world_size)
    of_host = [ranks[replace(topology, rank=rank).stage_rank] for rank in ranks_here]
    planner.host_bytes = host_memory().total if on_gpu else None
    if on_gpu and offloads:
        _check_host(planner, [*map(planner.needed_on_host, of_host)], memory)
    here = [of_host[launch.local_rank]] if on_gpu else of_host
    # caches of delta hold no more sequences than the data has, which is not known yet
    planned = sum(each.on_device if on_gpu else each.total - each.caches for each in here)
    is_estimate = on_gpu or config.model.compile
    if planned <= MARGIN * memory:
        return None
    needed, limit = [*map(planner.needed, ranks)], memory // processes
    if is_estimate and sum(each.constant for each in here) <= memory:
        return f"memory: the run may not fit: {_largest(needed, limit)}; acsgd plan --memory names runs that fit"
    advice = _advice(needed, limit, planner.first_that_fits(limit))
    raise ValueError(f"the run does not fit: {advice}; --run.memory ignore starts it as it is")


def _check_host(planner: RunPlanner, needed: Sequence[int], memory: int) -> None:
    """Raise ValueError if the processes of this host need more than its memory. memory: of each device."""
    host_bytes = planner.host_bytes or 0
    if sum(needed) <= host_bytes:
        return
    smaller = "an optimizer with less state, such as --optim.name lion, or fewer processes per host with more hosts"
    raise ValueError(
        f"the run does not fit: what it offloads needs {sum(needed) / GIB:.2f} GiB of host memory for {len(needed)} "
        f"processes, with the copy of masters and moments for a checkpoint, and this host has "
        f"{host_bytes / GIB:.2f} GiB; use {' '.join(planner.first_that_fits(memory) or (smaller,))}; "
        "--run.memory ignore starts it as it is"
    )
