"""Configurations of small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from acsgd.layers.description import ModelLayers
from acsgd.model_classes import MODEL_CLASSES

LLAMA_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 32,
        "n_layer": 6,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": LLAMA_SHAPE,
    "mistral": LLAMA_SHAPE | {"sliding_window": 8},
    "qwen2": LLAMA_SHAPE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
}
"""By model type, the options of a config with six blocks."""

NO_LAYERS = ModelLayers((), (), (), "")
"""Description of no model, for manifests of files that belong to none."""

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
"""Options of a GPT-2 with dropout."""


def layers_of(config: PreTrainedConfig, task: str = "lm") -> ModelLayers:
    """Return the layers of a model."""
    return MODEL_CLASSES[task].layers(config)


def first_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the module of each layer of a language model that runs first."""
    description = layers_of(model.config)
    paths = [
        layer.block or description.own_parameters(layer.index)[0].rpartition(".")[0] for layer in description.layers
    ]
    return [model.get_submodule(path) for path in paths]


def blocks_of(family: str, count: int) -> dict[str, int]:
    """Return the options that give a family `count` blocks; of qwen2, half of them with a sliding window."""
    if family == "gpt2":
        return {"n_layer": count}
    return {"num_hidden_layers": count} | ({"max_window_layers": count // 2} if family == "qwen2" else {})


def dropout_of(family: str) -> dict[str, float]:
    """Return the options that give a family dropout."""
    return DROPOUT if family == "gpt2" else {"attention_dropout": 0.1}


def tiny_config(family: str, *, vocab_size: int = 512, **options: Any) -> PreTrainedConfig:
    """Return the configuration of a small model, its options overridden by `options`."""
    return AutoConfig.for_model(family, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **TINY[family] | options)


def save_tiny_model(directory: Path, tokenizer: PreTrainedTokenizerFast, family: str, **options: Any) -> None:
    """Write a model of TINY with new weights, and its tokenizer."""
    end = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer)} | TINY[family] | options
    config = AutoConfig.for_model(family, bos_token_id=end, eos_token_id=end, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
