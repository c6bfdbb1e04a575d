"""Choose options of a run from what its ranks have measured: pure functions, so that all ranks decide alike."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, cast

from transformers import PreTrainedModel

from acsgd.config.options import Config
from acsgd.dp.ladder import ModeRung
from acsgd.launch import Launch
from acsgd.pp.schedules.schedules import CANDIDATES, is_chosen
from acsgd.pp.schedules.simulate import Cost
from acsgd.pp.wire.ladder import codecs_of_links
from acsgd.run.plan.partition import Partition, divide_model, open_grid
from acsgd.run.plan.rates import ADAMW_BYTES, LayerTimes, LinkRate, Rates
from acsgd.run.plan.step_time import StepPlanner, ends_of, message_bytes, row_bytes
from acsgd.shards.plan import blocks_of, plan_unequal

GAIN = 1.02
"""Ratio of step times up to which a schedule with fewer activations, or a mode that costs less loss, is taken."""
BAND = 1.4
"""Factor by which links must be faster than a codec or mode needs before one with more bytes takes its place, so that
measurements that vary do not change it back and forth."""
MAX_ORDERS = 240
"""Number of orders of hosts that are compared at most: all of up to five hosts; of more, see `compare_orders`."""
NO_TIME = LinkRate(math.inf)


class MeasuredRanks(NamedTuple):
    """What ranks have measured, by position in a pipeline; of several replicas the longest times."""

    layers: tuple[LayerTimes, ...]
    links: Mapping[tuple[int, int], LinkRate]
    """By sender and receiver, neighbours in the ring of positions."""
    replica_link: LinkRate = NO_TIME
    """The slowest link between replicas."""
    bytes_per_s: float = math.inf
    """Of operations on single elements, bytes that they read and write."""

    def link(self, sender: int, receiver: int) -> LinkRate:
        """Return a link; of positions that are no neighbours, with the lowest rate and the longest delay of all."""
        if sender == receiver or not self.links:
            return NO_TIME
        return self.links.get((sender, receiver)) or functools.reduce(LinkRate.slower_of, self.links.values())


class MeasuredHosts(NamedTuple):
    """What hosts have measured, by their numbers."""

    layers: tuple[LayerTimes, ...]
    """The longest times of the ranks of each host."""
    links: Mapping[tuple[int, int], LinkRate]
    """By sender and receiver, of all pairs."""

    def link(self, sender: int, receiver: int) -> LinkRate:
        """Return a link; within a host, one that takes no time."""
        return NO_TIME if sender == receiver else self.links[sender, receiver]

    def fastest(self, host: int) -> tuple[float, float]:
        """Return the highest rates at which a host sends to another, and receives: all its links share them."""
        rates = ([link.bytes_per_s for pair, link in self.links.items() if pair[end] == host] for end in range(2))
        sends, receives = map(max, rates)
        return sends, receives


class TimedOrder(NamedTuple):
    """An order of hosts, see pp.hosts, and the predicted time of a step, seconds."""

    hosts: tuple[int, ...]
    step_s: float


class TimedRun(NamedTuple):
    """A division of a run over ranks, and the predicted time of the computations and messages of a step, seconds."""

    partition: Partition
    step_s: float

    @property
    def schedule(self) -> str:
        """Its pp.schedule."""
        return self.partition.config.pp.schedule

    @property
    def layers(self) -> str:
        """Its pp.layers, as they are typed."""
        return " ".join(map(str, self.partition.config.pp.blocks or ()))

    @property
    def mode(self) -> str:
        """Its dp.mode."""
        return self.partition.config.dp.mode


def with_options(partition: Partition, config: Config) -> Partition:
    """Return a division of the same model over the same ranks. Raises ValueError if the options do not allow it."""
    topology = partition.topology
    launch = Launch(topology.rank, world_size=topology.world_size, local_world_size=partition.local_world_size)
    return divide_model(config, open_grid(config, launch), partition.model, partition.streams, partition.layout.costs)


def timed_divisions(
    partition: Partition, measured: MeasuredRanks, largest: Mapping[int, int] | None = None
) -> list[TimedRun]:
    """Return the runs that pp.schedule=auto and pp.layers=auto may take, the one to take first.

    Those within GAIN of the shortest step come first, with few activations before those with more, and stages that are
    balanced by estimated cost before those that are by time. largest: see `plan_unequal`, for the only schedule.
    """
    built = partition.model.build(partition.shapes.dtype)
    divisions = [each for changed in _scheduled(partition) for each in _with_layers(changed, measured, largest or {})]
    return _shortest_first([TimedRun(each, step_time(each, measured, built)) for each in divisions])


def _shortest_first(timed: Sequence[TimedRun]) -> list[TimedRun]:
    """Return runs by the times of their steps; those within GAIN of the shortest first, in their order."""
    limit = GAIN * min(each.step_s for each in timed)
    return sorted(timed, key=lambda each: max(each.step_s, limit))


def _scheduled(partition: Partition) -> Iterator[Partition]:
    """Yield the possible runs with other schedules; where links have given codecs, those with the same links."""
    pp = partition.config.pp
    keeps_links = codecs_of_links(pp.forward) is not None or codecs_of_links(pp.backward) is not None
    for spec in CANDIDATES if is_chosen(pp.schedule) else (pp.schedule,):
        with suppress(ValueError):  # such as recomputation, which does not split backwards, or too few layers
            changed = with_options(partition, replace(partition.config, pp=replace(pp, schedule=spec)))
            changed.programs.program(changed.micros_per_replica)
            if not keeps_links or changed.layout.placement == partition.layout.placement:
                yield changed


def _with_layers(partition: Partition, measured: MeasuredRanks, largest: Mapping[int, int]) -> Iterator[Partition]:
    """Yield a run as it is, and, with pp.layers=auto, with stages balanced by time. largest: see `plan_unequal`."""
    config, layout = partition.config, partition.layout
    if config.pp.layers != "auto":
        yield partition
        return
    by_rank = [list(map(sum, zip(times.forward_s, times.backward_s, strict=True))) for times in measured.layers]
    of_stages = [by_rank[layout.placement.rank_of(stage)] for stage in range(len(layout.specs))]
    divisions = [plan_unequal(of_stages, largest)]
    if all(len(range(*spec)) <= largest.get(stage, math.inf) for stage, spec in enumerate(layout.specs)):
        divisions.insert(0, [*layout.specs])
    for blocks in dict.fromkeys(map(blocks_of, divisions)):
        yield with_options(partition, replace(config, pp=replace(config.pp, layers=blocks)))


def timed_orders(partition: Partition, measured: MeasuredHosts) -> list[TimedOrder]:
    """Return the orders of hosts that pp.hosts=auto may take, the one to take first.

    Those within GAIN of the shortest step come first, the order of the hosts' numbers before others. partition: in that
    order, on hosts with equal numbers of ranks.
    """
    steps = compare_orders(len(measured.layers), HostPlanner(partition, measured).step_s)
    limit = GAIN * min(steps.values())
    return sorted(itertools.starmap(TimedOrder, steps.items()), key=lambda each: max(each.step_s, limit))


def compare_orders(hosts: int, step_s: Callable[[tuple[int, ...]], float]) -> dict[tuple[int, ...], float]:
    """Return the times of steps by order of hosts, that of their numbers first.

    These are all orders, or up to MAX_ORDERS, each the best so far with two hosts swapped, or a part reversed.
    """
    if math.factorial(hosts) <= MAX_ORDERS:
        return {order: step_s(order) for order in itertools.permutations(range(hosts))}
    best = tuple(range(hosts))
    steps, before = {best: step_s(best)}, None
    while before != best:
        before = best
        for first, second in itertools.combinations(range(hosts), 2):
            swapped = [*best]
            swapped[first], swapped[second] = best[second], best[first]
            part = best[first : second + 1]
            for order in (tuple(swapped), (*best[:first], *part[::-1], *best[second + 1 :])):
                if order not in steps and len(steps) < MAX_ORDERS:
                    steps[order] = step_s(order)
                    best = min(best, order, key=steps.__getitem__)
    return steps


class HostPlanner:
    """Predicts steps of a run whose hosts have another order. partition: see `timed_orders`."""

    def __init__(self, partition: Partition, measured: MeasuredHosts) -> None:
        self._partition, self._measured = partition, measured
        self._built = partition.model.build(partition.shapes.dtype)
        rates = Rates("", False, partition.config.model.dtype, operations_per_s=math.inf, bytes_per_s=math.inf)
        self._planner = StepPlanner(self._built, (), partition.config.pp.micro, rates, None)
        self._known: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}

    def step_s(self, order: tuple[int, ...]) -> float:
        """Return the time of a step: of computations, messages, and what replicas exchange.

        No host sends or receives faster than over its fastest link, whatever their number.
        """
        topology, per_host = self._partition.topology, self._partition.local_world_size
        hosts = [host for host in order for _ in range(per_host)]
        pipelines = [tuple(hosts[first : first + topology.stages]) for first in range(0, len(hosts), topology.stages)]
        ends, last = (
            [max(of_rank) for of_rank in zip(*each, strict=True)]
            for each in zip(*map(self._ends, pipelines), strict=True)
        )
        replicas = [*zip(*pipelines, strict=True)]
        links = [self._slowest_of_ring(ring) for ring in replicas]
        loads, waits = self._planner.exchanges(self._partition, ends, last, links)
        sent, received = (dict.fromkeys(order, 0.0) for _ in range(2))
        for pipeline in pipelines:
            self._count_messages(pipeline, sent, received)
        for ring, load in zip(replicas, loads, strict=True):
            for host in ring if len({*ring}) > 1 else ():
                sent[host] += load.nbytes
                received[host] += load.nbytes
        fastest = {host: self._measured.fastest(host) for host in order}
        busy = [max(sent[host] / out, received[host] / into) for host, (out, into) in fastest.items()]
        return max(*busy, *map(sum, zip(ends, waits, strict=True)))

    def _ends(self, pipeline: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Return when each rank ends its computations, and the times of the backwards of its last micro-batch."""
        if pipeline not in self._known:
            partition, placement = self._partition, self._partition.layout.placement
            pairs = itertools.permutations(range(len(pipeline)), 2)
            links = {(a, b): self._measured.link(pipeline[a], pipeline[b]) for a, b in pairs}
            layers = tuple(self._measured.layers[host] for host in pipeline)
            cost = step_cost(partition, MeasuredRanks(layers, links), self._built)
            backward = cast(Sequence[float], cost.backward)
            last = [sum(backward[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
            self._known[pipeline] = ends_of(partition, partition.micros_per_replica, cost), last
        return self._known[pipeline]

    def _slowest_of_ring(self, hosts: Sequence[int]) -> LinkRate:
        pairs = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
        return functools.reduce(LinkRate.slower_of, itertools.starmap(self._measured.link, pairs), NO_TIME)

    def _count_messages(self, pipeline: Sequence[int], sent: dict[int, float], received: dict[int, float]) -> None:
        """Add the bytes that the hosts of a pipeline send to each other in a step."""
        partition, micros = self._partition, self._partition.micros_per_replica
        rank_of, route = partition.layout.placement.rank_of, next(iter(partition.programs.routes), None)
        pairs = [(boundary, boundary + 1, *sizes) for boundary, sizes in enumerate(zip(*self._sizes, strict=True))]
        rows = () if route is None else [(route.owner, route.user, self._rows, self._rows)]
        for first, second, ahead, back in (*pairs, *rows):
            here, there = pipeline[rank_of(first)], pipeline[rank_of(second)]
            if here != there:
                for sender, receiver, size in ((here, there, ahead), (there, here, back)):
                    sent[sender] += micros * size
                    received[receiver] += micros * size

    @functools.cached_property
    def _sizes(self) -> tuple[list[float], list[float]]:
        return message_bytes(self._partition)

    @functools.cached_property
    def _rows(self) -> float:
        return row_bytes(self._partition, self._built)


class ModePlanner:
    """Predicts the step of a run with each mode that dp.compress=auto may take, for any link between replicas.

    Modes that other options do not allow, or that never exchange in so few steps, are left out, and with dp.shard all
    that keep state, which is that of parts. rungs: by loss cost,
    all-reduce among them.
    """

    def __init__(self, partition: Partition, measured: MeasuredRanks, rungs: Sequence[ModeRung]) -> None:
        config, built = partition.config, partition.model.build(partition.shapes.dtype)
        rates = Rates("", False, config.model.dtype, operations_per_s=math.inf, bytes_per_s=measured.bytes_per_s)
        self._planner = StepPlanner(built, (), config.pp.micro, rates, None)
        cost = step_cost(partition, measured, built)
        self._ends = ends_of(partition, partition.micros_per_replica, cost)
        placement, backward = partition.layout.placement, cast(Sequence[float], cost.backward)
        self._last = [sum(backward[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
        weights = self._planner.weights(partition)
        self._adamw_s = [ADAMW_BYTES * each.count.trained / measured.bytes_per_s for each in weights]
        self._runs = list[tuple[ModeRung, Partition]]()
        for rung in rungs:
            with suppress(ValueError):  # such as an optimizer that the mode does not work with
                changed = with_options(partition, with_mode(config, rung.spec))
                is_allowed = config.dp.shard == "none" or not changed.plugins.mode.states
                if is_allowed and getattr(changed.plugins.mode, "inner", 1) <= (config.optim.steps or math.inf):
                    self._runs.append((rung, changed))

    @property
    def partitions(self) -> Mapping[str, Partition]:
        """The runs by mode, in the order of loss cost."""
        return {rung.spec: partition for rung, partition in self._runs}

    def keep(self, modes: Collection[str]) -> None:
        """Leave out all other modes."""
        self._runs = [each for each in self._runs if each[0].spec in modes]

    def timed(self, link: LinkRate) -> list[TimedRun]:
        """Return the runs with all modes, the one to take first.

        Those within GAIN of the shortest step come first, by loss cost. link: the slowest one between replicas.
        """
        timed = []
        for rung, partition in self._runs:
            waits = self._planner.exchanges(partition, self._ends, self._last, [link] * len(self._ends))[1]
            of_ranks = zip(self._ends, waits, self._adamw_s, strict=True)
            timed.append(TimedRun(partition, max(end + late + rung.work * step for end, late, step in of_ranks)))
        return _shortest_first(timed)

    def following(self, present: str, link: LinkRate) -> TimedRun:
        """Return the run that follows one with the mode `present`: the same, unless that is slow, or links leave room.

        Another mode takes its place if the present step is longer than GAIN squared times that of the other mode, or if
        the other mode costs less loss and would also be taken with a link that is slower by BAND. So measurements that
        vary do not change it back and forth.
        """
        costs, timed = [*self.partitions], self.timed(link)
        (now,) = (each for each in timed if each.mode == present)
        if now.step_s > GAIN**2 * timed[0].step_s:
            return timed[0]
        slower = self.timed(replace(link, bytes_per_s=link.bytes_per_s / BAND))[0]
        by_cost = sorted((timed[0], slower), key=lambda each: costs.index(each.mode))
        return min(now, by_cost[-1], key=lambda each: costs.index(each.mode))


def with_mode(config: Config, mode: str) -> Config:
    """Return the options with a mode that is chosen."""
    return replace(config, dp=replace(config.dp, mode=mode, compress=None))


def step_time(partition: Partition, measured: MeasuredRanks, built: PreTrainedModel) -> float:
    """Return the time of the computations of a step and of the messages between them. built: on the meta device."""
    return max(ends_of(partition, partition.micros_per_replica, step_cost(partition, measured, built)))


def step_cost(partition: Partition, measured: MeasuredRanks, built: PreTrainedModel) -> Cost:
    """Return the durations of computations and messages by stage and boundary."""
    rank_of, specs = partition.layout.placement.rank_of, partition.layout.specs
    of_stage = [(measured.layers[rank_of(stage)], slice(*spec)) for stage, spec in enumerate(specs)]
    ends = [(rank_of(boundary), rank_of(boundary + 1)) for boundary in range(len(specs) - 1)]
    down, up = ([measured.link(*pair) for pair in each] for each in (ends, [pair[::-1] for pair in ends]))
    activations, gradients = message_bytes(partition)
    route = next(iter(partition.programs.routes), None)
    table, user = (0, 0) if route is None else (rank_of(route.owner), rank_of(route.user))
    nbytes = row_bytes(partition, built)
    parts = [times.split / 2 * sum(times.backward_s[layers]) for times, layers in of_stage]
    return Cost(
        [times.context_s + sum(times.forward_s[layers]) for times, layers in of_stage],
        [sum(times.backward_s[layers]) for times, layers in of_stage],
        [size / link.bytes_per_s for size, link in zip(activations, down, strict=True)],
        [size / link.bytes_per_s for size, link in zip(gradients, up, strict=True)],
        [link.delay_s for link in down],
        rows=nbytes / measured.link(table, user).bytes_per_s,
        row_gradients=nbytes / measured.link(user, table).bytes_per_s,
        weight=parts,
        inputs=parts,
    )
