"""Find the parameters of a model in the files of a directory and check them, from the headers of the files alone."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.fields import from_json
from acsgd.shards import family_of
from acsgd.shards.check import first_names
from acsgd.shards.config import read_config
from acsgd.shards.disk import MANIFEST, ShardDirectory, model_files
from acsgd.shards.files import (
    TensorHeader,
    check_file_name,
    open_tensors,
    read_json_object,
    tensor_headers,
    unusable,
)
from acsgd.shards.layers import meta_model, stored_keys, tied_keys

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F64", "F32", "BF16", "F16")
"""safetensors names of the dtypes that weights may have."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    name: str
    header: TensorHeader


class HFModel(NamedTuple):
    """A Hugging Face directory whose files hold exactly the parameters that its config describes."""

    config: PreTrainedConfig
    model: PreTrainedModel
    """The model on the meta device."""
    parameters: dict[str, StoredTensor]
    """Where each parameter is stored, by its name in the model."""


def open_hf(directory: Path) -> HFModel:
    """Open a Hugging Face directory with safetensors.

    Reads only headers, and the values of tied parameters that are stored twice. Raises ValueError if parameters are
    missing, have another shape than in config.json, or are not floating-point numbers, if tied ones differ, or if the
    directory holds tensors that the model does not have; CorruptFileError if a file is not complete.
    """
    config = read_config(directory)
    model_files(directory)
    stored = _stored_tensors(directory)
    _check_blocks(stored, config, directory)
    model = meta_model(config)
    parameters, unexpected = _match(stored, model)
    _check_dtypes(parameters.values())
    if unexpected:
        raise ValueError(
            f"{directory} holds tensors that {type(model).__name__} does not have and that would be lost: "
            f"{first_names(sorted(unexpected))}"
        )
    tied = tied_keys(model)
    missing = [key for key, _ in model.named_parameters(remove_duplicate=False) if key not in {*parameters, *tied}]
    if missing:
        raise ValueError(f"{directory} lacks parameters of the model: {first_names(missing)}")
    _check_shapes(parameters, model)
    _check_ties(parameters, tied, directory)
    return HFModel(config, model, parameters)


def open_shards(directory: Path) -> tuple[ShardDirectory, PreTrainedConfig]:
    """Open a layer-shard directory as a model. Verifies config.json and the tokenizer, and reads the other headers.

    Raises as `open_hf` and `ShardDirectory`.
    """
    shards = ShardDirectory(directory)
    shards.verify_model_files()
    config = read_config(directory)
    model_files(directory)
    layers = family_of(config.model_type).layers(config)
    if [*shards.manifest.layers] != [layer.name for layer in layers]:
        raise ValueError(
            f"{directory / MANIFEST} lists {len(shards.manifest.layers)} layers, config.json describes {len(layers)} "
            f"({layers[0].name} .. {layers[-1].name}); restore the directory from a copy"
        )
    model = meta_model(config)
    for layer in layers:
        path = directory / shards.file_of(layer.name).file
        headers = tensor_headers(path)
        keys = [key for key in stored_keys(model, layer) if key in headers]  # reading the layer finds those missing
        parameters = {key: StoredTensor(path, key, headers[key]) for key in keys}
        _check_dtypes(parameters.values())
        _check_shapes(parameters, model)
    return shards, config


def read_tensors(stored: dict[str, StoredTensor]) -> dict[str, Tensor]:
    """Read tensors; they lie in memory-mapped files."""
    by_file = defaultdict(list)
    for key, tensor in stored.items():
        by_file[tensor.path].append((key, tensor.name))
    tensors: dict[str, Tensor] = {}
    for path, names in by_file.items():
        with open_tensors(path) as file:
            tensors |= {key: file.get_tensor(name) for key, name in names}
    return tensors


@dataclass(frozen=True)
class _Index:
    """Fields of the index of a model in several files."""

    weight_map: dict[str, Annotated[str, check_file_name]]


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a Hugging Face directory by its name."""
    index, single = directory / INDEX, directory / SINGLE
    if os.path.lexists(index):
        return _indexed_tensors(index)
    if os.path.lexists(single):
        return {name: StoredTensor(single, name, header) for name, header in tensor_headers(single).items()}
    raise ValueError(
        f"{directory} has neither {SINGLE} nor {INDEX}; acsgd reads safetensors only (pickled weights can run code): "
        "save the model with transformers' save_pretrained, or train new weights with --model.init scratch"
    )


def _indexed_tensors(index: Path) -> dict[str, StoredTensor]:
    fields = read_json_object(index)
    try:
        weight_map = from_json(_Index, fields, ignore_unknown=True).weight_map
    except ValueError as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error}") from None
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if unusable(index.parent / file) == "is missing"]
    if absent:
        raise ValueError(f"{index} names missing files: {first_names(absent)}; download them")
    headers = {file: tensor_headers(index.parent / file) for file in files}
    wrong = [name for name, file in weight_map.items() if name not in headers[file]]
    if wrong:
        raise ValueError(
            f"{index}: {weight_map[wrong[0]]} does not hold {wrong[0]}, which the index says; download both again"
        )
    return {name: StoredTensor(index.parent / file, name, headers[file][name]) for name, file in weight_map.items()}


def _check_blocks(stored: Iterable[str], config: PreTrainedConfig, directory: Path) -> None:
    """Raise ValueError if a block of the config has no tensor, before the model is built, which may have thousands."""
    prefixes = {name[: dot.start()] for name in stored for dot in re.finditer(r"\.", name)}
    blocks = [layer.modules[0] for layer in family_of(config.model_type).layers(config) if layer.kind == "block"]
    # models saved without their head lack the first component: "h.0" for "transformer.h.0"
    absent = [path for path in blocks if path not in prefixes and path.partition(".")[2] not in prefixes]
    if absent:
        raise ValueError(
            f"{directory / 'config.json'} says that the model has {len(blocks)} blocks, but the files have no tensor "
            f"of {len(absent)} of them, the first of which is {absent[0]}; give config and weights of the same model"
        )


def _match(stored: dict[str, StoredTensor], model: PreTrainedModel) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the stored tensor of each parameter, and the names of tensors that are neither parameters nor buffers."""
    known = set(dict(model.named_parameters(remove_duplicate=False)))
    parameters: dict[str, StoredTensor] = {}
    unexpected = []
    for name, tensor in stored.items():
        # models saved without their head lack the prefix: "h.0..." for GPT-2
        key = name if name in known else f"{model.base_model_prefix}.{name}"
        if key in parameters:
            raise ValueError(f"{tensor.path} holds {key} twice, also as {parameters[key].name}; remove one")
        if key in known:
            parameters[key] = tensor
        elif not _may_be_dropped(name, model):
            unexpected.append(name)
    return parameters, unexpected


def _may_be_dropped(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor is a buffer that old versions of transformers saved and new ones compute."""
    patterns = model._keys_to_ignore_on_load_unexpected or []
    return any(re.search(pattern, name) for pattern in [*patterns, r"attn\.masked_bias$", r"rotary_emb\.inv_freq$"])


def _check_dtypes(parameters: Iterable[StoredTensor]) -> None:
    for path, name, header in parameters:
        if header.dtype not in DTYPES:
            raise ValueError(
                f"{path}: {name} is of dtype {header.dtype}; acsgd trains weights of dtype {', '.join(DTYPES)}: give "
                "the model without quantization, or cast it"
            )


def _check_shapes(parameters: dict[str, StoredTensor], model: PreTrainedModel) -> None:
    for key, (path, name, header) in parameters.items():
        if header.shape != (expected := tuple(model.get_parameter(key).shape)):
            raise ValueError(
                f"{path}: {name} has shape {header.shape}, but by config.json it has {expected}; give config and "
                "weights of the same model"
            )


def _check_ties(parameters: dict[str, StoredTensor], tied: dict[str, str], directory: Path) -> None:
    """Raise ValueError if a parameter that config.json ties to another was saved with other values."""
    for copy, original in tied.items():
        if copy in parameters:
            tensors = read_tensors({key: parameters[key] for key in (copy, original)})
            if not torch.equal(tensors[copy], tensors[original]):
                raise ValueError(
                    f"{directory}: config.json ties {copy} to {original}, but their values differ; "
                    'set "tie_word_embeddings": false in config.json to keep both'
                )
