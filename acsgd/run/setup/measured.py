"""Measure ranks and the links between them at the start of a run, for the options that are chosen then."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

from acsgd.comm.process_groups import Group
from acsgd.comm.waits import Meter
from acsgd.groups import Groups, machine_name
from acsgd.launch import Launch
from acsgd.notes import print_note, report_if_slow
from acsgd.pp.schedules.schedules import CANDIDATES, is_chosen
from acsgd.pp.wire.channel import Channel
from acsgd.pp.wire.frame import MessageKind
from acsgd.pp.wire.probe import Probed, probe, probe_size
from acsgd.run.plan.choose import NO_TIME, MeasuredRanks, TimedRun, timed_schedules
from acsgd.run.plan.job import Job
from acsgd.run.plan.measure import measure_layers
from acsgd.run.plan.planner import check_fit
from acsgd.run.plan.rates import LayerTimes, LinkRate
from acsgd.run.plan.transports import Endpoint, choose_transports
from acsgd.streams import Streams

LAYERS_S = 2.0
"""Time for which layers are run to measure them, seconds; slow ones are run four times."""
PROBES = 3
"""Number of measurements of a link whose median counts, after a first one."""


def choose_schedule(job: Job, launch: Launch, groups: Groups) -> tuple[Job, list[str]]:
    """Return the job with the schedule that pp.schedule=auto takes, and a sentence on it. A collective call.

    Returns the job as it is if another schedule is given, or there is one stage. Raises ValueError if this rank has no
    memory for the layers that are measured.
    """
    config, topology = job.config, job.topology
    if topology.stages == 1 or not is_chosen(config.pp.schedule):
        return job, []
    with report_if_slow(print_note, lambda: "measuring layers and links", enabled=topology.rank == 0):
        measured = measure_ranks(job, groups)
        timed = timed_schedules(job, measured)
        found = _first_fitting(timed, job, launch, groups)
    return replace(job, **vars(found.partition)), [_describe(found, timed, measured)]


def _first_fitting(timed: Sequence[TimedRun], job: Job, launch: Launch, groups: Groups) -> TimedRun:
    """Return the first run that fits the memory of all ranks; that with 1F1B is known to. A collective call."""
    for each in timed:
        if each.schedule == CANDIDATES[0]:
            break
        try:
            fits = check_fit(each.partition.config, launch, job.model, job.streams) is None
        except ValueError:
            fits = False
        if all(groups.all_gather_text("fitting schedules", "fits" if fits else "", timeout_s=job.disk_timeout_s)):
            break
    return each


def _describe(found: TimedRun, timed: Sequence[TimedRun], measured: MeasuredRanks) -> str:
    """Return in a sentence which schedule was taken, and why."""
    micros = len(found.partition.micro_ids)
    compute = [1e3 * (sum(each.forward_s) + sum(each.backward_s)) for each in measured.layers]
    slowest = min(measured.links.values(), key=lambda each: each.bytes_per_s)
    delay_s = max(each.delay_s for each in measured.links.values())
    link = "over NCCL" if slowest == NO_TIME else f"{8e-6 * slowest.bytes_per_s:.3g} Mbit/s, {1e3 * delay_s:.2g} ms"
    times = ", ".join(f"{each.schedule} {each.step_s:.3g} s" for each in timed if each is not found)
    return (
        f"pp.schedule=auto takes {found.schedule}: a step of {micros} micro-batches is predicted to take "
        f"{found.step_s:.3g} s ({times}); all layers take {min(compute):.3g} to {max(compute):.3g} ms for a "
        f"micro-batch on a rank, and the slowest link has {link}"
    )


def measure_ranks(job: Job, groups: Groups) -> MeasuredRanks:
    """Measure the layers on each rank, and the links between neighbours in the ring of a pipeline. A collective call.

    Links over NCCL count as taking no time.
    """
    own = Endpoint(machine_name(), job.streams.gpu, job.streams.nccl_version())
    first = probe_ring(groups.pp, groups, job.streams, {})
    reports = _gather(groups, job, {"endpoint": own, "links": first})
    transports = choose_transports(
        job.config, job.plugins, [Endpoint(*each["endpoint"]) for each in reports], has_mesh=job.has_mesh
    )
    pipelines = job.topology.lines("pipeline")
    rates = _by_link(reports, pipelines[job.topology.replica])
    rounds = [probe_ring(groups.pp, groups, job.streams, rates) for _ in range(PROBES)]
    layers = measure_layers(job, LAYERS_S)
    medians = {peer: Probed(*map(median, zip(*(each[peer] for each in rounds), strict=True))) for peer in first}
    reports = _gather(groups, job, {"layers": (layers.forward_s, layers.backward_s), "links": medians})

    links = dict[tuple[int, int], LinkRate]()
    for ranks in pipelines:
        probed = _by_link(reports, ranks)
        for pair, (s_per_byte, _) in probed.items():
            delay_s = (probed[pair].delay_s + probed[pair[::-1]].delay_s) / 2
            is_fast = transports.uses_nccl("pipeline", [ranks[end] for end in pair])
            found = NO_TIME if is_fast else LinkRate(1 / s_per_byte, delay_s)
            links[pair] = found.slower_of(links.get(pair, found))
    by_position = zip(*pipelines, strict=True)
    times = tuple(_longest(layers.key, [reports[rank]["layers"] for rank in ranks]) for ranks in by_position)
    return MeasuredRanks(times, links)


def probe_ring(
    group: Group, groups: Groups, streams: Streams, known: Mapping[tuple[int, int], Probed]
) -> dict[int, Probed]:
    """Measure the links of this rank to its neighbours in the ring of a group, all at once, as the neighbours do.

    known: what is known of them, by positions of sender and receiver. Returns by position of the neighbour what it
    sends. Raises RunError if one of them fails.
    """
    size, me = group.size(), group.rank()
    pairs = sorted({tuple(sorted((position, (position + 1) % size))) for position in range(size)})

    def measure(number: int) -> tuple[int, Probed]:
        (peer,) = (position for position in pairs[number] if position != me)
        channel = Channel(
            MessageKind.ACTIVATION, number, group.ranks[peer], group, groups.waits, "", {}, streams, Meter()
        )
        sizes = (probe_size(known[pair].s_per_byte if known else None) for pair in ((me, peer), (peer, me)))
        return peer, probe(channel, *sizes)

    mine = [number for number, pair in enumerate(pairs) if me in pair]
    with ThreadPoolExecutor(len(mine), thread_name_prefix="links") as threads:
        return dict(threads.map(measure, mine))


def _gather(groups: Groups, job: Job, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what each rank reports, by rank. A collective call."""
    texts = groups.all_gather_text("measuring at the start", json.dumps(own), timeout_s=job.disk_timeout_s)
    return [json.loads(text) for text in texts]


def _by_link(reports: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> dict[tuple[int, int], Probed]:
    """Return the reported links among some ranks, by positions of sender and receiver."""
    return {
        (int(sender), receiver): Probed(*probed)
        for receiver, rank in enumerate(ranks)
        for sender, probed in reports[rank]["links"].items()
    }


def _longest(key: str, times: Sequence[Sequence[Sequence[float]]]) -> LayerTimes:
    """Return the longest times of each layer. times: of forward and of backward, by rank."""
    forward, backward = (tuple(map(max, zip(*of_pass, strict=True))) for of_pass in zip(*times, strict=True))
    return LayerTimes(key, forward, backward)
