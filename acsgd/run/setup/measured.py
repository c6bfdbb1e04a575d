"""Measure ranks and the links between them at the start of a run, for the options that are chosen then."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from statistics import median
from typing import Any

from acsgd.comm.communicators import NCCL
from acsgd.comm.host_links import HostLinkTimes
from acsgd.comm.process_groups import Group
from acsgd.comm.waits import Meter
from acsgd.groups import Groups, machine_name
from acsgd.io.files.fields import from_json
from acsgd.pp.wire.channel import Channel
from acsgd.pp.wire.frame import MessageKind
from acsgd.pp.wire.probe import Probed, probe, probe_size
from acsgd.run.plan.choose import NO_TIME, MeasuredHosts, MeasuredRanks
from acsgd.run.plan.job import Job
from acsgd.run.plan.measure import measure_layers, memory_rate
from acsgd.run.plan.rates import LayerTimes, LinkRate
from acsgd.run.plan.transports import Endpoint, HostLinks, Transports, choose_transports
from acsgd.streams import Streams
from acsgd.topology import Axis

LAYERS_S = 2.0
"""Time for which layers are run to measure them, seconds; slow ones run as often as `measure_layers` needs."""
PROBES = 3
"""Number of measurements of a link whose median counts, after a first one."""


def find_transports(job: Job, groups: Groups, known: HostLinks | None = None) -> Transports:
    """Choose what carries device tensors, equally on all ranks, which call it together.

    Links between hosts are measured where these decide, unless what a rank knows covers them. known: the latest
    measurement that this rank knows of, in an elastic run. Raises ValueError, the same on all ranks, if a transport of
    the options cannot be used.
    """
    own = json.dumps({"endpoint": endpoint_of(job), "links": known})
    texts = groups.all_gather_text("choosing transports", own, timeout_s=groups.timeout_s)
    reports = [json.loads(text) for text in texts]
    endpoints = [Endpoint(*each["endpoint"]) for each in reports]
    transports = choose_transports(job.config, job.plugins, endpoints, has_mesh=job.has_mesh)
    axes, machines = transports.unmeasured(job.topology), sorted({*transports.machines})
    if not axes:
        return transports
    kept = [HostLinks(of, HostLinkTimes(*times)) for of, times in (each["links"] for each in reports if each["links"])]
    links = next((each for each in kept if each.covers(machines)), None)
    if links is None:
        times = groups.measure_host_links(NCCL, job.streams.device, transports.host_ring)
        links = HostLinks(machines, times)
    return transports.with_measured(axes, links)


def endpoint_of(job: Job) -> Endpoint:
    """Return where this rank runs."""
    return Endpoint(machine_name(), job.streams.gpu, job.streams.nccl_version())


def measure_ranks(job: Job, groups: Groups, transports: Transports) -> MeasuredRanks:
    """Measure the layers on each rank, the links between neighbours in the ring of a pipeline, and those between
    replicas, or between domains of replicas, in rings of these. A collective call.

    Links over NCCL count as taking no time.
    """
    rings = {"pipeline": groups.pp, "replica": replica_ring(groups)}
    probed = {name: [probe_ring(ring, groups, job.streams, {})] for name, ring in rings.items()}
    reports = gather_reports(groups, job, {name: rounds[0] for name, rounds in probed.items()})
    for name, ring in rings.items():
        known = {} if ring is None else _by_link(reports, name, ring.ranks)
        probed[name] = [probe_ring(ring, groups, job.streams, known) for _ in range(PROBES)]
    layers = measure_layers(job, LAYERS_S)
    medians = {name: _median(rounds) for name, rounds in probed.items()}
    reports = gather_reports(groups, job, {"layers": asdict(layers), "memory": memory_rate(job.streams), **medians})

    def links_of(axis: Axis, lines: Sequence[Sequence[int]]) -> dict[tuple[int, int], LinkRate]:
        return _slowest(reports, axis, lines, lambda pair: transports.uses_nccl(axis, pair))

    pipelines, replicas = job.topology.lines("pipeline"), _replica_lines(job, groups)
    of_positions = ([reports[rank]["layers"] for rank in ranks] for ranks in zip(*pipelines, strict=True))
    return MeasuredRanks(
        tuple(map(_longest, of_positions)),
        links_of("pipeline", pipelines),
        functools.reduce(LinkRate.slower_of, links_of("replica", replicas).values(), NO_TIME),
        min(each["memory"] for each in reports),
    )


def replica_ring(groups: Groups) -> Group | None:
    """Return the group that this rank sends to as a replica, or as the leader of a domain; None if another one does."""
    return groups.dp if groups.domains is None else groups.domains.leaders


def _replica_lines(job: Job, groups: Groups) -> list[Sequence[int]]:
    """Return the ranks of each ring of replicas, or of leaders of domains."""
    lines = job.topology.lines("replica")
    if groups.domains is None:
        return [*lines]
    return [[line[first] for first, *_ in groups.domains.domains.values()] for line in lines]


def links_of_replicas(
    job: Job, groups: Groups, probed: Mapping[int, Probed]
) -> tuple[LinkRate, dict[tuple[int, int], Probed]]:
    """Return the slowest link between replicas, and those of this rank's ring for `probe_ring`. A collective call.

    probed: what `probe_ring` has measured on this rank, see `replica_ring`. None of the links uses NCCL.
    """
    reports, ring = gather_reports(groups, job, {"replica": probed}), replica_ring(groups)
    links = _slowest(reports, "replica", _replica_lines(job, groups), lambda _: False)
    known = {} if ring is None else _by_link(reports, "replica", ring.ranks)
    return functools.reduce(LinkRate.slower_of, links.values()), known


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
        channel = _channel(number, group.ranks[peer], group, groups, streams)
        return peer, probe(channel, *_sizes(known, me, peer))

    mine = [number for number, pair in enumerate(pairs) if me in pair]
    with ThreadPoolExecutor(len(mine), thread_name_prefix="links") as threads:
        return dict(threads.map(measure, mine))


def measure_hosts(job: Job, groups: Groups) -> MeasuredHosts:
    """Measure the layers on each rank, and the links between all pairs of hosts. A collective call.

    A host measures one link at a time. Links over NCCL count as taking no time.

    Raises ValueError if hosts have different numbers of processes.
    """
    per_host, rank = job.local_world_size, job.topology.rank
    own = {"processes": per_host, "endpoint": Endpoint(machine_name(), job.streams.gpu, job.streams.nccl_version())}
    reports = gather_reports(groups, job, own)
    if len(counts := {each["processes"] for each in reports}) > 1:
        raise ValueError(
            f"pp.hosts={job.config.pp.hosts} needs hosts with equal numbers of processes, and they have "
            f"{' or '.join(map(str, sorted(counts)))}; remove it, or start as many on each"
        )
    endpoints = [Endpoint(*each["endpoint"]) for each in reports]
    transports = choose_transports(job.config, job.plugins, endpoints, has_mesh=job.has_mesh)
    leaders = range(0, job.topology.world_size, per_host)
    me, hosts = rank // per_host, len(leaders)
    # in each turn, all hosts are in pairs, or have none
    peers = [(turn - me) % hosts for turn in range(hosts) if rank in leaders and 2 * me % hosts != turn]

    def measure(known: Mapping[tuple[int, int], Probed]) -> dict[int, Probed]:
        found = dict[int, Probed]()
        for peer in peers:
            number = min(me, peer) * hosts + max(me, peer)
            channel = _channel(number, leaders[peer], groups.world, groups, job.streams)
            found[peer] = probe(channel, *_sizes(known, me, peer))
        return found

    known = _by_link(gather_reports(groups, job, {"hosts": measure({})}), "hosts", leaders)
    layers = measure_layers(job, LAYERS_S)
    probed = _median([measure(known) for _ in range(PROBES)])
    reports = gather_reports(groups, job, {"layers": asdict(layers), "hosts": probed})
    of_hosts = ([reports[leader + local]["layers"] for local in range(per_host)] for leader in leaders)
    links = _slowest(reports, "hosts", [leaders], lambda pair: transports.uses_nccl("pipeline", pair))
    return MeasuredHosts(tuple(map(_longest, of_hosts)), links)


def _channel(number: int, peer: int, group: Group, groups: Groups, streams: Streams) -> Channel:
    """Return a channel to a rank, over which nothing else travels. number: of the link."""
    return Channel(MessageKind.ACTIVATION, number, peer, group, groups.waits, "", {}, streams, Meter())


def _sizes(known: Mapping[tuple[int, int], Probed], me: int, peer: int) -> tuple[int, int]:
    """Return the number of bytes to send and to receive when a link is measured. known: see `probe_ring`."""
    sent, received = (known[pair].s_per_byte if known else None for pair in ((me, peer), (peer, me)))
    return probe_size(sent), probe_size(received)


def gather_reports(groups: Groups, job: Job, own: Mapping[str, Any]) -> list[dict[str, Any]]:
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


def _longest(times: Iterable[Mapping[str, Any]]) -> LayerTimes:
    """Return the longest times of each layer. times: reported, by rank."""
    return functools.reduce(LayerTimes.slower_of, (from_json(LayerTimes, each) for each in times))
