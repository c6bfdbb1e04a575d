"""The plan of a view: the rank of each worker, the step they continue from, and which layers move between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from acsgd.elastic.membership.assignment import (
    Held,
    ReplicaLayer,
    StoredCut,
    Transfer,
    Wanted,
    assign,
    complete_replicas,
    holders_of,
    lacks_layers,
    transfers_of,
)
from acsgd.elastic.membership.domains import Domains, assign_domains, parts_of_ranks, possible_domains
from acsgd.io.files.fields import Natural


@dataclass(frozen=True)
class CopiedLayers:
    """Copies of layers that a worker has in a snapshot."""

    epoch: Natural
    """View in which it was taken."""
    step: Natural
    """Number of steps applied to the copied state."""
    layers: tuple[Natural, ...]
    progress: dict[str, Any]
    """Progress of the run after `step` steps."""
    streams: tuple[dict[str, Any] | None, ...] = ()
    """See WorkerState."""


@dataclass(frozen=True)
class WorkerState:
    """What a worker reports once it has stopped."""

    step: Natural = 0
    """Number of steps applied to the state it holds."""
    layers: tuple[Natural, ...] = ()
    """Layers whose state it holds; none = it holds no state."""
    ready: bool = False
    """Whether its gradients of the next step are reduced, and it has sent its report of that step."""
    progress: dict[str, Any] | None = None
    """Progress of the run after `step` steps; None if it holds no state."""
    summary: dict[str, Any] | None = None
    """Summary of the reports of all ranks of the last applied step; None if it has applied none in this process."""
    is_synced: bool = True
    """Whether its weights include the exchange between replicas that follows its last step, if one does."""
    exchanges: bool = False
    """Whether an exchange between replicas follows its next step."""
    is_open: bool = False
    """Whether evaluation, log and save after its last step are incomplete."""
    store_port: Natural = 0
    """Port of the store that it has opened for the next view, used if it becomes rank 0."""
    streams: tuple[dict[str, Any] | None, ...] = ()
    """StreamState of each source after `step` steps, None if it is not streamed; empty if the worker streams none."""
    snapshots: tuple[CopiedLayers, ...] = ()
    saved_step: Natural = 0
    """Step of the newest checkpoint that it knows of; 0 = none."""
    replica_id: Natural = 0
    """Identifies the replica whose weights it holds, if replicas exchange nothing, so that weights of different ones
    never form one model; else 0."""
    part: Natural = 0
    parts: Natural = 1
    """Which part of the state of its layers it holds, and the number of parts: the replicas that divide it."""
    domain: str = ""
    """Its domain if the replicas of a domain divide the state of their layers; else empty."""


@dataclass(frozen=True)
class Plan:
    """What the workers of a view do. A worker is named by its host and by its number there, with that of its process:
    "f3a0/1.4"."""

    stages: Natural
    """Ranks per pipeline."""
    ranks: tuple[str, ...] = ()
    """Worker of each rank; empty if there are fewer workers than a pipeline needs."""
    spares: tuple[str, ...] = ()
    """Workers without a rank."""
    store_port: Natural = 0
    """Port of the view's store, on the host of rank 0."""
    step: Natural = 0
    """Number of applied steps from which all ranks continue."""
    from_disk: bool = True
    """Whether all ranks start from the newest checkpoint, or from the initial weights if there is none."""
    from_snapshot: bool = False
    """Whether all ranks return to the snapshot of step `step`, whose layers are kept and sent in place of their own."""
    holders: tuple[str, ...] = ()
    """Workers that keep or send state of theirs. All others drop it."""
    transfers: tuple[Transfer, ...] = ()
    """Transfers of state between memories, in this order, before training continues."""
    behind: tuple[str, ...] = ()
    """Holders that have not applied step `step` yet. Their gradients are complete, so they apply it by `summary`."""
    unsynced: tuple[int, ...] = ()
    """Ranks with layers that lack the exchange that follows step `step` on all replicas. They run it first."""
    progress: dict[str, Any] | None = None
    """Progress of the run after `step` steps; None if `from_disk`."""
    summary: dict[str, Any] | None = None
    """Summary of the reports of the last of these steps; None if this view's workers have applied none yet."""
    is_open: bool = False
    """Whether evaluation, log and save after the last step are incomplete."""
    is_first: bool = False
    """Whether no host was in an earlier view."""
    streams: tuple[dict[str, Any] | None, ...] = ()
    """StreamState of each source, at or before the next sequence, None if it is not streamed; empty if none is."""
    replica_ids: tuple[Natural, ...] = ()
    """See WorkerState; of each replica. One that gets the state of another has a new id."""

    @property
    def replicas(self) -> int:
        return len(self.ranks) // self.stages

    @property
    def origin(self) -> str:
        """Where the state comes from: "disk", "snapshot" or "memory"."""
        return "disk" if self.from_disk else "snapshot" if self.from_snapshot else "memory"

    def replicas_of(self, ranks: Iterable[int]) -> list[int]:
        """Return the replicas of some ranks, in ascending order."""
        return sorted({rank // self.stages for rank in ranks})

    def rank_of(self, worker: str) -> int | None:
        """Return the rank of a worker, None if it is a spare."""
        return self.ranks.index(worker) if worker in self.ranks else None


def make_plan(
    workers: Mapping[str, WorkerState],
    *,
    staying: Sequence[str],
    cuts: Sequence[StoredCut],
    min_replicas: int = 1,
    max_replicas: int | None = None,
    equal_micros: int = 0,
) -> Plan:
    """Plan the next view from the states of the workers that have stopped.

    workers: by name; staying: those of the hosts of the view, most senior first. Others leave: their states decide
    the step, and nothing else. cuts: those that pipelines may have, preferred first; the first one of which there are
    workers for `min_replicas` is used. If there is none, all workers are spares, which keep what they hold.
    equal_micros: see `possible_domains`, of which one trains if replicas divide the state.

    Every rank of a stopped view has reported a step before any rank applies it (docs/architecture/step.md). So holders
    of state are at most one step apart, and those behind can apply it alone. If replicas exchange weights after the
    step, some have and some have not: those that have not get the state of one that has, or run the exchange again.
    """
    holders = {name: state for name, state in workers.items() if state.layers}
    ahead = max(holders.values(), key=lambda state: (state.step, state.is_open), default=WorkerState())
    held = _held(holders, staying, ahead)
    cut = next((cut for cut in cuts if len(staying) // len(cut) >= min_replicas), cuts[0])
    most = max_replicas or len(staying)
    replicas = min(len(staying) // len(cut), most)
    wanted = cut * (replicas if replicas >= min_replicas else 0)
    domain_of = {name: workers[name].domain for name in staying}
    if divides := any(domain_of.values()):
        limits = {"min_replicas": min_replicas, "max_replicas": most, "equal_micros": equal_micros}
        places = _places_in_domains(possible_domains(domain_of, held, len(cut), **limits), cut, held)
    else:
        places = _places(staying, cut, wanted, held)
    plan = _plan_of(workers, staying, cut, places, held)
    if plan.from_disk:  # of divided state there are no snapshots
        return plan if divides else _plan_of_snapshot(workers, staying, cut, wanted) or plan
    behind = tuple(name for name in plan.holders if holders[name].step < ahead.step)
    unsynced = {each for name in plan.holders if not _is_synced(holders[name], ahead) for each in held[name]}
    return replace(
        plan,
        step=ahead.step,
        behind=behind,
        unsynced=tuple(rank for rank, layers in enumerate(places.wanted) if unsynced.intersection(layers)),
        progress=ahead.progress,
        summary=ahead.summary,
        is_open=ahead.is_open or bool(behind),
        streams=max(holders.values(), key=_place_in_streams).streams,
    )


def _held(holders: Mapping[str, WorkerState], staying: Sequence[str], ahead: WorkerState) -> Held:
    """Return the layers of each worker that stays and can reach the last step.

    Of a layer that some workers hold with the last exchange and others without, only the former hold it.
    """
    reaching = {name: holders[name] for name in staying if name in holders and _reaches(holders[name], ahead)}
    layers = {
        name: frozenset(ReplicaLayer(state.replica_id, layer, state.part, state.parts) for layer in state.layers)
        for name, state in reaching.items()
    }
    synced = frozenset[ReplicaLayer]().union(
        *(layers[name] for name, state in reaching.items() if _is_synced(state, ahead))
    )
    return {
        name: layers[name] if _is_synced(state, ahead) else layers[name] - synced for name, state in reaching.items()
    }


class _Places(NamedTuple):
    """The ranks of a view; none if there are too few workers."""

    ranks: tuple[str, ...]
    """Worker of each rank."""
    wanted: Wanted
    """The layers of each rank, or parts of them."""


def _places(staying: Sequence[str], cut: StoredCut, wanted: StoredCut, held: Held) -> _Places:
    """Return the ranks of replicas that hold all state of their layers. wanted: the layers of each rank."""
    sources = complete_replicas(staying, held, cut) or [0]
    of_ranks = [
        frozenset(ReplicaLayer(sources[rank // len(cut) % len(sources)], layer) for layer in layers)
        for rank, layers in enumerate(wanted)
    ]
    return _Places(assign(staying, held, of_ranks), of_ranks)


def _places_in_domains(domains: Sequence[Domains], cut: StoredCut, held: Held) -> _Places:
    """Return the ranks of replicas that divide the state of their layers: of the first domains that hold all of it.

    domains: those that may train, preferred first.
    """
    found = list[_Places]()
    for each in domains:
        wanted = parts_of_ranks(each, cut, held)
        found.append(_Places(assign_domains(each, held, wanted), wanted))
        if not lacks_layers(found[-1].ranks, held, wanted):
            return found[-1]
    return found[0] if found else _Places((), [])


def _plan_of(
    workers: Mapping[str, WorkerState], staying: Sequence[str], cut: StoredCut, places: _Places, held: Held
) -> Plan:
    """Return the plan for state that workers hold, without its step; from disk if they do not hold all layers."""
    ranks, of_ranks = places
    complete, replicas = complete_replicas(staying, held, cut), len(ranks) // len(cut)
    new = _new_ids(workers, replicas)
    spares = tuple(name for name in staying if name not in ranks)
    plan = Plan(len(cut), ranks, spares, workers[ranks[0]].store_port if ranks else 0, replica_ids=new)
    if lacks_layers(ranks, held, of_ranks):
        return plan
    ids = (*complete, *new)[:replicas]
    transfers = transfers_of(ranks, [held.get(name, frozenset()) for name in ranks], of_ranks)
    holders = holders_of(ranks, held, of_ranks, transfers)
    return replace(plan, from_disk=False, holders=holders, transfers=transfers, replica_ids=ids)


def _new_ids(workers: Mapping[str, WorkerState], replicas: int) -> tuple[int, ...]:
    """Return an id for each replica that no worker has."""
    first = 1 + max((state.replica_id for state in workers.values()), default=0)
    return tuple(range(first, first + replicas))


def _plan_of_snapshot(
    workers: Mapping[str, WorkerState], staying: Sequence[str], cut: StoredCut, wanted: StoredCut
) -> Plan | None:
    """Return the plan that returns to the newest snapshot of which the ranks have all layers.

    None if there is none, or a checkpoint is newer.
    """
    copies = {name: {(each.epoch, each.step): each for each in workers[name].snapshots} for name in staying}
    saved_step = max((state.saved_step for state in workers.values()), default=0)
    for epoch, step in sorted({taken for own in copies.values() for taken in own}, reverse=True):
        held = {name: own[epoch, step] for name, own in copies.items() if (epoch, step) in own}
        layers = {name: frozenset(ReplicaLayer(0, layer) for layer in each.layers) for name, each in held.items()}
        plan = _plan_of(workers, staying, cut, _places(staying, cut, wanted, layers), layers)
        if not plan.from_disk and step >= saved_step:
            known = max(held.values(), key=lambda each: len(each.streams))
            ids = _new_ids(workers, plan.replicas)  # all get the same weights, the mean of the replicas
            origin = replace(plan, step=step, from_snapshot=True, replica_ids=ids)
            return replace(origin, progress=known.progress, streams=known.streams)
    return None


def _reaches(state: WorkerState, ahead: WorkerState) -> bool:
    """Return whether a holder has applied as many steps as the one that is ahead, or can apply the last one alone."""
    return state.step == ahead.step or (state.step == ahead.step - 1 and state.ready and ahead.summary is not None)


def _is_synced(state: WorkerState, ahead: WorkerState) -> bool:
    """Return whether a holder's weights after the last step do not lack an exchange that others may have made."""
    return state.is_synced if state.step == ahead.step else not state.exchanges


def _place_in_streams(state: WorkerState) -> tuple[int, list[int]]:
    """Return a key by which the states that lie further ahead in the streamed sources are larger.

    A place after fewer steps than others have applied is one at or before the next sequence, too.
    """
    return state.step if state.streams else -1, [each["segment"] for each in state.streams if each is not None]
