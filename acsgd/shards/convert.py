"""Lossless conversion between Hugging Face checkpoints and layer shards, with one layer in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from acsgd.shards import family_of
from acsgd.shards.disk import Manifest, copy_model_files, write_layer
from acsgd.shards.files import save_tensors
from acsgd.shards.layers import meta_model, stored_keys, stored_weights
from acsgd.shards.locate import INDEX, open_hf, open_shards, read_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def from_hf(source: Path, target: Path) -> None:
    """Convert a Hugging Face directory with safetensors to layer shards in `target`, an empty directory.

    Tensors keep their dtype and bits. Raises as `open_hf`.
    """
    config, model, parameters = open_hf(source)
    layers = {}
    for shard in family_of(config.model_type).layers(config):
        tensors = read_tensors({key: parameters[key] for key in stored_keys(model, shard)})
        layers[shard.name] = write_layer(target, shard.name, tensors)
    Manifest(step=0, layers=layers, replicas={}, model_files=copy_model_files(source, target), run=None).write(target)


def to_hf(source: Path, target: Path, *, dtype: str | None = None) -> None:
    """Convert layer shards to a Hugging Face directory in `target`, an empty directory.

    dtype: "float32", "bfloat16" or "float16" to cast to; None = keep each tensor's dtype and bits. Raises as
    `open_shards`.
    """
    directory, config = open_shards(source)
    model = meta_model(config)
    shards = family_of(config.model_type).layers(config)
    weight_map: dict[str, str] = {}
    total = 0
    dtypes = set()
    for number, shard in enumerate(shards, start=1):
        tensors = directory.tensors(shard.name, stored_weights(model, shard))
        if dtype is not None:
            tensors = {key: tensor.to(DTYPES[dtype]) for key, tensor in tensors.items()}
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(tensors, target / name)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        dtypes |= {tensor.dtype for tensor in tensors.values()}
    copy_model_files(source, target)
    config.architectures = [type(model).__name__]
    if len(dtypes) == 1:
        config.dtype = dtypes.pop()
    config.save_pretrained(target)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2))
