"""Runs with each optimizer: the losses of one process, and resume."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.forks import finish
from lib.training import RELATIVE, make_config
from safetensors.torch import load_file

from acsgd.config.options import Config, ReplicaConfig

TinyModel = Callable[..., Path]
HAS_8BIT = importlib.util.find_spec("bitsandbytes") is not None
NEEDS_8BIT = pytest.mark.skipif(not HAS_8BIT, reason="bitsandbytes is not installed")


def with_optimizer(config: Config, name: str, lr: float, **options: Any) -> Config:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, name=name, lr=lr, **options))


class Runs:
    """Runs of one model in a directory, each with an optimizer."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory

    def train(self, optimizer: str, name: str, steps: int, *, ranks: int = 1, mode: str = "allreduce") -> list[float]:
        """Train a run to a step, from its newest checkpoint if it has one; return all losses. Two ranks: two stages,
        or in a mode with local weights, two replicas.
        """
        stages = ranks if mode == "allreduce" else 1
        config = make_config(self._model, self._directory, steps=steps, stages=stages)
        config = with_optimizer(config, optimizer, 0.01, schedule="constant", warmup=0)
        log = dataclasses.replace(config.log, dir=str(self._directory / name), to="jsonl")
        finish(dataclasses.replace(config, log=log, dp=ReplicaConfig(mode)), ranks)
        lines = (self._directory / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def copy(self, name: str, to: str) -> None:
        shutil.copytree(self._directory / name, self._directory / to)

    def states(self, name: str, step: int) -> set[str]:
        """Return the names of the saved optimizer state of the first layer."""
        files = (self._directory / name / f"checkpoints/step-{step:08}").glob("**/embed*.safetensors")
        names = {key for file in files for key in load_file(file)}
        return {key.partition("/")[0] for key in names if "/" in key}


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", pytest.param("adamw8bit", marks=NEEDS_8BIT)])
def test_a_run_resumes_at_another_size(tiny_model: TinyModel, tmp_path: Path, optimizer: str) -> None:
    runs = Runs(tiny_model(n_layer=2), tmp_path)
    runs.train(optimizer, "run", 2)
    runs.copy("run", "other size")
    expected = runs.train(optimizer, "run", 4)
    assert runs.train(optimizer, "other size", 4, ranks=2) == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("mode", ["allreduce", "diloco:inner=2,moment_correction=false"])
def test_the_state_of_another_optimizer_is_not_used(tiny_model: TinyModel, tmp_path: Path, mode: str) -> None:
    """In modes with local weights, replicas save optimizer state of their own."""
    runs = Runs(tiny_model(n_layer=2), tmp_path)
    expected = runs.train("adafactor", "run", 2, ranks=2, mode=mode)
    assert any("row_var" in name for name in runs.states("run", 2))
    losses = runs.train("lion", "run", 4, ranks=2, mode=mode)
    assert losses[:2] == expected
    states = runs.states("run", 4)
    assert any("exp_avg" in name for name in states)
    assert not any("_var" in name for name in states)
