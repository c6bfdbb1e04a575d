"""Every option of a run: its type, unit, default and the arithmetic that must hold between options.

A run is described by a TOML file and command-line flags of the same names; flags > file > defaults.
Plug-ins (schedule, codecs, data-parallel mode, tasks) are spec strings, parsed against their own tables in
`acsgd.job`: this file lies below them and knows none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from acsgd.registry import suggest


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained, from which weights, in which precision."""

    name: str
    """Hugging Face id, Hugging Face directory, or layer-shard directory."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """"scratch" draws new weights and needs only the model's config.json."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of weights and activations; bf16 keeps fp32 master weights and accumulates gradients in fp32."""


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it makes one optimizer step."""

    task: str
    """Sources with optional weights: "a.jsonl:0.3,b.txt:0.7", *.jsonl, *.jsonl.zst, *.txt or "demo"."""
    sequence: int
    """Tokens per sequence."""
    batch: int
    """Sequences per optimizer step, over all replicas; it does not change with the number of ranks."""
    seed: int = 0
    """Seed of the data order, of dropout and of new weights."""


@dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut into stages and how micro-batches flow through them."""

    stages: int = 1
    """Ranks per pipeline; must divide the number of processes. The rest are replicas."""
    micro: int = 1
    """Sequences per micro-batch; must divide data.batch. Larger = fewer, longer messages and a larger bubble."""
    schedule: str = "1f1b"
    """"gpipe", "1f1b" or "interleaved:chunks=2"."""
    forward: str = "none"
    """Codec of the activations on the wire; "none:dtype=bf16" halves fp32."""
    backward: str = "none"
    """Codec of the activations' gradients on the wire."""
    layers: tuple[int, ...] | None = None
    """Blocks per stage, first to last; overrides the plan by cost. The embedding and head come on top."""


@dataclass(frozen=True)
class ReplicaConfig:
    """How replicas of the pipeline agree."""

    mode: str = "allreduce"
    """"allreduce", or "allreduce:bucket_mb=8"."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate, counted in optimizer steps."""

    lr: float
    """Peak learning rate."""
    steps: int
    """Optimizer steps of the whole run."""
    name: Literal["adamw"] = "adamw"
    """AdamW, in fp32 on the master weights."""
    warmup: int = 0
    """Optimizer steps over which the rate rises linearly to its peak."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How the rate falls to 0 after the warm-up."""
    clip: float = 1.0
    """Largest global gradient norm; "inf" = no clipping."""
    weight_decay: float = 0.01
    """Decoupled decay per step, of matrices and embeddings only: never of norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's first and second moments."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often the model is saved as layer shards."""

    dir: str | None = None
    """Directory of step-XXXXXXXX directories; default: "checkpoints" inside log.dir."""
    every: int | None = None
    """Optimizer steps between saves; the end of the run always saves. Default: only then."""


@dataclass(frozen=True)
class LogConfig:
    """What is written about the run."""

    dir: str = "runs/default"
    """The run directory: config.toml, metrics.jsonl, checkpoints/. Caches lie beside it."""
    to: str = "print,jsonl"
    """Comma-separated: "print" (a progress line), "jsonl" (metrics.jsonl)."""


@dataclass(frozen=True)
class RunConfig:
    """How the processes of the run treat each other."""

    timeout: float = 600.0
    """Seconds without an awaited message after which a rank gives its peer up and the run ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" = a GPU per local rank where there is one, else the CPU."""


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    pp: PipelineConfig = field(default_factory=PipelineConfig)
    dp: ReplicaConfig = field(default_factory=ReplicaConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    run: RunConfig = field(default_factory=RunConfig)


def parse(argv: list[str], *, speak: bool = True) -> Config:
    """Read `RUN.toml [--section.key value ...]`; flags > file > defaults.

    speak: whether this process may print help and usage errors. Raises ValueError for what the file gets wrong,
    SystemExit (as tyro does) for --help and malformed flags. What the values must fulfil, `check` tells.
    """
    argv = list(argv)
    arguments: list[str] = []
    if argv and not argv[0].startswith("-"):
        arguments = _as_flags(_read(Path(argv.pop(0))))
    with contextlib.nullcontext() if speak else contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(
            Config,
            args=arguments + argv,
            prog="train.py [RUN.toml]",
            description="Fine-tune a Hugging Face causal language model over pipeline stages x replicas.",
            console_outputs=speak,  # False silences help and unknown flags, but not values of a wrong type
        )


def check(config: Config) -> None:
    """Raise ValueError for values that no run can have, whatever the model and the number of processes."""
    data, pp, optim = config.data, config.pp, config.optim
    positive = {
        "data.sequence": data.sequence,
        "data.batch": data.batch,
        "pp.stages": pp.stages,
        "pp.micro": pp.micro,
        "optim.steps": optim.steps,
        "optim.lr": optim.lr,
        "optim.clip": optim.clip,
        "optim.eps": optim.eps,
        "run.timeout": config.run.timeout,
        "checkpoint.every": 1 if config.checkpoint.every is None else config.checkpoint.every,
    }
    for key, value in positive.items():
        if not value > 0:
            raise ValueError(f"{key}={value} must be greater than 0")
    if not math.isfinite(optim.lr):
        raise ValueError(f"optim.lr={optim.lr} must be finite")
    if not 0 <= optim.warmup <= optim.steps:
        raise ValueError(f"optim.warmup={optim.warmup} must lie between 0 and optim.steps={optim.steps}")
    if not optim.weight_decay >= 0:
        raise ValueError(f"optim.weight_decay={optim.weight_decay} must not be negative")
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"optim.betas={optim.betas} must lie in [0, 1)")
    if not 0 <= data.seed < 2**63:
        raise ValueError(f"data.seed={data.seed} must lie between 0 and 2**63 - 1")
    if data.batch % pp.micro:
        divisors = [n for n in range(1, data.batch + 1) if data.batch % n == 0]
        nearest = sorted(divisors, key=lambda n: abs(n - pp.micro))[:3]
        raise ValueError(
            f"pp.micro={pp.micro} does not divide data.batch={data.batch}; "
            f"use pp.micro={' or '.join(str(n) for n in sorted(nearest))}, or another data.batch"
        )
    unknown = set(filter(None, config.log.to.split(","))) - {"print", "jsonl"}
    if unknown:
        raise ValueError(
            f'log.to="{config.log.to}": unknown {", ".join(sorted(unknown))}; use "print", "jsonl" or both'
        )


def to_toml(config: Config) -> str:
    """Return the resolved configuration as TOML that `parse` reads back to an equal Config."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = dataclasses.asdict(getattr(config, section.name))
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read a run's TOML and refuse keys that do not exist."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"run file {path} cannot be read ({error.strerror}); give an existing TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    sections = {section.name: section.type for section in dataclasses.fields(Config)}
    for name, values in table.items():
        if name not in sections or not isinstance(values, dict):
            raise ValueError(f"{path}: unknown section [{name}]{suggest(name, sections)}")
        keys = {key.name: key for key in dataclasses.fields(getattr(sys.modules[__name__], str(sections[name])))}
        for key in values:
            if key not in keys:
                raise ValueError(f"{path}: unknown key {name}.{key}{suggest(key, keys)}")
    return table


def _as_flags(table: dict[str, dict[str, Any]]) -> list[str]:
    """Spell a TOML table as flags, so that file and command line pass one and the same type check."""
    flags: list[str] = []
    for section, values in table.items():
        for key, value in values.items():
            if isinstance(value, list):
                flags += [f"--{section}.{key}", *map(str, value)]
            else:
                flags.append(f"--{section}.{key}={value}")
    return flags


def _toml(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
