"""Decide a run before any process group exists, from the configuration, torchrun's environment and the model's config.

Every error in them is found here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from acsgd import codecs
from acsgd.codecs.identity import DTYPES
from acsgd.config.options import Config
from acsgd.config.run_file import to_toml
from acsgd.config.spec import suggest, to_spec
from acsgd.dp.modes import redundant_steps
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.groups import machine_name
from acsgd.io.data.formats.formats import read_options
from acsgd.io.data.held_out import parse_eval
from acsgd.io.data.row_spec import RowPlacement
from acsgd.io.data.sampler import Sampler
from acsgd.io.data.sources.glue import Glue
from acsgd.io.data.sources.sources import WeightedSource, check_weights, parse_sources
from acsgd.io.files.remote import is_address
from acsgd.io.telemetry.metrics import check_trackers
from acsgd.launch import Launch
from acsgd.layers.description import LayerSpec
from acsgd.metrics import choose_metrics
from acsgd.notes import print_note, report_if_slow
from acsgd.pp.wire.delta import Delta
from acsgd.run.plan.choose import ModePlanner
from acsgd.run.plan.layout import RunPaths, sizes_of
from acsgd.run.plan.limits import check_directories, check_reading, check_streams
from acsgd.run.plan.model import RunModel, open_run_model
from acsgd.run.plan.partition import Partition, divide_model, most_micros, open_grid, with_useful_delta
from acsgd.run.plan.planner import check_fit
from acsgd.run.plan.plugins import Plugins, parse_plugins
from acsgd.run.plan.transports import check_transports, wanted_transport
from acsgd.shards.chat_template import set_chat_template
from acsgd.shards.generation import known_ends
from acsgd.shards.hub import find_remote, uploaded_steps
from acsgd.shards.manifest import StoredFile
from acsgd.shards.plan import token_flops
from acsgd.shards.tokenizer import load_tokenizer
from acsgd.streams import Streams, open_streams
from acsgd.tasks import check_options, find_task


@dataclass(frozen=True)
class Job(Partition):
    """Everything that is decided about a run, as one rank needs it. Nothing is loaded or connected yet."""

    tokenizer: PreTrainedTokenizerBase
    sources: tuple[WeightedSource, ...]
    eval_sources: tuple[WeightedSource, ...]
    """Sources of data.eval_sources; empty if it is not given."""
    metrics: tuple[str, ...]
    """Names of the metrics of evaluations."""
    is_elastic: bool = False
    """Whether hosts may join and leave the run."""
    has_mesh: bool = False
    """Whether one port per host carries all connections."""
    modes: ModePlanner | None = None
    """Data-parallel modes that dp.compress=auto may change to, once they are known to fit; None without it."""
    get_model_file: Callable[[Path, StoredFile], None] | None = None
    """Gets a file of the model from other hosts; None if this host must have all of it. See `ShardDirectory`."""

    @functools.cached_property
    def gpu_memory_bytes(self) -> int:
        """Memory of this rank's GPU; 0 on a CPU."""
        return 0 if self.streams.device.type == "cpu" else self.streams.memory_bytes()

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
            f"{self.shapes.num_micros} micro-batches of {config.pp.micro}, {config.pp.schedule}{self._redundance}"
        )

    @property
    def _redundance(self) -> str:
        """Text about redundant steps, to append to another; empty without any."""
        steps = redundant_steps(self.plugins.mode) if self.topology.replicas > 1 else 0
        return f"; in the first {steps} steps each replica, or domain, computes all of them" if steps else ""

    def with_steps(self, steps: int, sampler: Sampler) -> Job:
        """Return the job with the numbers of steps that epochs amount to. steps: of the run; sampler: of its data."""
        config = self.config.with_steps(steps, sampler.steps_of)
        plugins = with_useful_delta(parse_plugins(config), config, self.model, max(sampler.epochs(steps)))
        return replace(self, config=config, plugins=plugins)

    def fingerprint(self) -> str:
        """Return a text that must be equal on all ranks."""
        return to_toml(self.config.common) + self.model.config.to_json_string() + repr(self.layout.specs)

    @property
    def eval_form(self) -> str:
        """Text about how evaluations send activations, to append to another; empty without a codec."""
        pp, (codec, *_) = self.config.pp, self.plugins.forward
        if pp.compress is not None:
            return ", sent exactly" if pp.exact_eval else ", sent as in training"
        if pp.forward == "none":
            return ""
        form = to_spec(codec.first_codec, codecs.CODECS) if isinstance(codec, Delta) else pp.forward
        return ", sent exactly" if pp.exact_eval or form == "none" else f", sent as {form}"

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
        """Tokens that end a generated text before it is known how the learned texts end."""
        return known_ends(self.model.directory, self.model.tokenizer, self.tokenizer)

    @property
    def domain(self) -> str:
        """Name of the domain of this rank; empty if replicas of a domain do not act as one."""
        dp, mode = self.config.dp, self.plugins.mode
        sums = isinstance(mode, AllReduce | PowerSGD) and dp.shard == "none"
        is_fast = sums and wanted_transport(self.config, "replica") == "nccl"
        return (dp.domain or machine_name()) if self.has_domains and not is_fast else ""

    @property
    def is_first_on_host(self) -> bool:
        """Whether this is the process of the run and host that reports what all of them wait for."""
        return self.topology.rank % self.local_world_size == 0

    @property
    def disk_timeout_s(self) -> float:
        """Maximum time a rank waits for others that read or write files, seconds; longer than for a message."""
        return 10 * self.config.run.timeout


def with_local_checkpoint(config: Config) -> Config:
    """Return the options with a local copy in place of an address in checkpoint.resume.

    If that is also the address of uploads, the newest checkpoint counts, there or here, and there may be none. So a run
    that has lost its disk continues by the same line. Raises ValueError if the address cannot be read.
    """
    checkpoint = config.checkpoint
    address = checkpoint.resume.rstrip("/")
    if not is_address(address):
        return config
    found = None
    if address == (checkpoint.upload or "").rstrip("/"):
        steps = uploaded_steps(address, option="checkpoint.resume")
        newest = max(steps, default=-1)
        if newest <= max(RunPaths(config).checkpoints.steps(), default=-1):
            found = "auto"
    found = found or str(find_remote(address, option="checkpoint.resume"))
    return replace(config, checkpoint=replace(checkpoint, resume=found))


def prepare(config: Config, launch: Launch, *, trains: bool = True, model: RunModel | None = None) -> Job:
    """Decide a run; write nothing. Raises ValueError that names the key and says what to type.

    trains: False for a job that is only evaluated, which needs less memory. model: of another job of the same run.
    """
    check_options(config)
    check_trackers(config.log.to)
    check_directories(config, launch.rank)
    grid = open_grid(config, launch)
    sources, eval_sources = _open_sources(config, grid.plugins)
    metrics = _choose_metrics(config, eval_sources or sources)
    check_reading(config, most_micros(config, grid.plugins, grid.topology.replicas), launch.local_world_size)
    streams = open_streams(config.run.device, launch.local_rank)
    check_transports(config, grid.plugins, on_gpu=bool(streams.gpu), has_mesh=launch.mesh is not None)
    model = model or _open_model(config, launch, streams, trains=trains)
    with report_if_slow(print_note, lambda: f"planning {model.describe_size()}", enabled=launch.rank == 0):
        partition = divide_model(config, grid, model, streams)
        # pp.layers=auto gives ranks without room fewer layers, once they have measured them
        is_divided = config.pp.layers != "auto" or config.pp.stages == 1
        note = check_fit(config, launch, model, streams) if trains and is_divided else None
    if note is not None and launch.rank == 0:
        print_note(note)
    tokenizer = load_tokenizer(model.tokenizer, model.config, model.directory)
    set_chat_template(tokenizer, config.data)
    job = Job(
        **vars(partition),
        tokenizer=tokenizer,
        sources=sources,
        eval_sources=eval_sources,
        metrics=metrics,
        is_elastic=bool(launch.daemon),
        has_mesh=launch.mesh is not None,
    )
    job.programs.actions(job.most_micros)  # raises ValueError if they cannot run
    return job


def _open_model(config: Config, launch: Launch, streams: Streams, *, trains: bool) -> RunModel:
    """Find the model, and count its operations if it trains on a device whose peak is known."""
    model = open_run_model(config, launch, streams, trains=trains)
    if not trains or model.description.frozen or not streams.peak_flops(DTYPES[config.model.dtype]):
        return model
    flops = token_flops(model.task.model_class, model.config, model.derived, sizes_of(config))
    return model._replace(token_flops=flops)


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
