"""Runs with each optimizer: the losses of one process, and resume."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.forks import finish
from lib.resume import checkpoint_of, losses_of, stopped_half_way, train_ranks
from lib.resume import make_config as make_saved_config
from lib.training import RELATIVE, assert_same_training, make_config, train_whole, whole_batches
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from acsgd.config.options import Config, ReplicaConfig
from acsgd.io.checkpoint.inspect import inspect
from acsgd.optim.schedule import learning_rate
from acsgd.shards.manifest import Manifest

TinyModel = Callable[..., Path]
HAS_8BIT = importlib.util.find_spec("bitsandbytes") is not None
NEEDS_8BIT = pytest.mark.skipif(not HAS_8BIT, reason="bitsandbytes is not installed")


class DecoupledSGD(torch.optim.SGD):
    """torch's SGD, with weight decay that is not added to the gradient."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - group["lr"] * group["decay"])
        super().step()


class MuonAndAdamW(torch.optim.AdamW):
    """torch's AdamW, but its Muon for the matrices of blocks."""

    def __init__(self, groups: list[dict[str, Any]], of_blocks: Iterable[nn.Parameter]) -> None:
        matrices = [param for param in of_blocks if param.dim() == 2]
        decayed, others = groups
        kept = [param for param in decayed["params"] if all(param is not matrix for matrix in matrices)]
        super().__init__([{**decayed, "params": kept}, others])
        self._muon = torch.optim.Muon(
            matrices, weight_decay=decayed["weight_decay"], momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )

    def step(self) -> None:  # type: ignore[override]
        self._muon.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._muon.step()
        super().step()

    def zero_grad(self) -> None:  # type: ignore[override]
        self._muon.zero_grad()
        super().zero_grad()


def oracle(config: Config) -> list[float]:
    """Train in one process with the optimizer of torch."""

    def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return DecoupledSGD([{"params": g["params"], "decay": g["weight_decay"]} for g in groups], momentum=0.9)

    def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return MuonAndAdamW(groups, model.transformer.h.parameters())

    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).train()
    make = {"sgd": sgd, "adafactor": torch.optim.Adafactor, "muon": muon}[config.optim.name]
    return train_whole(model, config.optim, whole_batches(config), make=make)


def with_optimizer(config: Config, name: str, lr: float, **options: Any) -> Config:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, name=name, lr=lr, **options))


def test_stages_and_replicas_do_not_change_the_training(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A tied weight has one norm, which Adafactor uses, on both of its ranks."""
    config = make_config(tiny_model(), tmp_path, stages=2, micro=2)
    configs = [with_optimizer(config, "sgd", 0.1), with_optimizer(config, "adafactor", 0.05, schedule="wsd")]
    assert learning_rate(3, configs[1].optim) == 0.05
    assert_same_training(configs, 4, tmp_path, oracle)


def test_muon_on_two_stages_is_that_of_torch_in_one_process(tiny_model: TinyModel, tmp_path: Path) -> None:
    """20 steps; the embedding, which is also the head, takes AdamW's."""
    config = make_config(tiny_model(), tmp_path, steps=20, stages=2, micro=2)
    assert_same_training([with_optimizer(config, "muon", 1e-3)], 2, tmp_path, oracle)


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
def test_a_run_resumes_bit_for_bit_and_at_another_size(tiny_model: TinyModel, tmp_path: Path, optimizer: str) -> None:
    runs = Runs(tiny_model(), tmp_path)
    expected = runs.train(optimizer, "whole", 4)
    assert runs.train(optimizer, "part", 2) == expected[:2]
    runs.copy("part", "other size")
    assert runs.train(optimizer, "part", 4) == expected
    assert runs.train(optimizer, "other size", 4, ranks=2) == pytest.approx(expected, rel=RELATIVE)


@NEEDS_8BIT
def test_moments_in_8_bits_resume_bit_for_bit(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = with_optimizer(make_saved_config(tiny_model(), tmp_path / "whole", "bf16", "none"), "adamw8bit", 1e-3)
    train_ranks(0, 1, tmp_path / "store", [config])
    same = stopped_half_way(config, tmp_path / "same")
    train_ranks(0, 1, tmp_path / "store-same", [same])
    assert losses_of(same) == losses_of(config)
    assert Manifest.read(checkpoint_of(config)).layers == Manifest.read(checkpoint_of(same)).layers
    assert inspect(checkpoint_of(config))[0].errors == []
    saved = {key for file in checkpoint_of(config).glob("*.safetensors") for key in load_file(file)}
    assert any(key.startswith("exp_avg_scale/") for key in saved), "some moments are quantized"


@pytest.mark.parametrize("mode", ["allreduce", "diloco:inner=2,moment_correction=false"])
def test_the_state_of_another_optimizer_is_not_used(tiny_model: TinyModel, tmp_path: Path, mode: str) -> None:
    """In modes with local weights, replicas save optimizer state of their own."""
    runs = Runs(tiny_model(), tmp_path)
    expected = runs.train("adafactor", "run", 2, ranks=2, mode=mode)
    assert any("row_var" in name for name in runs.states("run", 2))
    losses = runs.train("lion", "run", 4, ranks=2, mode=mode)
    assert losses[:2] == expected
    states = runs.states("run", 4)
    assert any("exp_avg" in name for name in states)
    assert not any("_var" in name for name in states)
