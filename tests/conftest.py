"""Fixtures of every test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 512 tokens, trained on the text of the "demo" source."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sorted(topics.values()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")


@pytest.fixture(scope="session")
def tiny_model(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the directory of a small Hugging Face model with new weights and the tokenizer.

    family: a key of TINY; options override the config.
    """
    made: dict[str, Path] = {}

    def make(family: str = "gpt2", **options: Any) -> Path:
        name = " ".join([family, *(f"{key}={value}" for key, value in sorted(options.items()))])
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / family
            save_tiny_model(made[name], tokenizer, family, **options)
        return made[name]

    return make


def save_tiny_model(directory: Path, tokenizer: PreTrainedTokenizerFast, family: str, **options: Any) -> None:
    """Write a model of TINY with new weights, and its tokenizer."""
    end = tokenizer.eos_token_id
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, **(TINY[family] | options)
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


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
"""Per family in acsgd.shards.FAMILIES, the options of a config with six blocks."""
