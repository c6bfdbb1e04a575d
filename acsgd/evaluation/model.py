"""Find the model to evaluate, and how the run that saved it reads data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.progress import RunState
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
    """Parameters of a head that nothing has trained, as of `Manifest`."""


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
