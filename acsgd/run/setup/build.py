"""Build a session: load this rank's layers and connect its stages with the neighbouring ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from acsgd.comm.communicators import NCCL
from acsgd.comm.waits import Meter
from acsgd.dp.exchange.layer_gather import DividedParams
from acsgd.dp.modes.allreduce import AllReduce, open_sync
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.groups import Groups
from acsgd.layers.composed import ComposedModel, Inputs
from acsgd.layers.skeleton import fill_with_stand_ins
from acsgd.optim.base import Optimizer
from acsgd.optim.fetch import FileParams, HostParams, LayerFetch, ParamSource
from acsgd.optim.offload import GradientOffload
from acsgd.optim.ownership import OwnedWeights
from acsgd.optim.per_weight import open_optimizer
from acsgd.pp.chunked_loss import HeadLoss
from acsgd.pp.runtime import Pipeline
from acsgd.pp.saved_activations import ActivationOffload
from acsgd.pp.schedules.rows import RowRoute
from acsgd.pp.stage import Stage
from acsgd.pp.tied.dense import TiedGroup
from acsgd.pp.tied.groups import MicroGroups
from acsgd.pp.tied.plan import TiedRows, TiedWeight
from acsgd.pp.tied.rows import TableOwner, TableUser
from acsgd.pp.tied.ties import Ties
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.pp.wire.channel import Channel
from acsgd.pp.wire.coder import CodecChoice, CodecIndices, TensorSpec
from acsgd.pp.wire.frame import MessageKind
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.run.plan.job import Job
from acsgd.run.plan.plugins import check_sharded_mode, has_masters
from acsgd.run.plan.step_memory import RankWeights
from acsgd.run.plan.transports import Transports, exchanges_updates, sums_gradients
from acsgd.run.session import Session
from acsgd.run.setup.describe import micro_shapes
from acsgd.shards.load import LayerLoader, LoadedLayer, WeightSource
from acsgd.shards.weights import in_reduction_order
from acsgd.shards.writer import OpenTensor
from acsgd.topology import Axis


def build_session(
    job: Job,
    source: WeightSource,
    groups: Groups,
    cache_plan: CachePlan | None = None,
    *,
    deferred: DeferredConstants | None = None,
    observers: Collection[int] = (),
) -> Session:
    """Load the weights of this rank's stages, and connect them with the neighbouring stages on other ranks.

    cache_plan: size and place of the activation caches; needed if a tensor is cached. deferred: receives the
    constants of all layers, to be loaded later; None = load them, too. observers: replicas that do not send updates.
    """
    model = job.model.build(job.shapes.dtype)
    composed = ComposedModel(model, job.model.description, compiles=job.config.model.compile)
    peers = connect_peers(job, groups, observers)
    stages, owned = build_stages(job, composed, source, peers, deferred)
    optimizer = open_optimizer(job.plugins.optimizer, owned.of(owned.weights), job.config.optim, job.streams)
    return connect_stages(job, groups, peers, stages, owned, optimizer, cache_plan)


def connect_peers(job: Job, groups: Groups, observers: Collection[int] = ()) -> Peers:
    """Return the replicas of this rank's stages. observers: replicas that do not send updates."""
    divides = job.config.dp.shard != "none"
    return Peers(groups.dp, groups.waits, observers, groups.domains, divides=divides)


def open_transports(job: Job, groups: Groups, transports: Transports) -> tuple[Groups, list[str]]:
    """Open what carries device tensors; all ranks together. Return the groups, and sentences on them."""
    if job.topology.world_size == 1:
        return groups, []
    mode = job.plugins.mode
    is_one_sum = isinstance(mode, AllReduce | PowerSGD) and not (job.is_elastic and job.config.dp.shard != "none")
    if transports.nccl["replica"] == "everywhere" and is_one_sum:
        groups = replace(groups, domains=None)  # one sum of all replicas, not one of hosts over gloo
    sums, updates = sums_gradients(mode), exchanges_updates(mode)
    unused: list[Axis] = [] if sums or updates or groups.domains is not None else ["replica"]
    notes = transports.describe(job.topology, unused) if any(each.gpu for each in transports.endpoints) else []
    return groups.with_transport(NCCL, job.streams.device, transports.uses_nccl, sums=sums, updates=updates), notes


def connect_stages(
    job: Job,
    groups: Groups,
    peers: Peers,
    stages: dict[int, Stage],
    owned: OwnedWeights,
    optimizer: Optimizer,
    cache_plan: CachePlan | None,
) -> Session:
    """Return the session of some stages, with their links to the other ranks of the pipeline.

    cache_plan: see `build_session`.
    """
    factory, codecs = _link_factory(job, groups, cache_plan), _codec_choice(job)
    return Session(
        job=job,
        groups=groups,
        peers=peers,
        stages=stages,
        owned=owned,
        pipeline=Pipeline(
            job.programs.actions,
            stages,
            _open_links(job, factory),
            _open_ties(job, stages, owned, factory, codecs),
            _placeholders(job),
            micro_shapes(job),
            codecs,
            load=job.streams.load,
            mark=groups.waits.mark,
        ),
        optimizer=optimizer,
        forward_meter=factory.forward_meter,
        backward_meter=factory.backward_meter,
        tied_meter=factory.tied_meter,
        caches=factory.caches,
    )


def _link_factory(job: Job, groups: Groups, cache_plan: CachePlan | None) -> LinkFactory:
    """Return what opens the links of this rank, with new meters."""
    return LinkFactory(
        groups.pp,
        groups.waits,
        job.streams,
        job.shapes.boundaries,
        job.plugins.forward,
        job.plugins.backward,
        Meter(),
        Meter(),
        cache_plan,
        caches_all=job.plugins.ladder is None,
        deltas_at=job.plugins.deltas_at,
        frozen=sum(spec.first <= job.model.description.first_trained for spec in job.layout.specs[1:]),
    )


class DeferredConstants:
    """The constants of a session's layers, which are loaded after it is built."""

    def __init__(self) -> None:
        self.is_complete = False
        """Whether all are loaded, so that stages can run."""
        self._loader: LayerLoader
        self._layers: list[LoadedLayer]
        self._take_params: Callable[[LoadedLayer], None]
        self._is_stopped = False

    def add(
        self, loader: LayerLoader, layers: Iterable[LoadedLayer], take_params: Callable[[LoadedLayer], None]
    ) -> None:
        """Set the layers of the session, what loads them, and what then takes their parameters that are fetched."""
        self._loader, self._layers, self._take_params = loader, list(layers), take_params

    def load(self) -> None:
        """Load the constants. Raises CorruptFileError if a file is corrupt."""
        for layer in self._loader.load_constants(takewhile(lambda _: not self._is_stopped, self._layers)):
            self._take_params(layer)
        self.is_complete = not self._is_stopped

    def stop(self) -> None:
        """End `load`, which another thread runs, after its present layer."""
        self._is_stopped = True


def build_stages(
    job: Job,
    composed: ComposedModel,
    source: WeightSource,
    peers: Peers,
    deferred: DeferredConstants | None = None,
) -> tuple[dict[int, Stage], OwnedWeights]:
    """Load the layers of this rank's stages into the model, one at a time; all others stay on the meta device.

    Returns the stages and what this rank owns of their weights.

    deferred: see `build_session`.
    """
    loader = _open_loader(job, composed, source, defers_constants=deferred is not None)
    if peers.across_domains is None:
        check_sharded_mode(job.config, job.plugins, peers.domains)
    owned = OwnedWeights((), job.ownership(RankWeights(job, composed.model).stages.values(), peers.domains))
    params, stages = _open_params(job, owned, peers, source), dict[int, Stage]()

    def load(index: int) -> LoadedLayer:
        layer = loader.load(index)
        params.add(layer.spec, layer.weights, composed.model)
        return layer

    layers = {index: [*map(load, range(*job.layout.specs[index]))] for index in job.layout.stages}
    for index, of_stage in layers.items():
        weights = in_reduction_order(weight for layer in of_stage for weight in layer.weights)
        sync = open_sync(job.plugins.mode, owned.kept(weights), owned, peers, shard=job.config.dp.shard)
        stages[index] = _open_stage(job, composed, of_stage, sync, params)
    if deferred is not None:
        own = (layer for stage in stages.values() for layer in stage.layers)
        deferred.add(loader, own, lambda layer: params.add(layer.spec, (), composed.model))
    fill_with_stand_ins(composed.model, job.model.description.blocks, job.streams.device, job.shapes.dtype)
    return stages, owned


def _open_stage(
    job: Job,
    composed: ComposedModel,
    layers: Sequence[LoadedLayer],
    sync: GradSync,
    params: ParamSource,
) -> Stage:
    """Return a stage with the options of the run. params: source of those that are fetched."""
    config = job.config
    together = job.plugins.recompute.layers or 1
    starts = range(0, len(layers), together)
    groups = [[layer.spec for layer in layers[first : first + together]] for first in starts]
    return Stage(
        composed,
        HeadLoss(
            job.model.task,
            label_smoothing=config.optim.label_smoothing,
            logits_at_once=job.streams.logits_at_once,
        ),
        layers,
        sync,
        targets=job.shapes.max_targets,
        seed=config.data.seed,
        recompute=job.plugins.recompute,
        splits_backward=job.programs.splits_backward,
        first_trained=job.model.description.first_trained,
        mask_per_sample=config.model.dropout_mask == "sample",
        offload=GradientOffload(job.streams) if config.optim.offload == "cpu" else None,
        fetch=LayerFetch(groups, params, sync.meter) if any(map(params.fetches_for, groups)) else None,
        activations=ActivationOffload(job.streams) if job.offloads_activations else None,
    )


def _open_params(job: Job, owned: OwnedWeights, peers: Peers, source: WeightSource) -> ParamSource:
    """Return where parameters lie between uses, those that do not stay on the device. source: of the weights."""
    if job.config.model.offload == "none":
        return DividedParams(owned, peers.owners, counts=peers.across_domains is None)
    if job.config.model.offload == "cpu":
        return HostParams(owned, job.offloaded, job.streams)

    def find(key: str) -> OpenTensor:
        return source.stored(job.model.description.first_holder(key).name, key)

    return FileParams(owned, job.offloaded, find, job.streams)


def _open_loader(job: Job, composed: ComposedModel, source: WeightSource, *, defers_constants: bool) -> LayerLoader:
    """Return what loads layers into the model of this rank."""
    me = job.topology.rank
    return LayerLoader(
        composed.model,
        job.model.description,
        source,
        device=job.streams.device,
        dtype=job.shapes.dtype,
        looked_up=[each.key for each in job.tied if me in each.lookups],
        sent=[each.key for each in job.tied if each.lookups and me == each.owner],
        defers_constants=defers_constants,
        has_masters=has_masters(job.config),
        masters_on_host=job.config.optim.offload == "cpu",
        keeps_files=job.config.dp.shard == "weights" or job.config.model.offload != "none",
    )


def _placeholders(job: Job) -> Inputs:
    """Return inputs of the model for the longest rows, for stages that do not depend on their values."""
    return {
        name: torch.zeros([job.shapes.sizes[size] for size in sizes], dtype=torch.long, device=job.streams.device)
        for name, sizes in job.model.inputs.items()
    }


def _open_links(job: Job, factory: LinkFactory) -> dict[int, Link]:
    """Open this rank's ends of all boundaries, in the order of boundaries, as the peers do."""
    links = {}
    for boundary in job.layout.shared_boundaries:
        sends = boundary in job.layout.stages
        links[boundary] = factory.open(boundary, peer=job.layout.rank_of(boundary + sends), downstream=sends)
    return links


def _open_ties(
    job: Job, stages: dict[int, Stage], owned: OwnedWeights, factory: LinkFactory, codecs: CodecChoice
) -> Ties:
    """Connect this rank with the others that use its tied weights, weight by weight, as the others do."""
    weights = {weight.key: weight for stage in stages.values() for weight in stage.weights}
    tables = {key: table for stage in stages.values() for key, table in stage.tables.items()}
    copies, owners, users, me = list[TiedGroup](), list[TableOwner](), list[TableUser](), job.topology.rank
    for tied in job.tied:
        if me not in tied.ranks:
            continue
        if not tied.lookups:
            for part in owned.of([weights[tied.key]]):  # whose gradients this rank has after the reduction
                copies.append(TiedGroup(part, factory, number=tied.number, ranks=tied.ranks, rank=me))
        elif me == tied.owner:
            for user in tied.lookups:
                route, weight = job.row_route(tied, user), weights[tied.key]
                channels = _open_table(job, tied, factory, weight.param, user=user)
                owners.append(TableOwner(weight, route, _micro_groups(job, route), factory, channels))
        else:
            route, table = job.row_route(tied, me), tables[tied.key]
            channels = _open_table(job, tied, factory, table, user=me)
            users.append(TableUser(table, tied.lookups[me], route, _micro_groups(job, route), factory, channels))
    return Ties(copies, owners, users, codecs)


def _codec_choice(job: Job) -> CodecChoice:
    """Return the choice of codecs at the start: with pp.compress, none where none is given."""
    pp, ladder, links = job.config.pp, job.plugins.ladder, range(len(job.layout.specs) - 1)
    forward, backward = (ladder.fixed_forward, ladder.fixed_backward) if ladder else ({}, {})
    first, of_rows = int(ladder is None), int(not job.plugins.row_rungs)
    ups, downs = ([given.get(each, first) for each in links] for given in (forward, backward))
    in_use = CodecIndices(ups, downs, of_rows)
    return CodecChoice(in_use, pp.num_exact_steps, pp.exact_eval)


def _micro_groups(job: Job, route: RowRoute) -> Callable[[int], MicroGroups]:
    """Return a function of a number of micro-batches that gives their groups."""
    programs = job.programs
    return functools.cache(lambda micros: MicroGroups.of(programs.use_order(micros, route.user), programs.width))


def _open_table(
    job: Job, tied: TiedWeight, factory: LinkFactory, table: Tensor, *, user: int
) -> dict[MessageKind, Channel]:
    """Open the channels of a table between its owner and a rank that looks up its rows."""
    how, inputs = job.plugins.tied, tied.lookups[user]
    assert isinstance(how, TiedRows)
    ways = [rung.how for rung in job.plugins.row_rungs[1:]] or [how]
    return factory.open_table(
        tied.number,
        TensorSpec(tuple(table.shape), table.dtype),
        peer=tied.owner if user == job.topology.rank else user,
        max_ids=min(len(table), job.shapes.max_lookups(inputs, job.shapes.num_micros)),
        max_rows=min(len(table), job.shapes.max_lookups(inputs, job.programs.width)),
        rows=[way.rows for way in ways],
        gradients=[way.gradients for way in ways],
    )
