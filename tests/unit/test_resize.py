"""Rows that a conversion adds for new tokens are those of `resize_token_embeddings`, in runs and exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.commands import acsgd
from lib.models import LLAMA_SHAPE
from lib.saved import SMALL, small_run, train_alone
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from acsgd.config.options import AdapterConfig
from acsgd.shards.export import to_hf
from acsgd.shards.manifest import Manifest

TinyModel = Callable[..., Path]
NEW = ["<tide>", "<port>", "<hour>"]
GPT2, LLAMA = {"model_type": "gpt2", **SMALL}, {"model_type": "llama", **LLAMA_SHAPE}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
BART = {
    "model_type": "bart",
    "d_model": 16,
    "max_position_embeddings": 32,
    **{
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": GPT2,
    "untied": {**GPT2, "tie_word_embeddings": False},
    "head with bias": {"model_type": "gptj", **SMALL, "rotary_dim": 4},
    "llama": LLAMA,
    "tied llama": {**LLAMA, "tie_word_embeddings": True},
    "half": {**GPT2, "dtype": "bfloat16"},
    "seq2seq": T5,
    "bias of logits": BART,
}


def with_new_tokens(tokenizer: PreTrainedTokenizerFast, config: dict[str, Any], target: Path) -> Path:
    """Write a model with new weights that lacks rows for the last tokens of its tokenizer."""
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    described = AutoConfig.for_model(**{**sizes, **config})
    torch.manual_seed(1)
    auto_of(described).from_config(described, dtype=config.get("dtype")).save_pretrained(target)
    tokenizer.save_pretrained(target)
    extended = AutoTokenizer.from_pretrained(target)
    extended.add_tokens(NEW)
    extended.save_pretrained(target)
    return target


def auto_of(config: PreTrainedConfig) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def resized(model: Path, *, task: str = "lm") -> Path:
    """Convert a model, and add rows."""
    target = model.parent / "shards"
    code, printed = acsgd("convert", "from-hf", model, target, "--resize-embeddings", "--task", task)
    assert code == 0, printed
    return target


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_transformers(name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = with_new_tokens(tokenizer, MODELS[name], tmp_path / "model")
    auto = auto_of(AutoConfig.from_pretrained(model))
    task = "seq2seq" if auto is AutoModelForSeq2SeqLM else "lm"
    shards = resized(model, task=task)
    (tmp_path / "hf").mkdir()
    to_hf(shards, tmp_path / "hf")
    expected = auto.from_pretrained(model, dtype="auto")
    torch.manual_seed(0)
    expected.resize_token_embeddings(len(AutoTokenizer.from_pretrained(model)))
    found = auto.from_pretrained(tmp_path / "hf", dtype="auto")
    assert found.config.vocab_size == expected.config.vocab_size
    assert found.state_dict().keys() == expected.state_dict().keys()
    for key, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == expected.config.vocab_size


@pytest.mark.parametrize("adapter", [None, "lora:r=2"])
def test_new_tokens_are_trained_and_saved(
    adapter: str | None, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    shards = resized(with_new_tokens(tokenizer, GPT2, tmp_path / "model"))
    (tmp_path / "a.txt").write_text(f"{' '.join(NEW)} " * 40)
    config = small_run(shards, tmp_path / "runs" / "run", steps=1)
    data = dataclasses.replace(config.data, sources=str(tmp_path / "a.txt"), eval_fraction=0.0)
    checkpoint = train_alone(dataclasses.replace(config, data=data, adapter=AdapterConfig(adapter))) / "step-00000001"
    if adapter:
        assert acsgd("convert", "merge", checkpoint, tmp_path / "merged")[0] == 0
        checkpoint = tmp_path / "merged"
    (tmp_path / "hf").mkdir()
    to_hf(checkpoint, tmp_path / "hf")
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "hf"))
    added = after.get_input_embeddings().weight[before.config.vocab_size :]
    assert len(added) == len(NEW)
    is_trained = not torch.equal(added, rows_of(shards, tmp_path))
    assert is_trained == (adapter is None)


def rows_of(shards: Path, directory: Path) -> Tensor:
    """Return the last rows of the embedding of a model."""
    (directory / "start").mkdir()
    to_hf(shards, directory / "start")
    rows: Tensor = AutoModelForCausalLM.from_pretrained(directory / "start").get_input_embeddings().weight
    return rows[-len(NEW) :]


def test_a_model_with_enough_rows_stays_as_it_is(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("gpt2", **SMALL)
    line = f"{model} has rows for all tokens of its tokenizer: none are added\n"
    assert line in acsgd("convert", "from-hf", model, tmp_path / "a", "--resize-embeddings")[1]
    acsgd("convert", "from-hf", model, tmp_path / "b")
    assert Manifest.read(tmp_path / "a").layers == Manifest.read(tmp_path / "b").layers
