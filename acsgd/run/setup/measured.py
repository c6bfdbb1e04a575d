"""Measure ranks and the links between them at the start of a run, for the options that are chosen then."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from acsgd.comm.process_groups import Group
from acsgd.comm.waits import Meter
from acsgd.dp.ladder import MEASURED
from acsgd.errors import CorruptFileError
from acsgd.groups import Groups, machine_name
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.io.telemetry.record import RunEvent
from acsgd.launch import Launch
from acsgd.notes import print_note, report_if_slow
from acsgd.pp.schedules.schedules import CANDIDATES, is_chosen
from acsgd.pp.wire.channel import Channel
from acsgd.pp.wire.frame import MessageKind
from acsgd.pp.wire.probe import Probed, probe, probe_size
from acsgd.run.plan.choose import (
    NO_TIME,
    MeasuredRanks,
    TimedRun,
    timed_modes,
    timed_schedules,
    with_mode,
    with_options,
)
from acsgd.run.plan.job import Job
from acsgd.run.plan.measure import measure_layers, memory_rate
from acsgd.run.plan.partition import Partition
from acsgd.run.plan.planner import check_fit
from acsgd.run.plan.plugins import parse_modes
from acsgd.run.plan.rates import LayerTimes, LinkRate
from acsgd.run.plan.transports import Endpoint, choose_transports
from acsgd.streams import Streams
from acsgd.topology import Axis

LAYERS_S = 2.0
"""Time for which layers are run to measure them, seconds; slow ones are run four times."""
PROBES = 3
"""Number of measurements of a link whose median counts, after a first one."""


class Chosen(NamedTuple):
    """An option that was chosen at the start of a run."""

    option: str
    value: str
    text: str
    """A sentence for the user."""

    def event(self, step: int) -> RunEvent:
        """Return the choice as an event. step: completed ones."""
        return RunEvent("choice", step, self.text, {"option": self.option, "value": self.value})


def choose_options(job: Job, launch: Launch, groups: Groups) -> tuple[Job, list[Chosen]]:
    """Return the job with what pp.schedule=auto and dp.compress=auto take. A collective call.

    Returns the job as it is if neither is given, or there is nothing to choose: one stage, or one replica. The mode is
    that of the checkpoint to resume from, if there is one with several replicas: others lack its state. Raises
    ValueError if this rank has no memory for the layers that are measured.
    """
    config, topology, chosen = job.config, job.topology, list[Chosen]()
    wants_schedule = topology.stages > 1 and is_chosen(config.pp.schedule)
    wants_mode = topology.replicas > 1 and config.dp.compress is not None
    if wants_mode and (kept := _kept_mode(job, groups)) is not None:
        wants_mode, job = False, _with(job, with_options(job, with_mode(config, kept)))
        text = f"dp.compress={config.dp.compress} keeps {kept}, the mode of the checkpoint"
        chosen.append(Chosen("dp.mode", kept, text))
    if not (wants_schedule or wants_mode):
        return job, chosen
    with report_if_slow(print_note, lambda: "measuring layers and links", enabled=topology.rank == 0):
        measured = measure_ranks(job, groups)
        if wants_schedule:
            timed = timed_schedules(job, measured)
            found = _first_fitting(timed, job, launch, groups)
            job = _with(job, found.partition)
            chosen.append(Chosen("pp.schedule", found.schedule, _describe_schedule(found, timed, measured)))
        if wants_mode:
            chosen.append(_describe_mode(job, timed := timed_modes(job, measured, parse_modes(config)), measured))
            job = _with(job, timed[0].partition)
    return job, chosen


def _with(job: Job, partition: Partition) -> Job:
    """Return a job with another division over its ranks."""
    return replace(job, **{each.name: getattr(partition, each.name) for each in fields(Partition)})


def _kept_mode(job: Job, groups: Groups) -> str | None:
    """Return the mode of the newest checkpoint that any rank may resume from, None without one. A collective call.

    None also for one of a single replica, which has no state of a mode.
    """
    saved = [each["saved"] for each in _gather(groups, job, {"saved": _saved_mode(job)}) if each["saved"]]
    newest: tuple[int, str] | None = max(map(tuple, saved), default=None)
    return newest[1] if newest else None


def _saved_mode(job: Job) -> tuple[int, str] | None:
    """Return step and mode of the newest checkpoint on this host, None without one of several replicas."""
    directory, resume = job.paths.checkpoints, job.config.checkpoint.resume
    paths = [directory.of(step) for step in reversed(directory.steps())]
    for path in {"auto": paths, "never": []}.get(resume, [Path(resume).expanduser()]):
        with suppress(ValueError, OSError, CorruptFileError):  # the resume itself says what is wrong
            run = Checkpoint.open(path).run
            mode = run.options.get("dp.mode")
            return (run.progress.step, mode) if mode and (run.replicas or 0) > 1 else None
    return None


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


def _describe_schedule(found: TimedRun, timed: Sequence[TimedRun], measured: MeasuredRanks) -> str:
    """Return in a sentence which schedule was taken, and why."""
    micros = len(found.partition.micro_ids)
    compute = [1e3 * (sum(each.forward_s) + sum(each.backward_s)) for each in measured.layers]
    times = ", ".join(f"{each.schedule} {each.step_s:.3g} s" for each in timed if each is not found)
    slowest = functools.reduce(LinkRate.slower_of, measured.links.values())
    return (
        f"pp.schedule=auto takes {found.schedule}: a step of {micros} micro-batches is predicted to take "
        f"{found.step_s:.3g} s ({times}); all layers take {min(compute):.3g} to {max(compute):.3g} ms for a "
        f"micro-batch on a rank, and the slowest link {_describe_link(slowest)}"
    )


def _describe_mode(job: Job, timed: Sequence[TimedRun], measured: MeasuredRanks) -> Chosen:
    """Return which mode is taken, and why."""
    found, *others = timed
    from_scratch, spec = job.config.model.init == "scratch", job.config.dp.compress
    cost = MEASURED[found.mode].cost(from_scratch=from_scratch)
    times = ", ".join(f"{each.mode} {each.step_s:.3g} s" for each in others)
    text = (
        f"dp.compress={spec} takes {found.mode}: a step is predicted to take {found.step_s:.3g} s ({times}), at a loss "
        f"cost of {cost:g}; the slowest link between replicas {_describe_link(measured.replica_link)}"
    )
    return Chosen("dp.mode", found.mode, text)


def _describe_link(link: LinkRate) -> str:
    if link == NO_TIME:
        return "is NCCL"
    return f"has {8e-6 * link.bytes_per_s:.3g} Mbit/s and a delay of {1e3 * link.delay_s:.2g} ms"


def measure_ranks(job: Job, groups: Groups) -> MeasuredRanks:
    """Measure the layers on each rank, the links between neighbours in the ring of a pipeline, and those between
    replicas, or between domains of replicas, in rings of these. A collective call.

    Links over NCCL count as taking no time.
    """
    own = Endpoint(machine_name(), job.streams.gpu, job.streams.nccl_version())
    rings = {"pipeline": groups.pp, "replica": groups.dp if groups.domains is None else groups.domains.leaders}
    probed = {name: [probe_ring(ring, groups, job.streams, {})] for name, ring in rings.items()}
    reports = _gather(groups, job, {"endpoint": own, **{name: rounds[0] for name, rounds in probed.items()}})
    endpoints = [Endpoint(*each["endpoint"]) for each in reports]
    transports = choose_transports(job.config, job.plugins, endpoints, has_mesh=job.has_mesh)
    for name, ring in rings.items():
        known = {} if ring is None else _by_link(reports, name, ring.ranks)
        probed[name] = [probe_ring(ring, groups, job.streams, known) for _ in range(PROBES)]
    layers = measure_layers(job, LAYERS_S)
    medians = {name: _median(rounds) for name, rounds in probed.items()}
    times = layers.forward_s, layers.backward_s
    reports = _gather(groups, job, {"layers": times, "memory": memory_rate(job.streams), **medians})

    def links_of(axis: Axis, lines: Sequence[Sequence[int]]) -> dict[tuple[int, int], LinkRate]:
        return _slowest(reports, axis, lines, lambda pair: transports.uses_nccl(axis, pair))

    pipelines, replicas = job.topology.lines("pipeline"), job.topology.lines("replica")
    if groups.domains is not None:
        replicas = [[line[first] for first, *_ in groups.domains.domains.values()] for line in replicas]
    of_positions = ([reports[rank]["layers"] for rank in ranks] for ranks in zip(*pipelines, strict=True))
    return MeasuredRanks(
        tuple(_longest(layers.key, of_ranks) for of_ranks in of_positions),
        links_of("pipeline", pipelines),
        functools.reduce(LinkRate.slower_of, links_of("replica", replicas).values(), NO_TIME),
        min(each["memory"] for each in reports),
    )


def probe_ring(
    group: Group | None, groups: Groups, streams: Streams, known: Mapping[tuple[int, int], Probed]
) -> dict[int, Probed]:
    """Measure the links of this rank to its neighbours in the ring of a group, all at once, as the neighbours do.

    group: None = this rank has no neighbours; known: what is known of the links, by positions of sender and receiver.
    Returns by position of the neighbour what it sends. Raises RunError if one of them fails.
    """
    if group is None or group.size() == 1:
        return {}
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


def _by_link(reports: Sequence[Mapping[str, Any]], ring: str, ranks: Sequence[int]) -> dict[tuple[int, int], Probed]:
    """Return the reported links of a ring of some ranks, by positions of sender and receiver."""
    return {
        (int(sender), receiver): Probed(*probed)
        for receiver, rank in enumerate(ranks)
        for sender, probed in reports[rank][ring].items()
    }


def _slowest(
    reports: Sequence[Mapping[str, Any]],
    ring: str,
    lines: Sequence[Sequence[int]],
    takes_no_time: Callable[[Sequence[int]], bool],
) -> dict[tuple[int, int], LinkRate]:
    """Return the links of several rings, the slowest of those between the same positions. lines: ranks of each ring."""
    links = dict[tuple[int, int], LinkRate]()
    for ranks in lines:
        probed = _by_link(reports, ring, ranks)
        for pair, (s_per_byte, delay_s) in probed.items():
            both_s = (delay_s + probed[pair[::-1]].delay_s) / 2
            found = NO_TIME if takes_no_time([ranks[end] for end in pair]) else LinkRate(1 / s_per_byte, both_s)
            links[pair] = found.slower_of(links.get(pair, found))
    return links


def _median(rounds: Sequence[Mapping[int, Probed]]) -> dict[int, Probed]:
    """Return the median of several measurements of each neighbour."""
    return {peer: Probed(*map(median, zip(*(each[peer] for each in rounds), strict=True))) for peer in rounds[0]}


def _longest(key: str, times: Sequence[Sequence[Sequence[float]]]) -> LayerTimes:
    """Return the longest times of each layer. times: of forward and of backward, by rank."""
    forward, backward = (tuple(map(max, zip(*of_pass, strict=True))) for of_pass in zip(*times, strict=True))
    return LayerTimes(key, forward, backward)
