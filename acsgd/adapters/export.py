"""Convert a checkpoint of a model with an adapter: to an adapter directory of PEFT, or to a model without adapter."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.adapters.initial import BASE_CHECKSUM, DTYPE, BaseChecksum
from acsgd.adapters.inject import (
    build_adapted,
    inject_into,
    is_of_adapter,
    loaded_module,
    module_of,
    new_heads,
    peft_config,
    virtual_tokens_in_peft,
)
from acsgd.codecs.identity import DTYPES
from acsgd.config.adapters import NAME, Adapter, VirtualTokens, names_in, parse_adapter
from acsgd.model_classes import MODEL_CLASSES
from acsgd.shards.config import derive_layers, read_config
from acsgd.shards.convert import ReportProgress
from acsgd.shards.disk import ShardDirectory, model_files, write_layer
from acsgd.shards.export import write_model_files, write_run_options
from acsgd.shards.files import CONFIG
from acsgd.shards.layer_tensors import describe_tensors, layer_tensors
from acsgd.shards.manifest import Manifest

PREFIX = "base_model.model."
"""What PEFT puts before the names of a model."""


def to_peft(source: Path, target: Path) -> None:
    """Write the adapter of a checkpoint into `target`, an empty directory, as PEFT reads it.

    With it are the tokenizer, with the chat template, and generation_config.json, with the tokens that end a text.

    Raises ValueError if the checkpoint has no adapter, CorruptFileError if a file is corrupt.
    """
    shards, adapter, task = _open(source)
    config = read_config(source, task)
    model, layers = build_adapted(MODEL_CLASSES[task], config, adapter), shards.manifest.model
    trained, base = dict[str, Tensor](), BaseChecksum()
    for layer in layers.layers:
        stored = layer_tensors(model, layers, layer.index)
        tensors = shards.tensors(layer.name, stored)
        trained |= {key: tensors[key] for key in stored.weights}
        for key in stored.constants.keys() & {*layers.frozen}:
            base.add(key, tensors[key])
    named, described = _as_in_peft(model, adapter, task, trained)
    save_file(
        {key: tensor.contiguous() for key, tensor in named.items()},
        target / "adapter_model.safetensors",
        metadata={"format": "pt", BASE_CHECKSUM: base.hexdigest(), DTYPE: _dtype_of(shards)},
    )
    described.base_model_name_or_path = (shards.manifest.run or {}).get("origin", {}).get("model")
    described.inference_mode = True
    described.save_pretrained(str(target))
    for path in model_files(source):
        if path.name != CONFIG:  # that of the base
            shutil.copyfile(path, target / path.name)
    write_run_options(shards.manifest, target)


def _as_in_peft(
    model: PreTrainedModel, adapter: Adapter, task: str, trained: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Any]:
    """Return trained parameters by their names in an adapter directory of PEFT, and PEFT's config."""
    from peft import get_peft_model_state_dict

    if isinstance(adapter, VirtualTokens):
        return virtual_tokens_in_peft(adapter, model.config, [*trained.values()])
    own = {key: tensor for key, tensor in trained.items() if is_of_adapter(key)}
    named = get_peft_model_state_dict(model, state_dict=own, adapter_name=NAME)
    named |= {key: tensor for key, tensor in trained.items() if key not in own}  # of modules trained as a whole
    described: Any = copy.deepcopy(model.peft_config[NAME])  # what PEFT has made of it for this model
    described.modules_to_save = [*names_in(adapter.modules_to_save), *new_heads(model, task)] or None
    return {f"{PREFIX}{key}": tensor for key, tensor in named.items()}, described


def merge(source: Path, target: Path, *, report: ReportProgress = lambda done, total: None) -> None:
    """Write the model of a checkpoint, its adapter merged into it, as layer shards into `target`, an empty directory.

    Weights are in the dtype of the run, or of the base if that is wider; the sum is computed in fp32. Raises as
    `to_peft`.
    """
    shards, adapter, task = _open(source)
    if adapter.virtual_tokens:
        raise ValueError(
            f"{source}: virtual tokens are part of no weight; use acsgd convert to-peft {source} DIRECTORY"
        )
    config = read_config(source, task)
    adapted, plain = build_adapted(MODEL_CLASSES[task], config, adapter), MODEL_CLASSES[task].build(config)
    layers, files, dtypes = shards.manifest.model, {}, set[torch.dtype]()
    dtype = DTYPES[_dtype_of(shards)]
    total = sum(entry.bytes for entry in (*shards.manifest.layers.values(), *shards.manifest.constants.values()))
    done = 0
    for layer in layers.layers:
        tensors = shards.tensors(layer.name, layer_tensors(adapted, layers, layer.index))
        merged = _merged(tensors, plain, adapter, task, dtype)
        files[layer.name] = write_layer(target, layer.name, merged)
        dtypes |= {tensor.dtype for tensor in merged.values()}
        done += files[layer.name].bytes
        report(min(done, total), total)
    description = derive_layers(source, config, task)
    copied = write_model_files(shards, config, dtypes, target)
    described = describe_tensors(plain, description, copied)
    Manifest(0, task, description, files, {}, copied, run=None, tensors=described).write(target)


def _dtype_of(shards: ShardDirectory) -> str:
    """Return model.dtype of the run of a checkpoint."""
    return (shards.manifest.run or {}).get("options", {}).get("model.dtype") or "fp32"


def _open(source: Path) -> tuple[ShardDirectory, Adapter, str]:
    shards = ShardDirectory(source)
    shards.verify_model_files()
    adapter = parse_adapter(shards.manifest.adapter)
    if adapter is None:
        raise ValueError(f"{source} has no adapter; to convert the model: acsgd convert to-hf {source} MODEL")
    return shards, adapter, shards.manifest.task


@torch.no_grad()
def _merged(
    tensors: dict[str, Tensor], model: PreTrainedModel, adapter: Adapter, task: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of a layer without those of the adapter, which are added to what they adapt.

    dtype: of parameters, unless they are stored in a wider one.
    """
    own = {key: tensor for key, tensor in tensors.items() if is_of_adapter(key)}
    merged = {key: tensor for key, tensor in tensors.items() if key not in own}
    for path in dict.fromkeys(map(module_of, own)):
        module = inject_into(loaded_module(model, path, tensors.__getitem__), peft_config(adapter, model, task), path)
        for name, param in module.named_parameters():
            if is_of_adapter(name):
                param.copy_(own[f"{path}.{name}"])
        module.merge(safe_merge=True)
        for name, param in module.get_base_layer().named_parameters():
            merged[f"{path}.{name}"] = param.detach()
    params = dict(model.named_parameters())
    return {
        key: tensor.to(torch.promote_types(tensors[key].dtype, dtype)) if key in params else tensor
        for key, tensor in merged.items()
    }
