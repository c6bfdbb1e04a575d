"""Runs with each optimizer: the losses of one process, and resume."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lib.forks import finish
from lib.training import assert_same_training, make_config, train_whole, whole_batches
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from acsgd.config.options import Config
from acsgd.optim.schedule import learning_rate

TinyModel = Callable[..., Path]


class DecoupledSGD(torch.optim.SGD):
    """torch's SGD, with weight decay that is not added to the gradient."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - group["lr"] * group["decay"])
        super().step()


def oracle(config: Config) -> list[float]:
    """Train in one process with the optimizer of torch."""

    def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return DecoupledSGD([{"params": g["params"], "decay": g["weight_decay"]} for g in groups], momentum=0.9)

    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).train()
    make = {"sgd": sgd, "adafactor": torch.optim.Adafactor}[config.optim.name]
    return train_whole(model, config.optim, whole_batches(config), make=make)


def with_optimizer(config: Config, name: str, lr: float, **options: Any) -> Config:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, name=name, lr=lr, **options))


def test_stages_and_replicas_do_not_change_the_training(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A tied weight has one norm, which Adafactor uses, on both of its ranks."""
    config = make_config(tiny_model(), tmp_path, stages=2, micro=2)
    configs = [with_optimizer(config, "sgd", 0.1), with_optimizer(config, "adafactor", 0.05, schedule="wsd")]
    assert learning_rate(3, configs[1].optim) == 0.05
    assert_same_training(configs, 4, tmp_path, oracle)


def test_a_run_resumes_bit_for_bit_and_with_another_optimizer_anew(tiny_model: TinyModel, tmp_path: Path) -> None:
    def run(name: str, directory: str, steps: int) -> list[float]:
        config = make_config(tiny_model(), tmp_path, steps=steps)
        config = with_optimizer(config, name, 0.01, schedule="constant", warmup=0)
        log = dataclasses.replace(config.log, dir=str(tmp_path / directory), to="jsonl")
        finish(dataclasses.replace(config, log=log), 1)
        lines = (tmp_path / directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    expected = run("adafactor", "whole", 4)
    assert run("adafactor", "part", 2) == expected[:2]
    shutil.copytree(tmp_path / "part", tmp_path / "other")
    assert run("adafactor", "part", 4) == expected
    other = run("lion", "other", 4)
    assert other[:3] == expected[:3]
    assert other[3] != expected[3]
    (saved,) = (tmp_path / "other").glob("checkpoints/step-00000004/embed.safetensors")
    with safe_open(saved, "pt") as file:
        assert {name.partition("/")[0] for name in file.keys() if "/" in name} == {"exp_avg"}  # noqa: SIM118
