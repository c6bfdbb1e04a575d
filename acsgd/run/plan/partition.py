"""How a run divides a model and its batches over ranks: all that is decided without data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from transformers import PreTrainedModel

from acsgd.codecs.identity import DTYPES
from acsgd.config.options import Config
from acsgd.dp.modes import redundant_steps
from acsgd.io.data.sampler import deal
from acsgd.launch import Launch
from acsgd.optim.ownership import Ownership
from acsgd.optim.ownership import divide as divide_weights
from acsgd.pp.recompute import check_attention
from acsgd.pp.schedules.programs import RankPrograms
from acsgd.pp.schedules.rows import RowRoute, group_width
from acsgd.pp.tied.plan import TiedWeight, tied_weights
from acsgd.pp.wire.coder import TensorSpec
from acsgd.pp.wire.ladder import CACHED_GRADIENT_EPOCHS
from acsgd.run.plan.layout import BatchShapes, StageLayout, costs_of, divide
from acsgd.run.plan.limits import check_computes, check_split
from acsgd.run.plan.model import RunModel
from acsgd.run.plan.plugins import (
    Plugins,
    check_capabilities,
    check_deal,
    check_equal_micros,
    check_masters,
    check_shard,
    check_sharded_mode,
    parse_plugins,
)
from acsgd.shards.weights import Weight
from acsgd.streams import Streams
from acsgd.topology import Topology


class RankGrid(NamedTuple):
    """The ranks of a run and what they do, before the model is known."""

    topology: Topology
    plugins: Plugins
    micro_ids: range
    """Micro-batches of the global batch that this replica trains on if they are dealt evenly."""
    local_world_size: int
    """Number of processes of the run on this host."""


@dataclass(frozen=True)
class Partition:
    """A model and its batches, divided over ranks, as one rank sees it."""

    config: Config
    topology: Topology
    plugins: Plugins
    micro_ids: range
    """See `RankGrid`."""
    local_world_size: int
    """See `RankGrid`."""
    streams: Streams
    model: RunModel
    layout: StageLayout
    """Which ranks hold which layers."""

    @property
    def shapes(self) -> BatchShapes:
        """Shapes of the batches."""
        return BatchShapes(self.config, self.model, self.layout.specs)

    @property
    def micros_per_replica(self) -> int:
        """Number of micro-batches of a replica in a step, dealt evenly; the largest if they differ."""
        return -(-self.shapes.num_micros // self.topology.replicas)

    @property
    def most_micros(self) -> int:
        """The same in redundant steps, if there are any, in which a domain gets all of them."""
        if not redundant_steps(self.plugins.mode):
            return self.micros_per_replica
        return -(-self.shapes.num_micros // min(map(len, self.domains)))

    @property
    def cached_boundaries(self) -> list[int]:
        """Boundaries of which this rank has an end with activation caches."""
        tensors = self.cached_tensors
        return [each for each in self.layout.shared_boundaries if tensors[each]]

    @property
    def cached_tensors(self) -> list[list[TensorSpec]]:
        """By boundary, the tensors of a micro-batch that each of its ends caches.

        Activations, and gradients where these travel.
        """
        found, first = list[list[TensorSpec]](), self.programs.first_backward
        for boundary, tensors in enumerate(self.shapes.boundaries):
            floats = [spec for spec in tensors.values() if spec.dtype.is_floating_point]
            are_cached = bool(self.plugins.deltas_at(boundary, of_gradients=True)) and boundary >= first
            found.append(floats * (bool(self.plugins.deltas_at(boundary)) + are_cached))
        return found

    @property
    def domains(self) -> list[Sequence[int]]:
        """Which replicas act as one, if all hosts have as many processes as this one, and each is a domain."""
        found = domains_of_hosts(self.topology, self.local_world_size)
        can_divide = self.config.dp.shard == "none" or len({*map(len, found)}) == 1
        acts = self.has_domains and can_divide and len(found) > 1
        return found if acts else [[each] for each in range(self.topology.replicas)]

    @property
    def divides_in_domains(self) -> bool:
        """Whether the replicas of each domain divide the weights, and exchange what they own with other domains."""
        return self.config.dp.shard != "none" and len(self.domains) < self.topology.replicas

    @property
    def num_owners(self) -> int:
        """Number of replicas that divide the weights, if any do."""
        return self.topology.replicas // (len(self.domains) if self.divides_in_domains else 1)

    @property
    def has_domains(self) -> bool:
        """Whether replicas of a domain may act as one."""
        dp = self.config.dp
        return dp.local == "auto" and self.plugins.mode.exchanges != "nothing"

    def ownership(self, stages: Iterable[Sequence[Weight]], domains: Sequence[Sequence[int]] = ()) -> Ownership:
        """Return which replicas own what of the weights of this rank.

        stages: the weights of each. domains: replicas that act as one, and divide the weights; none = `domains`.
        """
        topology, by_rows = self.topology, "elementwise" in self.plugins.optimizer.capabilities
        whole = Ownership(topology.replica, topology.replicas)
        if self.config.dp.shard == "none" or topology.replicas == 1:
            return whole
        stages = [*stages]
        found = [domain for domain in domains or self.domains if len(domain) > 1]
        whole = replace(whole, domains=tuple(map(tuple, found)))
        parts = (divide_weights(weights, len(whole.owners), by_rows=by_rows) for weights in stages)
        looked_up = {each.key for each in self.tied if each.lookups}
        gathered = self._used_by_layers - looked_up if self.config.dp.shard == "weights" else frozenset[str]()
        return replace(whole, parts=tuple(chain.from_iterable(parts)), gathered=gathered)

    @property
    def offloaded(self) -> frozenset[str]:
        """Parameters of this rank that model.offload keeps elsewhere while their layers do not run.

        Trained ones are where their masters are, and those that several ranks have stay on the device.
        """
        offload, optim = self.config.model.offload, self.config.optim
        if offload == "none":
            return frozenset()
        own = self._used_by_layers - {each.key for each in self.tied}
        return own if offload == optim.offload == "cpu" else own & {*self.model.description.frozen}

    @property
    def offloads_activations(self) -> bool:
        """Whether activations wait in host memory for their backward."""
        return self.config.model.offload_activations and self.streams.device.type != "cpu"

    @property
    def _used_by_layers(self) -> frozenset[str]:
        """Parameters of this rank, trained or frozen, that its layers use while they run.

        Not those that make replicated tensors.
        """
        own = [self.model.layers[index] for index in self.layout.layers]
        replicated = {
            key
            for layer in own
            if layer.replicated
            for key in layer.parameters
            if not key.startswith(f"{layer.block}.")
        }
        return frozenset(key for layer in own for key in layer.parameters) - replicated

    @property
    def tied(self) -> list[TiedWeight]:
        """Weights that layers of several ranks of this rank's pipeline share."""
        return tied_weights(self.model.description, self.layout.rank_of_layer, self.plugins.tied)

    @property
    def programs(self) -> RankPrograms:
        """Pipeline actions of this rank."""
        first = self.model.description.first_trained
        return RankPrograms(
            self.plugins.schedule,
            self.topology.stages,
            self.topology.stage_rank,
            first_backward=next(stage for stage, spec in enumerate(self.layout.specs) if spec.last > first),
            routes=tuple(dict.fromkeys(self.row_route(tied, user) for tied in self.tied for user in tied.lookups)),
            width=group_width(self.shapes.num_micros),
        )

    def row_route(self, tied: TiedWeight, user: int) -> RowRoute:
        """Return between which stages rows of a table travel. user: rank that looks them up."""
        layout = self.layout
        first = {layout.rank_of_layer(layer): layout.stage_of_layer(layer) for layer in reversed(tied.layers)}
        return RowRoute(owner=first[tied.owner], user=first[user])

    def seen_from(self, rank: int) -> Partition:
        """Return the same partition as another rank of this pipeline sees it."""
        topology = replace(self.topology, rank=rank)
        return replace(self, topology=topology, layout=replace(self.layout, topology=topology))


def open_grid(config: Config, launch: Launch) -> RankGrid:
    """Divide ranks and micro-batches. Raises ValueError that names the key and says what to type."""
    topology = topology_of(config, launch)
    plugins, replicas = parse_plugins(config), topology.replicas
    if launch.daemon:  # a run that starts with one replica fails at once if it could not have a second one
        replicas = max(replicas, min(2, most_replicas(config)))
    if replicas > 1:
        check_capabilities(config, plugins.mode.requires, plugins.optimizer.capabilities)
    check_masters(config, plugins)
    check_deal(config, plugins)
    micro_ids = _deal(config, topology)
    check_computes(config, topology.stages * plugins.schedule.chunks, most_micros(config, plugins, topology.replicas))
    splits_backward = RankPrograms(plugins.schedule, topology.stages, topology.stage_rank).splits_backward
    check_shard(config, plugins, splits_backward=splits_backward, is_alone=replicas == 1)
    check_equal_micros(config, topology.replicas)
    if config.dp.domain is None and topology.replicas > 1 and not launch.daemon:  # whose views have such domains
        check_sharded_mode(config, plugins, domains_of_hosts(topology, launch.local_world_size))
    if splits_backward:
        check_split(config)
    return RankGrid(topology, plugins, micro_ids, launch.local_world_size)


def domains_of_hosts(topology: Topology, local_world_size: int) -> list[Sequence[int]]:
    """Return the replicas of each host, if all hosts have as many processes and each is a domain."""
    hosts = [str(rank // local_world_size) for rank in range(topology.world_size)]
    return [*topology.domains(hosts).values()]


def topology_of(config: Config, launch: Launch) -> Topology:
    """Return the grid of ranks. Raises ValueError that names the key and says what to type."""
    order, per_host = config.pp.host_order, launch.local_world_size
    if order is None or config.pp.stages == 1:
        return Topology.of(launch.rank, launch.world_size, config.pp.stages)
    if len(order) * per_host != launch.world_size:
        numbers = " ".join(map(str, range(-(-launch.world_size // per_host))))
        other = f"give --pp.hosts {numbers} in another order, with equal numbers of processes on all hosts, or "
        raise ValueError(
            f"pp.hosts={' '.join(map(str, order))} gives {len(order)} hosts for {launch.world_size} processes, of "
            f"which this host has {per_host}; {'' if launch.is_one_host else other}remove it"
        )
    ranks = tuple(host * per_host + local for host in order for local in range(per_host))
    return Topology.of(launch.rank, launch.world_size, config.pp.stages, ranks)


def most_replicas(config: Config) -> int:
    """Return the maximum number of replicas of an elastic run. Each needs a micro-batch."""
    micros = config.data.batch // config.pp.micro
    return min(config.elastic.max_replicas or micros, micros)


def most_micros(config: Config, plugins: Plugins, replicas: int) -> int:
    """Return the largest number of micro-batches that a replica may get in a step, whatever domains there are."""
    micros, is_redundant = config.data.batch // config.pp.micro, redundant_steps(plugins.mode) > 0
    return micros if is_redundant or config.data.deal == "speed" else -(-micros // replicas)


def divide_model(
    config: Config,
    grid: RankGrid,
    model: RunModel,
    streams: Streams,
    costs: tuple[float, ...] | None = None,
    built: PreTrainedModel | None = None,
) -> Partition:
    """Divide the layers of a model over the ranks of a grid. Raises ValueError if they cannot be.

    costs: of the layers, if they are known. built: the model on the meta device, if it is there; it is only read.
    """
    if grid.plugins.recompute.attention:
        built = built or model.build(DTYPES[config.model.dtype])
        check_attention(built.get_submodule(path) for path in model.derived.blocks)
    num_stages = grid.topology.stages * grid.plugins.schedule.chunks
    costs = costs or costs_of(config, model, num_stages, streams)
    placement = RankPrograms(grid.plugins.schedule, grid.topology.stages, grid.topology.stage_rank).placement
    layout = StageLayout(grid.topology, tuple(divide(config, model, num_stages, costs)), costs, placement)
    grid = grid._replace(plugins=with_useful_delta(grid.plugins, config, model))
    return Partition(config, *grid, streams, model, layout)


def with_useful_delta(plugins: Plugins, config: Config, model: RunModel, epochs: float = math.inf) -> Plugins:
    """Return plug-ins with which pp.compress chooses a delta only if sequences return with small changes.

    epochs: of the run.
    """
    has_new_masks = config.model.dropout_mask == "step" and any(layer.random for layer in model.layers)
    if has_new_masks or epochs <= 1:
        return plugins.without_chosen_delta()
    return plugins.without_chosen_delta(of_activations=False) if epochs < CACHED_GRADIENT_EPOCHS else plugins


def _deal(config: Config, topology: Topology) -> range:
    """Return an even share of the micro-batches. Raises ValueError if there are fewer than replicas."""
    num_micros = config.data.batch // config.pp.micro
    if num_micros < topology.replicas:
        raise ValueError(
            f"pp.micro={config.pp.micro} cuts data.batch={config.data.batch} into {num_micros} micro-batches, too few "
            f"for {topology.replicas} replicas; use a smaller pp.micro, or data.batch of at least "
            f"{config.pp.micro * topology.replicas}"
        )
    return deal(num_micros, [1.0] * topology.replicas)[topology.replica]
