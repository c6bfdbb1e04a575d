"""Runs of one process with real checkpoints, and checkpoints that are invalid though all hashes match, for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from acsgd import train
from acsgd.config.options import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
)
from acsgd.groups import connect
from acsgd.io.checkpoint.contents import build_tensors
from acsgd.io.files.checksum import file_checksum
from acsgd.launch import Launch
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs
from acsgd.shards.config import read_config
from acsgd.shards.manifest import Manifest, StoredFile
from lib.patience import NO_LIMIT_S

SMALL = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 32}
"""Options of a GPT-2 so small that a checkpoint is hashed in a millisecond."""


def small_run(model: Path, run_dir: Path, *, steps: int = 2, every: str | None = "1", **checkpoint: Any) -> Config:
    """Return the config of a run of a few steps, saved after each. checkpoint: further checkpoint options."""
    return Config(
        model=ModelConfig(str(model)),
        data=DataConfig(sources="demo", sequence=16, batch=2, eval_fraction=0.0001),
        optim=OptimConfig(lr=1e-3, steps=steps),
        pp=PipelineConfig(micro=2),
        checkpoint=CheckpointConfig(every=every, **checkpoint),
        log=LogConfig(dir=str(run_dir), to="jsonl"),
    )


def train_alone(config: Config) -> Path:
    """Train a run in this process and return the directory of its checkpoints."""
    job = prepare(config, Launch())
    inputs = open_inputs(job)
    with connect(job.topology, timeout=timedelta(seconds=NO_LIMIT_S), store=dist.HashStore()) as groups:
        train.train(job, inputs, groups, RunLock([]))
    return job.paths.checkpoints.path


def assert_describes_its_model(directory: Path) -> None:
    """Check that a manifest records the tensors of the model that the config.json beside it describes."""
    manifest = Manifest.read(directory)
    assert manifest.checked_tensors is not None
    assert manifest.checked_tensors == build_tensors(manifest, read_config(directory, manifest.task))


def rewrite_tensors(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors in a file of a checkpoint, in place, and the manifest so that its hash matches."""
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    entry = StoredFile(path.name, path.stat().st_size, file_checksum(path))

    def updated(file: StoredFile) -> StoredFile:
        return entry if file.file == path.name else file

    manifest = Manifest.read(path.parent)
    dataclasses.replace(
        manifest,
        layers={layer: updated(file) for layer, file in manifest.layers.items()},
        tables={key: updated(file) for key, file in manifest.tables.items()},
        replicas={layer: [updated(file) for file in files] for layer, files in manifest.replicas.items()},
    ).write(path.parent)
