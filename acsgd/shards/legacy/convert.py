"""Lossless conversion between checkpoints of the replaced systems and layer shards, one layer in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.model_classes import MODEL_CLASSES
from acsgd.shards.config import derive_layers
from acsgd.shards.convert import ReportProgress, write_layers
from acsgd.shards.disk import ShardDirectory, copy_model_files, list_model_files
from acsgd.shards.files import CONFIG, read_json_object, tensor_headers
from acsgd.shards.hf_model import names_of
from acsgd.shards.layer_tensors import describe_tensors, layer_tensors
from acsgd.shards.legacy.layouts import BLOCK, HEAD, LegacyLayout
from acsgd.shards.legacy.model import layout_of, open_legacy, untie
from acsgd.shards.locate import open_shards
from acsgd.shards.manifest import Manifest
from acsgd.shards.writer import bytes_of


def from_legacy(
    source: Path, target: Path, *, config: Path | None = None, report: ReportProgress = lambda done, total: None
) -> None:
    """Convert a model or training checkpoint of a replaced system to layer shards in `target`, a directory.

    It is empty, or was left by an interrupted conversion of the same source, which continues. Tensors keep their dtype
    and bits, and the head its own weights. config: directory with config.json and tokenizer; None = `source`. Raises as
    `open_legacy`, ValueError if a parameter is not finite, LayersError if the model cannot be divided into layers.
    """
    model_directory = config or source
    legacy = open_legacy(source, model_directory)
    model = derive_layers(model_directory, legacy.config, legacy.layout.task)
    files = write_layers(legacy, model, target, sources=[source, model_directory], report=report)
    copy_model_files(model_directory, target)
    if HEAD in legacy.layout.files:
        _write_untied(target / CONFIG)
    copied = list_model_files(target)
    tensors = describe_tensors(legacy.model, model, copied)
    Manifest(0, legacy.layout.task, model, files, {}, copied, run=None, tensors=tensors).write(target)


def to_legacy(source: Path, target: Path, *, report: ReportProgress = lambda done, total: None) -> None:
    """Convert layer shards to a model of a replaced system, one file per layer, in `target`, an empty directory.

    Tensors keep their dtype and bits; of tied ones, each file gets a copy. Raises ValueError if the type of the model
    has no old layout, otherwise as `open_shards`.
    """
    directory, config, model = open_shards(source)
    layout, description = layout_of(source), directory.manifest.model
    if directory.manifest.task != layout.task:
        raise ValueError(
            f"{source} is a model for the task {directory.manifest.task}; the old layout of {config.model_type} is of "
            f"the task {layout.task}"
        )
    untied = MODEL_CLASSES[layout.task].build(untie(config))
    layer_of = {key: description.index(layer) for layer, keys in description.stored().items() for key in keys}
    stored_as = {name: names[0] for names in names_of(model).values() for name in names}
    parts, stored_bytes = layout.names(untied), _stored_bytes(directory)
    sizes = {part: sum(stored_bytes.get(stored_as[key], 0) for key in keys.values()) for part, keys in parts.items()}
    done = 0
    for part, names in parts.items():
        tensors = _buffers(layout, untied, part)
        for layer in dict.fromkeys(layer_of[stored_as[key]] for key in names.values()):
            name = description.layers[layer].name
            stored = directory.tensors(name, layer_tensors(model, description, layer))
            # copies, because each has the whole file as its storage
            tensors |= {name: stored[x].clone() for name, key in names.items() if (x := stored_as[key]) in stored}
        torch.save(tensors, target / f"pytorch_{part}.pt")
        done += sizes[part]
        report(done, sum(sizes.values()))
    copy_model_files(source, target)


def _stored_bytes(directory: ShardDirectory) -> dict[str, int]:
    """Return the number of bytes of each tensor in the files of the layers."""
    manifest = directory.manifest
    headers = [tensor_headers(directory.path / entry.file) for entry in (manifest.layers | manifest.tables).values()]
    return {name: bytes_of(header) for each in headers for name, header in each.items()}


def _buffers(layout: LegacyLayout, model: PreTrainedModel, part: str) -> dict[str, Tensor]:
    """Return what older versions of transformers stored with a layer besides parameters."""
    kind, block = (BLOCK, int(part)) if part.isdecimal() else (part, 0)
    positions = model.config.max_position_embeddings
    return {
        name.removeprefix(f"{kind}."): buffer.compute(model, block, positions).clone()
        for name, buffer in layout.buffers.items()
        if name.startswith(f"{kind}.")
    }


def _write_untied(path: Path) -> None:
    """Set in config.json that the head has weights of its own."""
    fields = read_json_object(path) | {"tie_word_embeddings": False}
    path.write_text(json.dumps(fields, indent=2) + "\n")
