"""The model that an evaluation loads, and its configuration: that of a run which takes no step."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.commands.evaluation.options import EvalOptions
from acsgd.config.options import (
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
)
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.progress import RunState
from acsgd.io.data.row_spec import RowStage, data_options
from acsgd.io.data.sources.base import ReadOptions
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import MANIFEST


class EvaluatedModel(NamedTuple):
    """A model by name, with what its manifest records."""

    name: str
    """Directory or Hugging Face id."""
    task: str | None
    """Task of layer shards; None for a Hugging Face model."""
    options: dict[str, Any]
    """Options of the run that saved it, by their names; empty if no run did."""
    new: tuple[str, ...] = ()
    """Parameters of a head that nothing has trained, see `Manifest`."""


def find_evaluated(name: str) -> EvaluatedModel:
    """Return the model of that name; of a run directory, its newest checkpoint. Raises CorruptFileError."""
    path = Path(name)
    for checkpoints in (CheckpointDirectory(path), CheckpointDirectory(path / "checkpoints")):
        if steps := checkpoints.steps():
            path = checkpoints.of(steps[-1])
    if not os.path.lexists(path / MANIFEST):
        return EvaluatedModel(str(path) if path.exists() else name, None, {})
    shards = ShardDirectory(path)
    run = RunState.of(shards)
    options = {**run.identity.data, **run.options} if run else {}
    return EvaluatedModel(str(path), shards.manifest.task, options, shards.manifest.new)


READING = tuple(each.name for each in fields(ReadOptions))
"""Options of the command that are those of [data] with the same name."""
PLACING = ("long", "isolate")
"""Options of [data] that say how data.rows puts documents into rows."""

TYPED = {
    "data.sources": "--data",
    "data.eval_sources": "--data",
    "data.batch": "--micro",
    "model.task": "--task",
    "model.dtype": "--dtype",
    "pp.stages": "--stages",
    "pp.micro": "--micro",
    "eval.metrics": "--metrics",
    "run.timeout": "--timeout",
    "run.device": "--device",
    **{f"data.{name}": f"--{name.replace('_', '-')}" for name in (*READING, "sequence", "rows", "long")},
}
"""Option of the command, by the option of a run that it sets."""


@contextlib.contextmanager
def as_typed() -> Iterator[None]:
    """Context in which errors name the options of the command in place of those of a run."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        # an option that is given to a run as a flag has the dashes already
        keys = "|".join(re.escape(key) for key in sorted(TYPED, key=len, reverse=True))
        message = re.sub(rf"(?:--)?\b({keys})\b", lambda found: TYPED[found[1]], str(error))
        raise ValueError(message) from error


def config_of(options: EvalOptions, model: EvaluatedModel, world_size: int) -> Config:
    """Return the configuration of an evaluation. Raises ValueError if the sequence length is not known."""
    if world_size % options.stages:
        raise ValueError(f"--stages {options.stages} does not divide the number of processes, {world_size}")
    names = data_options(RowStage.LAYOUT, RowStage.ROWS)
    if options.rows is not None:  # what is recorded belongs to other rows
        names = tuple(name for name in names if name not in PLACING)
    recorded = {name: model.options.get(f"data.{name}") for name in names}
    given = {"sequence": options.sequence, "rows": options.rows, "long": options.long}
    data = {**recorded, **{name: value for name, value in given.items() if value is not None}}
    if data["sequence"] is None:
        reason = "does not record a sequence length" if Path(model.name).exists() else "is not a directory here"
        raise ValueError(
            f"{model.name} {reason}; give a run or a checkpoint or, for others, --sequence, such as --sequence 512"
        )
    # micro-batches of a pipeline at a time: more hide the time until its last stage has work, and pad the last batch
    micros = 2 * options.stages if options.stages > 1 else 1
    return Config(
        model=ModelConfig(
            model.name,
            task=options.task or model.task or "lm",
            dtype=options.dtype or model.options.get("model.dtype") or "fp32",
        ),
        data=data_of(
            options,
            eval_sources=options.data,
            batch=options.micro * micros * (world_size // options.stages),
            **{name: value for name, value in data.items() if value is not None},
        ),
        optim=OptimConfig(lr=1.0, steps=1),
        pp=PipelineConfig(stages=options.stages, micro=options.micro, schedule="gpipe"),
        eval=EvalConfig(metrics=options.metrics),
        log=LogConfig(dir=str(options.cache.parent / "eval"), to=""),
        run=RunConfig(timeout=options.timeout, device=options.device),
    )


def data_of(options: EvalOptions, **others: Any) -> DataConfig:
    """Return the sources, and how their records are read. others: other fields."""
    assert options.data is not None
    return DataConfig(sources=options.data, **{name: getattr(options, name) for name in READING}, **others)
