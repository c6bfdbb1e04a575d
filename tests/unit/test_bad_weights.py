"""Weights that do not fit a model are refused in one sentence with the tensor, also where they are converted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.commands import acsgd
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
NORM = "model.layers.1.input_layernorm.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose experts are stored one by one."""
    directory = tmp_path_factory.mktemp("mixtral") / "model"
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(directory)
    return directory


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def change(name: str, by: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: by(tensors[name]).contiguous()})


def add(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def fill_first(value: float) -> Callable[[Tensor], Tensor]:
    def fill(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return fill


CASES = {
    "a parameter is missing": (drop(NORM), f"{{model}} lacks parameters of the model: {NORM}"),
    "an expert is missing": (drop(EXPERT), f"{{model}} lacks parameters of the model: {EXPERT}"),
    "a parameter has another shape": (change(NORM, lambda x: x[:-1]), f"{{file}}: {NORM} has shape (15,), but by"),
    "an expert has another shape": (change(EXPERT, lambda x: x[:-1]), f"{{file}}: {EXPERT} has shape (23, 16), but by"),
    "an expert is transposed": (change(EXPERT, torch.t), f"{{file}}: {EXPERT} has shape (16, 24), but by"),
    "there is one expert more": (
        lambda tensors: tensors.update({EXPERT.replace(".2.", ".4."): tensors[EXPERT].clone()}),
        "experts.4.w3.weight",
    ),
    "there is one tensor more": (
        add("model.layers.1.extra.weight", torch.zeros(2)),
        "{model} holds tensors that MixtralForCausalLM does not have and that would be lost: model.layers.1.extra",
    ),
    "there is one block more": (
        add("model.layers.2.input_layernorm.weight", torch.ones(16)),
        "would be lost: model.la",
    ),
    "an expert is an integer": (change(EXPERT, lambda x: x.int()), f"{{file}}: {EXPERT} is of dtype I32"),
    "an expert has another dtype": (change(EXPERT, lambda x: x.half()), "they are of several dtypes, F16, F32"),
    "NaN": (change(NORM, fill_first(torch.nan)), f"{{file}}: {NORM} has values that are not finite"),
    "inf in an expert": (change(EXPERT, fill_first(torch.inf)), "mlp.experts.gate_up_proj has values that are not fin"),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_that_do_not_fit_are_refused(case: str, mixtral: Path, tmp_path: Path) -> None:
    model, (damage, reason) = tmp_path / "model", CASES[case]
    model.mkdir()
    (model / "config.json").write_bytes((mixtral / "config.json").read_bytes())
    tensors = load_file(mixtral / "model.safetensors")
    damage(tensors)
    save_file(tensors, model / "model.safetensors")
    code, printed = acsgd("convert", "from-hf", model, tmp_path / "target")
    assert (code, printed.count("\n")) == (2, 1), printed
    assert reason.format(model=model, file=model / "model.safetensors") in printed
    assert os.listdir(tmp_path) == ["model"]
