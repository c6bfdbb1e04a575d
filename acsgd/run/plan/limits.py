"""Limits of a run: what the file system, the model, streamed sources and the memory of this host allow.

Checked before any work.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from acsgd.config.options import EPOCHS, Config, LogConfig, Offload
from acsgd.failures.report import log_file
from acsgd.host_memory import host_memory
from acsgd.io.checkpoint.directory import CHECKPOINTS
from acsgd.io.data.batches import reading_bytes
from acsgd.io.data.sources.sources import WeightedSource
from acsgd.io.data.sources.streamed import PREFIX, Streamed
from acsgd.io.files.remote import check_address
from acsgd.io.telemetry.json_lines import METRICS
from acsgd.layers.quantize import is_quantized, quantized_bytes
from acsgd.run.plan.plugins import Plugins
from acsgd.streams import Streams
from acsgd.tasks import find_task

MAX_COMPUTES = 2**16
"""Maximum number of forwards in a step of one pipeline. Ordering and validating a program takes 0.1 ms per forward."""
MASTER_BYTES, GRADIENT_BYTES = 4, 4
"""Memory for each trained parameter: an fp32 master weight, where it has one, which evaluations need, too, and its
gradient."""


def check_directories(config: Config, rank: int) -> None:
    """Raise ValueError if the run cannot write to its directories."""
    _check_writable("log.dir", config.log.dir)
    _check_writable("checkpoint.dir", config.checkpoint.dir or str(Path(config.log.dir) / CHECKPOINTS))
    _check_run_files(config.log, rank)
    if config.checkpoint.upload is not None:
        check_address(config.checkpoint.upload, "checkpoint.upload")


def check_computes(config: Config, stages: int, micros: int) -> None:
    """Raise ValueError if a step has more forwards than can be ordered and validated in a few seconds."""
    if stages * micros > MAX_COMPUTES:
        raise ValueError(
            f"data.batch={config.data.batch} with pp.micro={config.pp.micro} gives a pipeline {micros} micro-batches, "
            f"for {stages} stages, which is more than {MAX_COMPUTES} forwards; use "
            f"pp.micro={config.pp.micro * -(-stages * micros // MAX_COMPUTES)} or more, or a smaller data.batch"
        )


def check_split(config: Config) -> None:
    """Raise ValueError if an option needs a layer's backward to be one thing, of which a schedule runs two parts."""
    for key, value, is_whole in (
        ("model.recompute", config.model.recompute, config.model.recompute != "none"),
        ("model.compile", "true", config.model.compile),
    ):
        if is_whole:
            raise ValueError(
                f"pp.schedule={config.pp.schedule} runs gradients of weights after those of inputs, but "
                f"{key}={value} computes them together; remove one of both, or use pp.schedule=1f1b"
            )


def check_reading(config: Config, micros: int, processes: int) -> None:
    """Raise ValueError if reading batches takes more memory than this host has. processes: of the run on this host."""
    data, inputs = config.data, len(find_task(config.model.task).model_class.inputs)
    arrays = inputs + (inputs > 1) + data.isolate + (data.objective != "causal") + 1
    needed = reading_bytes(data.batch, micros * config.pp.micro, data.sequence, arrays=arrays)
    available = host_memory().available
    if needed * processes > available:
        raise ValueError(
            f"data.batch={data.batch} with data.sequence={data.sequence} needs {needed / 2**30:.1f} GiB of host memory "
            f"per process to read batches, but {available / 2**30:.1f} GiB are available for {processes} processes on "
            "this host; use a smaller data.batch or data.sequence"
        )


def check_sequence(sequence: int, longest: int | None) -> None:
    """Raise ValueError if sequences are longer than the model's maximum length, if it has one."""
    if longest is not None and sequence > longest:
        raise ValueError(
            f"data.sequence={sequence} exceeds the model's maximum length; use data.sequence={longest} or less"
        )


class ParameterCount(NamedTuple):
    """Number of parameters of a model, with its adapter."""

    trained: int
    frozen: int
    quantized: int = 0
    """Number of the frozen ones that are quantized."""
    quantized_bytes: int = 0
    """Memory of these."""

    @classmethod
    def of(cls, model: nn.Module, keys: Collection[str], frozen: Collection[str]) -> ParameterCount:
        """Count some parameters of a model, which may be on the meta device. frozen: names of those not trained."""
        params = {key: model.get_parameter(key) for key in keys}
        fixed = [param for key, param in params.items() if key in frozen]
        quantized = [param for param in fixed if is_quantized(param)]
        num_fixed = sum(param.numel() for param in fixed)
        return cls(
            sum(param.numel() for param in params.values()) - num_fixed,
            num_fixed,
            sum(param.numel() for param in quantized),
            sum(map(quantized_bytes, quantized)),
        )

    @property
    def all(self) -> int:
        """Number of trained and of frozen ones."""
        return self.trained + self.frozen

    def needed_bytes(
        self,
        dtype: torch.dtype,
        *,
        has_masters: bool,
        trains: bool = True,
        shards: int = 1,
        gradient_shards: int = 1,
        weight_shards: int = 1,
    ) -> int:
        """Return the memory of weights, and of gradients if it trains, without activations and optimizer state.

        dtype: of the parameters. has_masters: whether trained ones have fp32 masters apart from them. shards,
        gradient_shards, weight_shards: numbers of replicas that masters, gradients, and parameters are divided among.
        """
        gradients = self.gradient_bytes * trains // gradient_shards
        return (
            self.weight_bytes(dtype) // weight_shards + self.trained * MASTER_BYTES * has_masters // shards + gradients
        )

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the memory of the parameters."""
        return (self.all - self.quantized) * dtype.itemsize + self.quantized_bytes

    @property
    def gradient_bytes(self) -> int:
        """Memory of the gradients of trained parameters."""
        return self.trained * GRADIENT_BYTES

    def describe(self) -> str:
        """Return a clause such as "124.4 M parameters, 0.3 M of them trained"."""
        trained = f", {self.trained / 1e6:.1f} M of them trained" if self.frozen else ""
        return f"{self.all / 1e6:.1f} M parameters{trained}"

    def __str__(self) -> str:
        trained = f", {self.trained:,} of them trained" if self.frozen and self.trained else ""
        return f"{self.all:,} parameters{trained}"


def check_memory(
    count: ParameterCount,
    dtype: torch.dtype,
    stages: int,
    processes: int,
    streams: Streams,
    *,
    has_masters: bool,
    trains: bool = True,
    shards: int = 1,
    gradient_shards: int = 1,
    weight_shards: int = 1,
    offloads: bool = False,
    params: Offload = "none",
) -> None:
    """Raise ValueError if `ParameterCount.needed_bytes` exceeds the memory.

    has_masters, trains, shards, gradient_shards, weight_shards: see there. processes: ranks on this host; offloads:
    whether a GPU needs no masters and gradients; params: model.offload.
    """
    on_cpu, held = streams.device.type == "cpu", count
    if params == "disk" or (params == "cpu" and not on_cpu):
        held = ParameterCount(0 if offloads and params == "cpu" else count.trained, 0)
    if offloads and not on_cpu:
        of_all, trains = held.weight_bytes(dtype) // weight_shards, False
    else:
        of_all = held.needed_bytes(
            dtype,
            has_masters=has_masters,
            trains=trains,
            shards=shards,
            gradient_shards=gradient_shards,
            weight_shards=weight_shards,
        )
    memory, per_rank = streams.memory_bytes(), of_all / stages
    if (needed := per_rank * (processes if on_cpu else 1)) > memory:
        place = "this host" if on_cpu else "a GPU"
        what = "weights and gradients" if trains and count.trained else "weights"
        raise ValueError(
            f"the model has {count}; {what} need at least {needed / 2**30:,.0f} GiB on {place} with "
            f"pp.stages={stages}, which has {memory / 2**30:,.0f} GiB; "
            "use a smaller model, or more stages on more hosts"
        )


def _check_writable(key: str, directory: str) -> None:
    """Raise ValueError if a directory can probably not be created or written to. Does not try it."""
    path = Path(directory).absolute()
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{key}={directory} is a symbolic link to nothing, or to itself; remove it")
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"{key}={directory}: {existing} is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        reason = "no writing to the read-only file system of" if is_read_only else "no permission to write to"
        raise ValueError(f"{key}={directory}: {reason} {existing}; give another directory")


def _check_run_files(log: LogConfig, rank: int) -> None:
    """Raise ValueError if a file of the run directory, or of the directory beside it, is of another type."""
    run_dir = Path(log.dir)
    for path in (run_dir / "config.toml", run_dir / METRICS, log_file(run_dir, rank)):
        if path.exists() and not path.is_file():
            raise ValueError(f"log.dir={log.dir}: {path} is not a file; remove it, or give another directory")
    for path in (run_dir / "logs", run_dir.parent / "cache"):
        if path.exists() and not path.is_dir():
            raise ValueError(f"log.dir={log.dir}: {path} is not a directory; remove it, or give another directory")


def check_streams(
    config: Config, sources: Sequence[WeightedSource], eval_sources: Sequence[WeightedSource], plugins: Plugins
) -> None:
    """Raise ValueError if an option needs all sequences of a source, and the source is streamed."""
    for source, _ in eval_sources:
        if isinstance(source, Streamed):
            raise ValueError(
                f"data.eval_sources: {source.name} cannot be streamed, since every evaluation reads the same "
                f"sequences; give {source.name.removeprefix(PREFIX)}, or a part of it in a file"
            )
    streamed = next((source.name for source, _ in sources if isinstance(source, Streamed)), None)
    if streamed is None:
        return
    data, optim = config.data, config.optim
    problems = {
        f"data.eval_fraction={data.eval_fraction:g} holds out the end": (data.eval_fraction > 0, "data.eval_sources"),
        "optim.epochs needs the length": (optim.epochs is not None, "optim.steps"),
        **{
            f'{key}="{value}" needs the length': (bool(EPOCHS.search(str(value))), "a number of steps")
            for key, value in config.lengths.items()
        },
        "data.weights=tokens needs the number of target tokens": (data.weights == "tokens", "data.weights=sequences"),
        f"{plugins.delta_option(config.pp)} keeps the activations of all sequences": (
            plugins.delta is not None,
            "another codec, such as fixpoint:bits=8",
        ),
        "model.dropout_mask=sample repeats the masks of all sequences": (
            config.model.dropout_mask == "sample",
            "model.dropout_mask=step",
        ),
    }
    for problem, (is_given, remedy) in problems.items():
        if is_given:
            raise ValueError(
                f"{problem} of {streamed}, whose length a run does not know; use {remedy}, or remove {PREFIX}"
            )
    if len(sources) > 1 and sources[0].weight is None:
        names = ",".join(f"{source.name}:{1 / len(sources):.2g}" for source, _ in sources)
        raise ValueError(
            f"data.sources has no weights, but the length of {streamed} is not known; write, for example, "
            f'data.sources="{names}"'
        )
