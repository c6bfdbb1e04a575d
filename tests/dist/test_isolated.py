"""Law: packed documents that are isolated give the losses of the same documents alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.cache import with_shared_cache
from lib.models import blocks_of
from lib.training import assert_same_training, plain_config, train_whole, whole_batches
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from acsgd.config.options import Config
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.layers.masks import DOCUMENTS
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs

TinyModel = Callable[..., Path]


def packed(model: Path, tmp_path: Path, **pp: object) -> Config:
    """Return a run on packed documents of 1 to 8 words in sequences of 56 tokens."""
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "{" ".join(str(n * k % 89) for k in range(n % 8 + 1))}"}}\n' for n in range(1, 120))
    )
    config = plain_config(model, tmp_path, steps=3, **pp)
    data = dataclasses.replace(config.data, sources=str(tmp_path / "a.jsonl"), sequence=56, rows="pack", isolate=True)
    return dataclasses.replace(config, data=data)


def alone(batch: Batch) -> Batch:
    """Return the batch with each document alone in a row of its own, from its first token, as a micro-batch."""
    assert batch.inputs is not None
    assert batch.labels is not None
    tokens, labels = [], []
    rows = zip(*(x.flatten(0, 1) for x in (*batch.inputs.values(), batch.labels)), strict=True)
    for row, row_documents, row_labels in rows:
        for document in row_documents.unique():
            within = row_documents == document
            pad = (0, len(row) - int(within.sum()))
            tokens.append(torch.nn.functional.pad(row[within], pad))
            labels.append(torch.nn.functional.pad(row_labels[within], pad, value=-100))
    one_each = {"input_ids": torch.stack(tokens)[:, None]}
    return dataclasses.replace(batch, inputs=one_each, labels=torch.stack(labels)[:, None])


def losses_alone(config: Config) -> list[float]:
    """Train a whole model on the documents of each step, one at a time; return the losses."""
    batches = whole_batches(config)
    assert all(list(batch.inputs or ()) == ["input_ids", DOCUMENTS] for batch in batches)
    assert max(int(batch.inputs[DOCUMENTS].max()) for batch in batches if batch.inputs) > 3, "several in a row"
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).train()
    return train_whole(model, config.optim, map(alone, batches))


def test_isolated_documents_have_the_losses_of_documents_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    models = [tiny_model(family, **blocks_of(family, 2)) for family in ("gpt2", "llama")]
    configs = [with_shared_cache(packed(model, tmp_path, stages=2, micro=2)) for model in models]
    assert_same_training(configs, 2, tmp_path, losses_alone)


def test_a_model_that_mixes_documents_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Recurrent blocks carry their state from one document to the next."""
    recurrent = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=512)
    for saved in (recurrent, tokenizer):
        saved.save_pretrained(tmp_path / "models" / "mamba")
    config = packed(tmp_path / "models" / "mamba", tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, init="scratch"))
    with pytest.raises(ValueError, match=r"^data\.isolate: mamba does not keep .* apart; use data\.rows=single, or"):
        open_inputs(prepare(config, Launch()))
