"""Decide a run before any process group exists, from the configuration, torchrun's environment and the model's config.

Every error in them is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from acsgd import codecs
from acsgd.config.options import Config
from acsgd.config.run_file import to_toml
from acsgd.config.spec import suggest, to_spec
from acsgd.io.data.formats.formats import read_options
from acsgd.io.data.held_out import parse_eval
from acsgd.io.data.row_spec import RowPlacement
from acsgd.io.data.sampler import deal
from acsgd.io.data.sources.glue import Glue
from acsgd.io.data.sources.sources import WeightedSource, check_weights, parse_sources
from acsgd.io.telemetry.metrics import check_trackers
from acsgd.launch import Launch
from acsgd.layers.description import LayerSpec
from acsgd.metrics import choose_metrics
from acsgd.notes import print_note, report_if_slow
from acsgd.pp.schedules.programs import RankPrograms
from acsgd.pp.schedules.rows import RowRoute, group_width
from acsgd.pp.tied.plan import TiedWeight, tied_weights
from acsgd.pp.wire.delta import Delta
from acsgd.run.plan.layout import BatchShapes, RunPaths, StageLayout, costs_of, divide
from acsgd.run.plan.limits import check_computes, check_directories, check_reading, check_streams
from acsgd.run.plan.model import RunModel, open_run_model
from acsgd.run.plan.plugins import Plugins, check_capabilities, check_deal, parse_plugins
from acsgd.shards.chat_template import set_chat_template
from acsgd.shards.generation import ends_of, read_generation_config
from acsgd.shards.tokenizer import load_tokenizer
from acsgd.streams import Streams, open_streams
from acsgd.tasks import check_options, find_task
from acsgd.topology import Topology


@dataclass(frozen=True)
class Job:
    """Everything that is decided about a run, as one rank needs it. Nothing is loaded or connected yet."""

    config: Config
    topology: Topology
    local_world_size: int
    """Number of processes of the run on this host."""
    streams: Streams
    model: RunModel
    layout: StageLayout
    """Which ranks hold which layers."""
    micro_ids: range
    """Micro-batches of the global batch that this replica trains on if they are dealt evenly."""
    plugins: Plugins
    tokenizer: PreTrainedTokenizerBase
    sources: tuple[WeightedSource, ...]
    eval_sources: tuple[WeightedSource, ...]
    """Sources of data.eval_sources; empty if it is not given."""
    metrics: tuple[str, ...]
    """Names of the metrics of evaluations."""
    is_elastic: bool = False
    """Whether hosts may join and leave the run."""

    @property
    def shapes(self) -> BatchShapes:
        """Shapes of the batches."""
        return BatchShapes(self.config, self.model, self.layout.specs)

    @property
    def paths(self) -> RunPaths:
        """Directories of the run."""
        return RunPaths(self.config)

    def describe(self) -> str:
        """Return a summary of model, parallelism and batch for the user."""
        config, topology, model = self.config, self.topology, self.model
        layers = " | ".join(_span(model.layers[slice(*spec)]) for spec in self.layout.specs)
        return (
            f"{model.config.model_type}, {model.parameters.describe()}, {config.model.dtype}, "
            f"on {self.streams.device.type}: {topology.stages} pipeline ranks x {topology.replicas} replicas\n"
            f"stages: {layers}\n"
            f"a step: {config.data.batch} sequences of {config.data.sequence} tokens, "
            f"{self.shapes.num_micros} micro-batches of {config.pp.micro}, {config.pp.schedule}"
        )

    def fingerprint(self) -> str:
        """Return a text that must be equal on all ranks."""
        return to_toml(self.config) + self.model.config.to_json_string() + repr(self.layout.specs)

    @property
    def eval_form(self) -> str:
        """Text about how evaluations send activations, to append to another; empty without a codec."""
        pp = self.config.pp
        if pp.forward == "none":
            return ""
        codec = self.plugins.forward
        form = to_spec(codec.first_codec, codecs.CODECS) if isinstance(codec, Delta) else pp.forward
        return ", sent exactly" if pp.exact_eval or form == "none" else f", sent as {form}"

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

    @property
    def rows(self) -> RowPlacement:
        """How documents are put into sequences."""
        return self.model.task.layout(self.config.data)

    @property
    def wants_inputs(self) -> bool:
        """Whether this rank needs the values of the model's inputs, not only their shapes."""
        own = (self.model.layers[layer] for layer in self.layout.layers)
        reads = bool(self.model.description.context_inputs) or any(layer.reads for layer in own)
        data = self.config.data  # attention masks depend on the documents of a sequence, and on their prefixes
        return reads or data.isolate or data.objective != "causal"

    @property
    def ends(self) -> list[int]:
        """Tokens at which the files of the model end a generated text."""
        return ends_of(read_generation_config(self.model.directory), self.tokenizer)

    @property
    def is_first_on_host(self) -> bool:
        """Whether this is the process of the run and host that reports what all of them wait for."""
        return self.topology.rank % self.local_world_size == 0

    @property
    def disk_timeout_s(self) -> float:
        """Maximum time a rank waits for others that read or write files, seconds; longer than for a message."""
        return 10 * self.config.run.timeout


def prepare(config: Config, launch: Launch, *, trains: bool = True, model: RunModel | None = None) -> Job:
    """Decide a run; write nothing. Raises ValueError that names the key and says what to type.

    trains: False for a job that is only evaluated, which needs less memory. model: of another job of the same run.
    """
    check_options(config)
    check_trackers(config.log.to)
    check_directories(config, launch.rank)
    topology = Topology.of(launch.rank, launch.world_size, config.pp.stages)
    plugins = parse_plugins(config)
    if topology.replicas > 1:
        check_capabilities(config, plugins.mode.requires, plugins.optimizer.capabilities)
    sources, eval_sources = _open_sources(config, plugins)
    metrics = _choose_metrics(config, eval_sources or sources)
    check_deal(config, plugins)
    micro_ids = _deal(config, topology)
    num_stages = topology.stages * plugins.schedule.chunks
    most = config.data.batch // config.pp.micro if config.data.deal == "speed" else len(micro_ids)
    check_computes(config, num_stages, most)
    check_reading(config, most, launch.local_world_size)
    streams = open_streams(config.run.device, launch.local_rank)
    model = model or open_run_model(config, launch, streams, trains=trains)
    with report_if_slow(print_note, lambda: f"planning {model.describe_size()}", enabled=launch.rank == 0):
        costs = costs_of(config, model, num_stages, streams)
        specs = divide(config, model, num_stages, costs)
    tokenizer = load_tokenizer(model.tokenizer, model.config)
    set_chat_template(tokenizer, config.data)
    job = Job(
        config=config,
        topology=topology,
        local_world_size=launch.local_world_size,
        streams=streams,
        model=model,
        layout=StageLayout(topology, tuple(specs), costs),
        micro_ids=micro_ids,
        plugins=plugins,
        tokenizer=tokenizer,
        sources=sources,
        eval_sources=eval_sources,
        metrics=metrics,
        is_elastic=bool(launch.daemon),
    )
    job.programs.actions(len(micro_ids))  # raises ValueError if they cannot run
    return job


def _open_sources(config: Config, plugins: Plugins) -> tuple[tuple[WeightedSource, ...], tuple[WeightedSource, ...]]:
    """Return the sources of training and those of data.eval_sources."""
    options = read_options(config.data, has_labels=find_task(config.model.task).has_labels)
    sources = parse_sources(config.data.sources, options=options)
    eval_sources = parse_eval(config.data.eval_sources, config.data.eval_fraction, options=options)
    check_streams(config, sources, eval_sources, plugins)
    check_weights(sources, config.data.weights)
    return sources, eval_sources


def _choose_metrics(config: Config, sources: Sequence[WeightedSource]) -> tuple[str, ...]:
    """Return the metrics of evaluations: those of eval.metrics, else of GLUE's tasks in the sources or of the task."""
    suggested = [name for source, _ in sources if isinstance(source, Glue) for name in source.metrics]
    metrics, best = choose_metrics(config.eval.metrics, find_task(config.model.task), suggested), config.checkpoint.best
    if best is not None and best not in metrics:
        raise ValueError(
            f'checkpoint.best="{best}" is not a metric of this run\'s evaluations'
            f"{suggest(best, dict.fromkeys(metrics))}; eval.metrics adds others"
        )
    return metrics


def _span(shards: Sequence[LayerSpec]) -> str:
    """Return the names of the first and last layer of a stage: "embed .. block-00002"."""
    return shards[0].name if len(shards) == 1 else f"{shards[0].name} .. {shards[-1].name}"


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
