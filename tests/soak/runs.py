"""Short runs of one process, and the files by which they are compared."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from acsgd import __main__ as program
from acsgd import cli
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.shards.manifest import Manifest
from tests.lib.forks import save_model
from tests.soak.mutate import read_tensors
from tests.soak.oracle import Ended, in_child

STEPS = 3
LIMIT_S = 60.0
"""Maximum duration of a run or a command, seconds."""


OPTIONS: dict[str, Any] = {
    "model.name": "model",
    "data.sources": "text.txt",
    "data.sequence": 16,
    "data.batch": 4,
    "pp.micro": 2,
    "optim.lr": 1e-3,
    "log.dir": "runs/run",
    "run.timeout": 60.0,
}
"""Options of a run whose steps take a few milliseconds."""


def flags(**changed: object) -> list[str]:
    """Return the flags of a run of STEPS steps, saved after each. changed: options, with "__" for "."."""
    options = OPTIONS | {"optim.steps": STEPS, "checkpoint.every": 1, "log.to": "jsonl"}
    options |= {key.replace("__", "."): value for key, value in changed.items()}
    return [f"--{key}={value}" for key, value in options.items()]


def write_inputs(directory: Path) -> None:
    """Write the model and the text of `flags` into a directory."""
    save_model(directory / "model")
    (directory / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)


def train_here(argv: list[str]) -> Ended:
    """Run `train.py ARGV` in a child process in the current directory."""
    return in_child(lambda: program.main(argv, prog="train.py"), Path(), LIMIT_S)


def command(*argv: str) -> Ended:
    """Run `acsgd ARGV` in a child process in the current directory."""
    return in_child(lambda: cli.run([*argv]), Path(), LIMIT_S)


def checkpoints(run: Path) -> CheckpointDirectory:
    """Return the checkpoints of a run directory."""
    return CheckpointDirectory(run / "checkpoints")


def result(run: Path, step: int = STEPS) -> dict[str, str]:
    """Return the checksum of every layer file after a step."""
    manifest = Manifest.read(checkpoints(run).of(step))
    return {layer: entry.checksum for layer, entry in (manifest.layers | manifest.tables).items()}


def check_finite(run: Path, step: int = STEPS) -> None:
    """Check that all losses and all tensors of a finished run are finite."""
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(loss is not None and math.isfinite(loss) for loss in losses), f"losses {losses}"
    for path in sorted(checkpoints(run).of(step).glob("*.safetensors")):
        for key, tensor in read_tensors(path).items():
            assert not tensor.is_floating_point() or tensor.isfinite().all(), f"{path.name}: {key} is not finite"


def copy_into(names: Iterable[str], source: Path, target: Path) -> None:
    """Copy files and directories into another directory."""
    for name in names:
        copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
        copy(source / name, target / name)
