"""Law: prefix language modelling and UL2R in stages have the losses of one process with masks given to transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from lib.cache import with_shared_cache
from lib.models import blocks_of
from lib.training import assert_same_training, plain_config, train_whole, whole_batches
from transformers import AutoModelForCausalLM

from acsgd.config.options import Config
from acsgd.layers.batch import Batch
from acsgd.layers.masks import DOCUMENTS, NO_PREFIX, PREFIXES

TinyModel = Callable[..., Path]


def run_of(model: Path, tmp_path: Path, objective: Literal["prefix", "ul2r"], **pp: object) -> Config:
    """Return a run of 6 steps on packed documents of 1 to 8 words, with prompts if they are prefixes."""
    path = tmp_path / f"{objective}.jsonl"
    with path.open("w") as file:
        for n in range(1, 120):
            first, rest = f"{n}:", " ".join(str(n * k % 89) for k in range(n % 8 + 1))
            pair = {"prompt": first, "completion": f" {rest}"}
            file.write(json.dumps(pair if objective == "prefix" else {"text": f"{first} {rest}"}) + "\n")
    config = plain_config(model, tmp_path, steps=6, **pp)
    data = dataclasses.replace(
        config.data,
        sources=str(path),
        sequence=56,
        objective=objective,
        sentinels="{}",  # the digits are tokens
        isolate=objective == "prefix",
    )
    return dataclasses.replace(config, data=data)


def with_masks(batch: Batch) -> Batch:
    """Return the batch with a mask [M, B, 1, T, T] in place of documents and prefixes."""
    assert batch.inputs is not None
    prefixes = batch.inputs[PREFIXES]
    assert (prefixes != NO_PREFIX).any()
    mask = torch.ones(prefixes.shape[-1], prefixes.shape[-1]).tril().bool()
    mask = mask | ((prefixes[..., None] == prefixes[..., None, :]) & (prefixes[..., None] != NO_PREFIX))
    inputs = {"input_ids": batch.inputs["input_ids"]}
    if DOCUMENTS in batch.inputs:
        documents = batch.inputs[DOCUMENTS]
        mask = mask & (documents[..., None] == documents[..., None, :])
        starts = torch.arange(documents.shape[-1]).expand_as(documents)
        first = [[(row == row[:, None]).int().argmax(-1) for row in micro] for micro in documents]
        inputs["position_ids"] = starts - torch.stack([torch.stack(micro) for micro in first])
    return dataclasses.replace(batch, inputs=inputs | {"attention_mask": mask.unsqueeze(2)})


def losses_of_whole(config: Config) -> list[float]:
    """Train the whole model of transformers; return the losses."""
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).train()
    return train_whole(model, config.optim, map(with_masks, whole_batches(config)))


def test_objectives_with_prefixes_train_in_stages(tiny_model: TinyModel, tmp_path: Path) -> None:
    configs = [
        with_shared_cache(run_of(tiny_model(family, **blocks_of(family, 2)), tmp_path, objective, stages=2, micro=2))
        for family, objective in (("gpt2", "prefix"), ("llama", "ul2r"))
    ]
    assert_same_training(configs, 2, tmp_path, losses_of_whole)
