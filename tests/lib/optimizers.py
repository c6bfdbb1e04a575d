"""Optimizers of torch, as acsgd has them: oracles of whole runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers", "qwen2": "model.layers"}
"""Path of the blocks of a model, by family."""
MakeOptimizer = Callable[[PreTrainedModel, list[dict[str, Any]]], torch.optim.Optimizer]
"""Function of a model and of its parameter groups: those with weight decay, then the others."""


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


def optimizer_of_torch(name: str, family: str) -> MakeOptimizer | None:
    """Return what makes the optimizer of torch that optim.name stands for; None for AdamW."""

    def sgd(model: PreTrainedModel, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return DecoupledSGD([{"params": g["params"], "decay": g["weight_decay"]} for g in groups], momentum=0.9)

    def muon(model: PreTrainedModel, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return MuonAndAdamW(groups, model.get_submodule(BLOCKS[family]).parameters())

    def adafactor(model: PreTrainedModel, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(groups)

    return {"adamw": None, "sgd": sgd, "adafactor": adafactor, "muon": muon}[name]
