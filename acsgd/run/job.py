"""Decide a run before any process group exists, from the configuration, torchrun's environment and the model's config.

Every error in them is found here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd import codecs
from acsgd.codecs.base import Codec
from acsgd.codecs.identity import DTYPES
from acsgd.config.checks import check
from acsgd.config.options import Config, LogConfig
from acsgd.config.run_file import to_toml
from acsgd.config.spec import from_spec, to_spec
from acsgd.dp import MODES
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.dp.sync import Mode
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.sampling.batches import reading_bytes
from acsgd.io.sampling.held_out import parse_eval
from acsgd.io.sampling.sampler import deal
from acsgd.io.sources.sources import WeightedSource, parse_sources
from acsgd.io.telemetry.wandb_log import check_installed
from acsgd.launch import Launch
from acsgd.notes import print_note, report_if_slow
from acsgd.optim import OPTIMIZERS
from acsgd.optim.base import Capability, OptimizerSpec
from acsgd.pp.schedules.actions import Action, Program, forwards
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.placement import Placement
from acsgd.pp.schedules.schedules import SCHEDULES, Schedule
from acsgd.pp.schedules.validation import validate
from acsgd.pp.wire.coder import TensorSpec
from acsgd.pp.wire.delta import Delta
from acsgd.run.error_report import log_file
from acsgd.shards import family_of
from acsgd.shards.config import parameter_count
from acsgd.shards.hub import open_model
from acsgd.shards.layers import LayerShard, ModelFamily
from acsgd.shards.plan import StageSpec, layer_costs, plan, plan_blocks
from acsgd.shards.tokenizer import load_tokenizer
from acsgd.streams import Streams, available_memory_bytes, open_streams
from acsgd.topology import Topology

MAX_COMPUTES = 2**16
"""Maximum number of forwards in a step of one pipeline. Ordering and validating a program takes 0.1 ms per forward."""


MIN_BYTES = 8
"""Memory for each parameter that every run needs: an fp32 master weight and its gradient."""


@dataclass(frozen=True)
class Job:
    """Everything that is decided about a run, as one rank needs it. Nothing is loaded or connected yet."""

    config: Config
    topology: Topology
    local_world_size: int
    """Number of processes of the run on this host."""
    streams: Streams
    model_dir: Path
    """Directory of config.json, the tokenizer and, unless model.init is "scratch", the weights."""
    model_config: PreTrainedConfig
    num_parameters: int
    """Number of parameters of the whole model."""
    family: ModelFamily
    layers: tuple[LayerShard, ...]
    """All layers of the model, first to last."""
    specs: tuple[StageSpec, ...]
    """Range of layers of each stage."""
    train_actions: tuple[Action, ...]
    """Pipeline actions of this rank in a training step."""
    eval_actions: tuple[Action, ...]
    """Pipeline actions of this rank in an evaluation of as many micro-batches."""
    micro_ids: range
    """Micro-batches of the global batch that this replica trains on."""
    forward: Codec | Delta
    """Codec of activations."""
    backward: Codec
    """Codec of activation gradients."""
    mode: Mode
    optimizer: OptimizerSpec
    tokenizer: PreTrainedTokenizerBase
    sources: tuple[WeightedSource, ...]
    eval_sources: tuple[WeightedSource, ...]
    """Sources of data.eval_sources; empty if it is not given."""

    def describe(self) -> str:
        """Return a summary of model, parallelism and batch for the user."""
        config, topology = self.config, self.topology
        layers = " | ".join(_span(self.layers[slice(*spec)]) for spec in self.specs)
        idle = f"\ndp.mode={config.dp.mode} has nothing to do: there is one replica" if self._mode_is_idle else ""
        return (
            f"{self.model_config.model_type}, {self.num_parameters / 1e6:.1f} M parameters, {config.model.dtype}, on "
            f"{self.streams.device.type}: {topology.stages} pipeline ranks x {topology.replicas} replicas\n"
            f"stages: {layers}\n"
            f"a step: {config.data.batch} sequences of {config.data.sequence} tokens, "
            f"{config.data.batch // config.pp.micro} micro-batches of {config.pp.micro}, {config.pp.schedule}{idle}"
        )

    @property
    def model_size(self) -> str:
        """Text about the number of parameters and layers."""
        return _size(self.num_parameters, self.layers)

    def fingerprint(self) -> str:
        """Return a text that must be equal on all ranks."""
        return to_toml(self.config) + self.model_config.to_json_string() + repr(self.specs)

    @property
    def _mode_is_idle(self) -> bool:
        return self.topology.replicas == 1 and not isinstance(self.mode, AllReduce)

    @property
    def placement(self) -> Placement:
        """Which rank of a pipeline holds which stages."""
        return Placement(self.topology.stages, len(self.specs))

    @property
    def stages(self) -> list[int]:
        """Indices of the stages this rank holds."""
        return list(self.placement.stages_of(self.topology.stage_rank))

    def rank_of(self, stage: int) -> int:
        """Return the global rank that holds a stage of this rank's pipeline."""
        return self.topology.pipeline(self.topology.replica)[self.placement.rank_of(stage)]

    @property
    def eval_form(self) -> str:
        """Text about how evaluations send activations, to append to another; empty without a codec."""
        pp = self.config.pp
        if pp.forward == "none":
            return ""
        form = to_spec(self.forward.first_codec, codecs.CODECS) if isinstance(self.forward, Delta) else pp.forward
        return ", sent exactly" if pp.exact_eval or form == "none" else f", sent as {form}"

    @property
    def boundary(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of the tensors that a stage sends to the next, per micro-batch, by name."""
        shapes = self.family.boundary(self.model_config, self.config.pp.micro, self.config.data.sequence)
        return {name: TensorSpec(shape, DTYPES[self.config.model.dtype]) for name, shape in shapes.items()}

    @property
    def cache_dir(self) -> Path:
        """Directory of converted models and tokenized text, beside log.dir, shared with later runs."""
        return Path(self.config.log.dir).parent / "cache"

    @property
    def is_first_on_host(self) -> bool:
        """Whether this is the process of the run and host that reports what all of them wait for."""
        return self.topology.rank % self.local_world_size == 0

    @property
    def checkpoints(self) -> CheckpointDirectory:
        """Directory of the run's checkpoints."""
        return CheckpointDirectory(Path(self.config.checkpoint.dir or Path(self.config.log.dir) / "checkpoints"))

    @property
    def disk_timeout_s(self) -> float:
        """Maximum time a rank waits for others that read or write files, seconds; longer than for a message."""
        return 10 * self.config.run.timeout


def prepare(config: Config, launch: Launch) -> Job:
    """Decide a run; write nothing. Raises ValueError that names the key and says what to type."""
    check(config)
    check_installed(config.log.to)
    _check_writable("log.dir", config.log.dir)
    _check_writable("checkpoint.dir", config.checkpoint.dir or str(Path(config.log.dir) / "checkpoints"))
    _check_run_files(config.log, launch.rank)
    topology = Topology(launch.rank, launch.world_size, config.pp.stages)
    schedule: Schedule = from_spec(config.pp.schedule, SCHEDULES, key="pp.schedule")
    forward = _parse_forward(config.pp.forward)
    backward = _parse_backward(config.pp.backward)
    optimizer: OptimizerSpec = from_spec(config.optim.name, OPTIMIZERS, key="optim.name")
    mode: Mode = from_spec(config.dp.mode, MODES, key="dp.mode")
    if topology.replicas > 1:
        check_capabilities(config, mode.requires, optimizer.capabilities)
    sources = parse_sources(config.data.sources, on_error=config.data.on_error)
    eval_sources = parse_eval(config.data.eval_sources, config.data.eval_fraction, on_error=config.data.on_error)
    micro_ids = _deal(config, topology)
    _check_computes(config, topology.stages * schedule.chunks, len(micro_ids))
    _check_reading(config, len(micro_ids), launch.local_world_size)
    streams = open_streams(config.run.device, launch.local_rank)
    model_dir, model_config = open_model(config.model)
    family = family_of(model_config.model_type)
    _check_sequence(config.data.sequence, family.longest(model_config))
    num_parameters = parameter_count(model_config)
    _check_memory(num_parameters, topology.stages, launch.local_world_size, streams)
    layers = tuple(family.layers(model_config))
    with report_if_slow(print_note, lambda: f"planning {_size(num_parameters, layers)}", enabled=launch.rank == 0):
        specs = _plan(config, family, model_config, topology.stages * schedule.chunks, streams)
    program, evaluation = _programs(schedule, topology.stages, len(micro_ids))
    return Job(
        config=config,
        topology=topology,
        local_world_size=launch.local_world_size,
        streams=streams,
        model_dir=model_dir,
        model_config=model_config,
        num_parameters=num_parameters,
        family=family,
        layers=layers,
        specs=tuple(specs),
        train_actions=tuple(program[topology.stage_rank]),
        eval_actions=tuple(evaluation[topology.stage_rank]),
        micro_ids=micro_ids,
        forward=forward,
        backward=backward,
        mode=mode,
        optimizer=optimizer,
        tokenizer=load_tokenizer(model_dir, model_config),
        sources=sources,
        eval_sources=eval_sources,
    )


def check_capabilities(config: Config, required: frozenset[Capability], provided: frozenset[Capability]) -> None:
    """Raise ValueError if dp.mode uses optimizer capabilities that optim.name does not have."""
    if missing := required - provided:
        able = [f'"{name}"' for name, optimizer in OPTIMIZERS.items() if optimizer.capabilities >= required]
        raise ValueError(
            f'dp.mode="{config.dp.mode}" requires {", ".join(sorted(missing))}, which optim.name="{config.optim.name}" '
            f"does not support; use optim.name={' or '.join(able)}, or another dp.mode"
        )


def _parse_forward(spec: str) -> Codec | Delta:
    form: Codec | Delta = from_spec(spec, {**codecs.CODECS, "delta": Delta}, key="pp.forward")
    return form


def _parse_backward(spec: str) -> Codec:
    if spec.partition(":")[0] == "delta":
        raise ValueError(
            f'pp.backward="{spec}": delta is for activations, which change little between visits of a sequence; for '
            'gradients use "fixpoint:bits=8", or, for fewer bytes, '
            '"fixpoint:bits=4,scale=l2,clip=8,entropy_coding=true"'
        )
    return codecs.parse(spec, key="pp.backward")


def _size(num_parameters: int, layers: Sequence[LayerShard]) -> str:
    return f"a model of {num_parameters:,} parameters in {len(layers)} layers"


def _span(shards: Sequence[LayerShard]) -> str:
    """Return the names of the first and last layer of a stage: "embed .. block-00002"."""
    return shards[0].name if len(shards) == 1 else f"{shards[0].name} .. {shards[-1].name}"


def _check_writable(key: str, directory: str) -> None:
    """Raise ValueError if a directory can probably not be created or written to. Does not try it."""
    path = Path(directory).absolute()
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{key}={directory} is a symbolic link to nothing, or to itself; remove it")
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"{key}={directory}: {existing} is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{key}={directory}: no permission to write to {existing}; give another directory")


def _check_run_files(log: LogConfig, rank: int) -> None:
    """Raise ValueError if a file of the run directory, or of the directory beside it, is of another type."""
    run_dir = Path(log.dir)
    for path in (run_dir / "config.toml", run_dir / "metrics.jsonl", log_file(run_dir, rank)):
        if path.exists() and not path.is_file():
            raise ValueError(f"log.dir={log.dir}: {path} is not a file; remove it, or give another directory")
    for path in (run_dir / "logs", run_dir.parent / "cache"):
        if path.exists() and not path.is_dir():
            raise ValueError(f"log.dir={log.dir}: {path} is not a directory; remove it, or give another directory")


def _deal(config: Config, topology: Topology) -> range:
    """Return the micro-batches of this replica. Raises ValueError if there are fewer than replicas."""
    num_micros = config.data.batch // config.pp.micro
    if num_micros < topology.replicas:
        raise ValueError(
            f"pp.micro={config.pp.micro} cuts data.batch={config.data.batch} into {num_micros} micro-batches, too few "
            f"for {topology.replicas} replicas; use a smaller pp.micro, or data.batch of at least "
            f"{config.pp.micro * topology.replicas}"
        )
    return deal(num_micros, topology.replicas, topology.replica)


def _check_computes(config: Config, stages: int, micros: int) -> None:
    """Raise ValueError if a step has so many computations that to order and validate them takes many seconds."""
    if stages * micros > MAX_COMPUTES:
        raise ValueError(
            f"data.batch={config.data.batch} with pp.micro={config.pp.micro} gives a pipeline {micros} micro-batches, "
            f"for {stages} stages, which is more than {MAX_COMPUTES} forwards; use "
            f"pp.micro={config.pp.micro * -(-stages * micros // MAX_COMPUTES)} or more, or a smaller data.batch"
        )


def _programs(schedule: Schedule, stages: int, micros: int) -> tuple[Program, Program]:
    """Return the validated programs of a training step and of an evaluation."""
    computes = schedule.program(stages, micros)
    program, evaluation = lower(computes), lower(forwards(computes))
    validate(program)
    validate(evaluation, forward_only=True)
    return program, evaluation


def _check_reading(config: Config, micros: int, processes: int) -> None:
    """Raise ValueError if reading batches takes more memory than this host has. processes: of the run on this host."""
    data = config.data
    needed = reading_bytes(data.batch, micros * config.pp.micro, data.sequence)
    available = available_memory_bytes()
    if available is not None and needed * processes > available:
        raise ValueError(
            f"data.batch={data.batch} with data.sequence={data.sequence} needs {needed / 2**30:.1f} GiB of host memory "
            f"per process to read batches, but {available / 2**30:.1f} GiB are available for {processes} processes on "
            "this host; use a smaller data.batch or data.sequence"
        )


def _check_sequence(sequence: int, longest: int) -> None:
    if sequence > longest:
        raise ValueError(
            f"data.sequence={sequence} exceeds the model's maximum length; use data.sequence={longest} or less"
        )


def _check_memory(num_parameters: int, stages: int, processes: int, streams: Streams) -> None:
    """Raise ValueError if weights and gradients alone exceed the memory. processes: ranks on this host."""
    memory, per_rank = streams.memory_bytes(), MIN_BYTES * num_parameters / stages
    on_cpu = streams.device.type == "cpu"
    if memory is not None and (needed := per_rank * (processes if on_cpu else 1)) > memory:
        place = "this host" if on_cpu else "a GPU"
        raise ValueError(
            f"the model has {num_parameters:,} parameters; weights and gradients in fp32 need at least "
            f"{needed / 2**30:,.0f} GiB on {place} with pp.stages={stages}, which has {memory / 2**30:,.0f} GiB; use a "
            "smaller model, or more stages on more hosts"
        )


def _plan(
    config: Config, family: ModelFamily, model_config: PreTrainedConfig, stages: int, streams: Streams
) -> list[StageSpec]:
    """Return the layers of each stage: those of pp.layers, or balanced by cost."""
    num_layers = len(family.layers(model_config))
    if stages > num_layers:
        raise ValueError(
            f"pp.stages={config.pp.stages} with pp.schedule={config.pp.schedule} needs {stages} stages, but the model "
            f"has {num_layers} layers (an embedding, {num_layers - 2} blocks, a head); use fewer stages or chunks"
        )
    if config.pp.layers is not None:
        return plan_blocks(config.pp.layers, num_layers - 2, stages)
    if stages == 1:
        return [StageSpec(0, num_layers)]
    costs = layer_costs(family, model_config, sequence=config.data.sequence, device=streams.device.type)
    return plan(costs, stages)
