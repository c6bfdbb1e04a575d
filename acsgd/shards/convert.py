"""Lossless conversion between Hugging Face checkpoints and layer shards, with one layer in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from acsgd.shards.config import derive_layers
from acsgd.shards.disk import Manifest, copy_model_files, write_layer
from acsgd.shards.files import save_tensors
from acsgd.shards.locate import open_hf, open_shards, stored_names, tensor_of
from acsgd.shards.names import to_files
from acsgd.shards.stored import INDEX
from acsgd.tasks import TASKS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def from_hf(source: Path, target: Path, *, task: str = "lm") -> None:
    """Convert a Hugging Face directory to layer shards in `target`, an empty directory.

    Tensors keep their dtype and bits. Raises as `open_hf`, and LayersError if the model has no layers.
    """
    opened = open_hf(source, task)
    layers = {}
    for name, keys in stored_names(derive_layers(source, opened.config, task)).items():
        layers[name] = write_layer(target, name, opened.read(keys))
    Manifest(step=0, layers=layers, replicas={}, model_files=copy_model_files(source, target), run=None).write(target)


def to_hf(source: Path, target: Path, *, dtype: str | None = None) -> None:
    """Convert layer shards to a Hugging Face directory in `target`, an empty directory.

    dtype: "float32", "bfloat16" or "float16" to cast to; None = keep each tensor's dtype and bits. Raises as
    `open_shards`.
    """
    directory, config = open_shards(source)
    model = TASKS["lm"].build(config)
    shards = stored_names(derive_layers(source, config, "lm"))
    weight_map: dict[str, str] = {}
    total = 0
    dtypes = set()
    for number, (shard, keys) in enumerate(shards.items(), start=1):
        tensors = directory.tensors(shard, {key: tensor_of(model, key) for key in keys})
        if dtype is not None:
            tensors = {key: tensor.to(DTYPES[dtype]) for key, tensor in tensors.items()}
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = to_files(model, tensors)
        save_tensors({key: tensor.contiguous() for key, tensor in tensors.items()}, target / name)
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
