"""Continue a session with the ranks of other groups, or in another data-parallel mode: its weights stay loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from acsgd.comm.waits import Meter
from acsgd.config.spec import from_spec
from acsgd.dp.exchange.layer_gather import DividedParams
from acsgd.dp.exchange.local_weights import group_weights
from acsgd.dp.modes import MODES
from acsgd.dp.modes.allreduce import open_sync
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaPlace, carry_over, fold
from acsgd.errors import RunError
from acsgd.groups import Groups
from acsgd.optim.ownership import Ownership
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.run.plan.job import Job
from acsgd.run.session import Session
from acsgd.run.setup.build import connect_peers, connect_stages
from acsgd.shards.weights import Weight, WeightState, part_of


def reconnect(
    session: Session,
    job: Job,
    groups: Groups,
    cache_plan: CachePlan | None = None,
    observers: Collection[int] = (),
) -> Session:
    """Connect the stages of a session that was aborted with the ranks of other groups. Arguments as `build_session`.

    The new session takes over weights, optimizer state, activation caches, and the data-parallel mode's state of this
    replica. job: this rank holds the same layers in it; the number of replicas, and which this is, may differ.
    """
    peers, was = connect_peers(job, groups, observers), _place(session.peers)
    cache_plan = keep_caches(cache_plan, session, job)
    owned = session.owned.among(_ownership(session.owned.ownership, job, peers))
    new = connect_stages(job, groups, peers, session.stages, owned, session.optimizer, cache_plan)
    # after the last wait: an interrupt leaves the old session as it is
    restart_syncs(new, was, [stage.sync.take_state() for stage in session.stages.values()])
    for stage in new.stages.values():
        if isinstance(stage.param_source, DividedParams):
            stage.param_source.connect(peers.owners, counts=peers.across_domains is None)
    return new


def _ownership(before: Ownership, job: Job, peers: Peers) -> Ownership:
    """Return the same ownership among other replicas. Raises RunError if this replica owns other parts there."""
    replica, replicas = job.topology.replica, job.topology.replicas
    if before.parts is None:
        return Ownership(replica, replicas)
    domains = tuple(tuple(domain) for domain in peers.domains if len(domain) > 1)
    now = replace(before, replica=replica, replicas=replicas, domains=domains)
    if now.place != before.place:
        raise RunError(
            f"rank {job.topology.rank} has part {before.place[0]} of {before.place[1]} of its layers, not part "
            f"{now.place[0]} of {now.place[1]}: the domains of the replicas are others than planned"
        )
    return now


def admit_observers(session: Session) -> None:
    """Let all observers take part in the exchanges, between two steps. All ranks call it together."""
    was, states = _place(session.peers), [stage.sync.take_state() for stage in session.stages.values()]
    peers = session.peers
    peers.waits.wait(peers.submit(partial(peers.set_observers, ())))
    restart_syncs(session, was, states)


def restart_syncs(session: Session, was: ReplicaPlace, states: Sequence[WeightState]) -> None:
    """Open the syncs of the stages again, with the states that this replica had at another place among others."""
    mode, now, owned = session.job.plugins.mode, _place(session.peers), session.owned
    shard = session.job.config.dp.shard
    for stage, own in zip(session.stages.values(), states, strict=True):
        stage.restart(open_sync(mode, owned.kept(stage.weights), owned, session.peers, shard=shard))
        stage.sync.load_state_dict(carry_over(mode.states, own, was=was, now=now))


def change_mode(session: Session, mode: str) -> None:
    """Continue a session in another data-parallel mode, between two steps. All ranks call it together.

    What replicas have not exchanged is folded into the weights, and replicas with optimizer states of their own take
    the mean, as at a resume. mode: its dp.mode. Raises RunError if a replica fails.
    """
    job, owned = session.job, session.owned
    opened = from_spec(mode, MODES, key="dp.mode")
    session.discard_ahead()
    for stage in session.stages.values():
        weights, has_own_state = owned.kept(stage.weights), stage.sync.global_weights() is not None
        own, meter = stage.sync.take_state(), stage.sync.meter
        for group in group_weights(weights):
            _fold_states(session, group, own, meter, has_own_state=has_own_state)
        sync = open_sync(opened, weights, owned, session.peers, shard=job.config.dp.shard)
        sync.meter = meter
        stage.restart(sync)
    config = replace(job.config, dp=replace(job.config.dp, mode=mode))
    session.job = replace(job, config=config, plugins=job.plugins._replace(mode=opened))


def _fold_states(
    session: Session, weights: Sequence[Weight], own: WeightState, meter: Meter, *, has_own_state: bool
) -> None:
    """Fold the states of all replicas into some weights, and take the mean of their optimizer states.

    own: the state of this replica; has_own_state: whether replicas have optimizer states of their own.
    """
    peers, table = session.peers, session.job.plugins.mode.states
    part = part_of(own, {weight.key for weight in weights})
    merged = {
        state.name: _summed(part[state.name], peers, meter, 1.0 if state.merge == "sum" else 1 / peers.size)
        for state in table
        if state.name in part and state.single in ("replace_weight", "add_to_weight")
    }
    fold(table, [merged], weights)
    if has_own_state:
        state = session.owned.state_of(session.optimizer, weights)
        mean = {name: _summed(by_key, peers, meter, 1 / peers.size) for name, by_key in state.items()}
        session.owned.load_state(session.optimizer, weights, mean)


def _summed(tensors: Mapping[str, Tensor], peers: Peers, meter: Meter, scale: float) -> dict[str, Tensor]:
    """Return the sums of tensors over all replicas, times `scale`, fp32."""
    if not tensors:
        return {}
    flat = torch.cat([tensor.detach().float().reshape(-1).to(peers.device) for tensor in tensors.values()])
    peers.start_sum(flat, meter)()
    parts = flat.mul_(scale).split([tensor.numel() for tensor in tensors.values()])
    return {key: part.view_as(tensor) for (key, tensor), part in zip(tensors.items(), parts, strict=True)}


def _place(peers: Peers) -> ReplicaPlace:
    return ReplicaPlace(peers.replica, peers.size)


def keep_caches(cache_plan: CachePlan | None, session: Session, job: Job) -> CachePlan | None:
    """Return a plan of a job that keeps the activation caches of a session at boundaries before the same layers."""
    if cache_plan is None:
        return None
    boundaries = {spec.first: boundary for boundary, spec in enumerate(job.layout.specs[1:])}
    kept = {}
    for (boundary, name), cache in session.caches.items():
        first = session.job.layout.specs[boundary + 1].first
        if first in boundaries:
            kept[boundaries[first], name] = cache
    return replace(cache_plan, kept=kept)
