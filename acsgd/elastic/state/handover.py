"""How the state of a rank gets from one view to the next: in its own memory, or from that of another rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch

from acsgd.dp.exchange.following import FollowingOptimizer, FollowingSync
from acsgd.dp.exchange.local_weights import LocalWeightsSync
from acsgd.dp.peers import acting_domains
from acsgd.dp.resize import ReplicaPlace
from acsgd.elastic.membership.messages import View
from acsgd.elastic.membership.plan import Plan, WorkerState
from acsgd.elastic.state.channel import StateReceiver
from acsgd.elastic.state.joins import JoiningRank, StateSource, memory_for_joins, plan_joins
from acsgd.elastic.state.snapshot_store import Snapshot
from acsgd.elastic.state.transfer import HeldLayers, LayersInMemory, align_domain, receive_layers
from acsgd.groups import Groups, collective_errors
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.batches import BatchReader
from acsgd.io.data.stream.state import StreamState
from acsgd.io.files.fields import from_json
from acsgd.optim.per_weight import open_optimizer
from acsgd.optim.replay import ReplayOptimizer
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.run.plan.job import Job
from acsgd.run.report import StepSummary
from acsgd.run.session import Session
from acsgd.run.setup.build import DeferredConstants, build_session
from acsgd.run.setup.continued import keep_caches, reconnect
from acsgd.run.setup.resume import Start
from acsgd.run.step.hooks import LoopState
from acsgd.shards.load import BlankWeights, Constants
from acsgd.train import apply_step


def worker_state(
    session: Session | None, state: LoopState, reader: BatchReader | None, store_port: int = 0
) -> WorkerState:
    """Return what a worker reports that has stopped.

    session: None if it holds no state; reader: of its batches in the view before.
    """
    if session is None:
        return WorkerState(store_port=store_port)
    step = state.progress.step
    streams = reader.stream_states(step) if reader is not None else ()
    part, parts = session.owned.ownership.place
    return WorkerState(
        step=step,
        layers=tuple(sorted(layer.spec.index for layer in session.layers)),
        part=part,
        parts=parts,
        ready=state.has_reported,
        is_synced=state.is_synced or not session.exchanges_after(step - 1),
        exchanges=session.exchanges_after(step),
        progress=state.progress.to_dict(),
        summary=dict(state.summary.numbers) if state.summary else None,
        is_open=state.is_open,
        store_port=store_port,
        streams=tuple(None if each is None else asdict(each) for each in streams),
    )


def restore_streams(reader: BatchReader, plan: Plan) -> None:
    """Let streamed sources be read on from the place that a worker of the view before has reported."""
    reader.restore([None if each is None else from_json(StreamState, each) for each in plan.streams])


def complete_step(session: Session, state: LoopState, plan: Plan, *, is_behind: bool) -> None:
    """Complete the last step as far as this rank can alone, so that its state is that after `plan.step` steps.

    is_behind: whether other ranks have applied one step more. The gradients of this rank for it are complete.
    """
    if is_behind:
        assert plan.summary is not None
        step = state.progress.step
        result = apply_step(session, None, state.progress, StepSummary(plan.summary))
        state.complete(result, is_synced=not (result.updated or session.exchanges_without_update(step)))
    last = state.progress.step - 1
    if not state.is_synced and not session.exchanges_after(last):
        session.sync_alone(last)
        state.is_synced = True


class HandedOver(NamedTuple):
    """The session of a rank in a new view."""

    session: Session
    received_bytes: int
    """Size of the state that this rank has received from others, bytes."""


def hand_over(
    session: Session | None,
    job: Job,
    groups: Groups,
    plan: Plan,
    constants: Constants,
    cache_plan: CachePlan | None = None,
    snapshot: Snapshot | None = None,
    observers: Collection[int] = (),
) -> HandedOver:
    """Return the session of this rank in a new view, with the state after `plan.step` steps.

    All ranks call it together, since some send their state to others. session: that of the view before, which was
    aborted; None on ranks that are no holders of the plan. constants: of the model. snapshot: used in place of the
    session if the plan returns to one. observers: replicas that do not send updates. Raises
    RunError if one of these ranks fails.
    """
    rank, received = job.topology.rank, LayersInMemory(constants, job.model if _divides(job) else None)
    incoming = [transfer for transfer in plan.transfers if transfer.target == rank]
    is_same = session is not None and not incoming and session.job.layout.spans == job.layout.spans
    is_source = any(transfer.source == rank for transfer in plan.transfers)
    held: HeldLayers | Snapshot | None = snapshot
    if session is not None and (is_source or not is_same):
        senders, _ = acting_domains(groups.dp, observers, groups.domains)
        held = HeldLayers(session, len(senders))
    received_bytes = _run_transfers(plan, groups, held, received)
    if session is not None and is_same:
        return HandedOver(_continue_in(session, job, groups, cache_plan, observers), received_bytes)
    if isinstance(held, HeldLayers) and _parts_change(held.parts, groups):
        held.keep(job.layout.layers, received, is_common=True)  # together with the other parts, which it receives
    elif held is not None:
        incoming_layers = {layer for transfer in incoming for layer in transfer.layers}
        held.keep([layer for layer in job.layout.layers if layer not in incoming_layers], received)
    if session is not None:
        cache_plan = keep_caches(cache_plan, session, job)
    new = build_session(job, received, groups, cache_plan, observers=observers)
    peers = (session or new).peers
    received.restore(new, ReplicaPlace(peers.replica, peers.size))
    align_domain(new, session.peers.state_key if isinstance(held, HeldLayers) and session else "", is_whole=False)
    if session is not None:  # after the last wait: an interrupt leaves it as it is
        session.close_stages()
    return HandedOver(new, received_bytes)


def _divides(job: Job) -> bool:
    """Return whether replicas divide the state of their layers."""
    return job.config.dp.shard != "none"


def _parts_change(parts: int, groups: Groups) -> bool:
    """Return whether replicas divide the state into another number of parts than before."""
    return (
        parts > 1 and groups.domains is not None and any(len(each) != parts for each in groups.domains.domains.values())
    )


def _run_transfers(plan: Plan, groups: Groups, held: HeldLayers | Snapshot | None, received: LayersInMemory) -> int:
    """Send and receive what the plan has this rank send and receive; return the number of received bytes."""
    rank, received_bytes = groups.world.rank(), 0
    with collective_errors("handing over state", groups.world):
        for transfer in plan.transfers:  # in the same order on all ranks, so that no two wait for each other
            if transfer.source == rank:
                own = held if plan.ranks[rank] in plan.holders else received
                assert own is not None
                own.send(transfer.layers, groups, transfer.target)
            elif transfer.target == rank:
                received_bytes += receive_layers(groups, transfer.source, received)
    return received_bytes


def _continue_in(
    session: Session, job: Job, groups: Groups, cache_plan: CachePlan | None, observers: Collection[int]
) -> Session:
    """Return a session with the groups of a new view, in which this rank has the layers of the view before."""
    key = session.peers.state_key
    if isinstance(session.optimizer, FollowingOptimizer):  # of the observers of the view before
        session = replace(session, optimizer=session.optimizer.followed)
    new = reconnect(session, job, groups, cache_plan, observers)
    align_domain(new, key)
    return new


class Joined(NamedTuple):
    """The session of a rank in a new view, and the transfers in the background in which it takes part."""

    session: Session
    received_bytes: int
    """See HandedOver."""
    transfers: StateSource | JoiningRank | None
    replicas: Sequence[int]
    """Replicas that join in the background."""


def join(
    session: Session | None,
    job: Job,
    groups: Groups,
    plan: Plan,
    constants: Constants,
    *,
    host: str,
    cache_plan: CachePlan | None = None,
    snapshot: Snapshot | None = None,
) -> Joined:
    """Hand over as `hand_over` does; begin transfers in the background if it would take longer than the join budget.

    host: address of this host.
    """
    joins, rank = plan_joins(session, job, groups, plan, constants, host), job.topology.rank
    replicas = plan.replicas_of(joins.sources)
    observers = replicas if job.plugins.mode.exchanges != "gradients" else ()
    if rank in joins.sources:
        senders, deferred = [*joins.senders.values()], DeferredConstants()
        receiver = StateReceiver(joins.addresses[rank], groups.timeout_s, senders)
        blank = BlankWeights(job.model.build(torch.float32), constants)
        new = build_session(job, blank, groups, cache_plan, deferred=deferred, observers=observers)
        align_domain(new)
        optimizer = partial(open_optimizer, job.plugins.optimizer, config=job.config.optim, streams=job.streams)
        new = _follow(new) if observers else replace(new, optimizer=ReplayOptimizer(new.optimizer, optimizer))
        limit_bytes = memory_for_joins(job)
        joining = JoiningRank(new, joins.sources[rank], receiver, deferred, limit_bytes, joins.members[rank], senders)
        return Joined(new, 0, joining, replicas)
    now = replace(plan, transfers=tuple(each for each in plan.transfers if each.target not in joins.sources))
    new, received_bytes = hand_over(session, job, groups, now, constants, cache_plan, snapshot, observers)
    if new.peers.is_observer:  # another rank of its replica joins
        new = _follow(new)
    source = StateSource(new, joins.senders, joins.link_rates) if joins.senders else None
    return Joined(new, received_bytes, source, replicas)


def _follow(session: Session) -> Session:
    """Let the syncs and the optimizer of an observer follow the others; return its session."""
    syncs = [stage.sync for stage in session.stages.values()]
    exact_steps = max(sync.exact_steps for sync in syncs if isinstance(sync, LocalWeightsSync))
    owned = session.owned.of(session.weights)
    optimizer = FollowingOptimizer(session.optimizer, owned, session.peers, exact_steps)
    if session.job.plugins.mode.exchanges == "updates":
        for stage, sync in zip(session.stages.values(), syncs, strict=True):
            assert isinstance(sync, LocalWeightsSync)
            stage.sync = FollowingSync(sync, optimizer, stage.weights)
    return replace(session, optimizer=optimizer)


class ViewStart(NamedTuple):
    """With what this rank begins to train in a view."""

    start: Start
    received_bytes: int = 0
    """Size of the state that this rank has received from others, bytes."""


def end_transfers(
    session: Session | None, state: LoopState, transfers: StateSource | JoiningRank | None
) -> Session | None:
    """End transfers in the background; return the session, or None if some of its state is missing."""
    if transfers is not None:
        transfers.close()
    if not (isinstance(transfers, JoiningRank) and transfers.is_pending):
        return session
    if session is not None:
        session.close_stages()
    state.restart(Progress())
    return None


def run_missing_exchange(session: Session, state: LoopState, plan: Plan) -> None:
    """Run the exchange that follows the last step, if no rank with the same state has completed it.

    Then each replica has what it needs of the parts of others. All ranks of a pipeline position call it together.
    """
    if session.job.topology.rank in plan.unsynced:
        state.is_synced = False
        session.sync_after_step(plan.step - 1)
    state.is_synced = True
    session.share_parts()


def is_run_over(view: View, state: LoopState, num_steps: int) -> bool:
    """Return whether the run has ended for all hosts of a view in which training has stopped.

    It has not if all ranks have received stop signals, and some hosts have no ranks, such as those whose workers start
    again. These resume from the checkpoint that the ranks have saved.
    """
    if state.progress.step >= num_steps or state.ended_because is not None:
        return True
    return state.is_stopped and len(view.rank_hosts()) == len(view.hosts)
