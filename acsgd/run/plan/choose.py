"""Choose options of a pipeline from what its ranks have measured: a pure function, so that all ranks decide alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedModel

from acsgd.config.options import Config
from acsgd.launch import Launch
from acsgd.pp.schedules.schedules import CANDIDATES
from acsgd.pp.schedules.simulate import Cost
from acsgd.pp.wire.ladder import codecs_of_links
from acsgd.run.plan.partition import Partition, divide_model, open_grid
from acsgd.run.plan.rates import LayerTimes, LinkRate
from acsgd.run.plan.step_time import ends_of, message_bytes, row_bytes

GAIN = 1.02
"""Ratio of step times up to which the schedule with fewer activations is taken."""
SPLIT = 1.05
"""Time of a backward in two parts relative to that of a whole one: a few percent longer, more in small blocks."""
NO_TIME = LinkRate(math.inf)


class MeasuredRanks(NamedTuple):
    """What ranks have measured, by position in a pipeline; of several replicas the longest times."""

    layers: tuple[LayerTimes, ...]
    links: Mapping[tuple[int, int], LinkRate]
    """By sender and receiver, neighbours in the ring of positions."""

    def link(self, sender: int, receiver: int) -> LinkRate:
        """Return a link; of positions that are no neighbours, with the lowest rate and the longest delay of all."""
        if sender == receiver or not self.links:
            return NO_TIME
        return self.links.get((sender, receiver)) or functools.reduce(LinkRate.slower_of, self.links.values())


class TimedRun(NamedTuple):
    """A division of a run over ranks, and the predicted time of the computations and messages of a step, seconds."""

    partition: Partition
    step_s: float

    @property
    def schedule(self) -> str:
        """Its pp.schedule."""
        return self.partition.config.pp.schedule


def with_options(partition: Partition, config: Config) -> Partition:
    """Return a division of the same model over the same ranks. Raises ValueError if the options do not allow it."""
    topology = partition.topology
    launch = Launch(topology.rank, world_size=topology.world_size, local_world_size=partition.local_world_size)
    return divide_model(config, open_grid(config, launch), partition.model, partition.streams, partition.layout.costs)


def timed_schedules(partition: Partition, measured: MeasuredRanks) -> list[TimedRun]:
    """Return the runs with the schedules that pp.schedule=auto may take, the one to take first.

    Those within GAIN of the shortest step come first, with few activations before those with more.
    """
    built = partition.model.build(partition.shapes.dtype)
    timed = [TimedRun(each, step_time(each, measured, built)) for each in _candidates(partition)]
    limit = GAIN * min(each.step_s for each in timed)
    return sorted(timed, key=lambda each: max(each.step_s, limit))  # which is stable


def _candidates(partition: Partition) -> Iterator[Partition]:
    """Yield the possible runs with other schedules; where links have given codecs, those with the same links."""
    pp = partition.config.pp
    keeps_links = codecs_of_links(pp.forward) is not None or codecs_of_links(pp.backward) is not None
    for spec in CANDIDATES:
        with suppress(ValueError):  # such as recomputation, which does not split backwards, or too few layers
            changed = with_options(partition, replace(partition.config, pp=replace(pp, schedule=spec)))
            changed.programs.program(len(changed.micro_ids))
            if not keeps_links or changed.layout.placement == partition.layout.placement:
                yield changed


def step_time(partition: Partition, measured: MeasuredRanks, built: PreTrainedModel) -> float:
    """Return the time of the computations of a step and of the messages between them. built: on the meta device."""
    return max(ends_of(partition, len(partition.micro_ids), step_cost(partition, measured, built)))


def step_cost(partition: Partition, measured: MeasuredRanks, built: PreTrainedModel) -> Cost:
    """Return the durations of computations and messages by stage and boundary."""
    rank_of, specs = partition.layout.placement.rank_of, partition.layout.specs
    of_stage = [(measured.layers[rank_of(stage)], slice(*spec)) for stage, spec in enumerate(specs)]
    ends = [(rank_of(boundary), rank_of(boundary + 1)) for boundary in range(len(specs) - 1)]
    down, up = ([measured.link(*pair) for pair in each] for each in (ends, [pair[::-1] for pair in ends]))
    activations, gradients = message_bytes(partition)
    route = next(iter(partition.programs.routes), None)
    table, user = (0, 0) if route is None else (rank_of(route.owner), rank_of(route.user))
    nbytes, split = row_bytes(partition, built), SPLIT if partition.programs.splits_backward else 1.0
    return Cost(
        [sum(times.forward_s[layers]) for times, layers in of_stage],
        [split * sum(times.backward_s[layers]) for times, layers in of_stage],
        [size / link.bytes_per_s for size, link in zip(activations, down, strict=True)],
        [size / link.bytes_per_s for size, link in zip(gradients, up, strict=True)],
        [link.delay_s for link in down],
        rows=nbytes / measured.link(table, user).bytes_per_s,
        row_gradients=nbytes / measured.link(user, table).bytes_per_s,
    )
