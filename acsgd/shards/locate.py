"""Open a model: find its tensors in the files of a directory and check them, from the headers of the files alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.config.options import ModelConfig
from acsgd.layers.description import ModelLayers
from acsgd.model_classes import MODEL_CLASSES, UNTIED
from acsgd.shards.check import describe_lost, first_names
from acsgd.shards.config import MANY_BLOCKS, number_of_blocks, parameter_count, read_config
from acsgd.shards.disk import ShardDirectory, model_files
from acsgd.shards.files import CONFIG, read_json_object
from acsgd.shards.hf_model import (
    FLOATING,
    HFModel,
    LocatedTensor,
    StoredTensor,
    names_of,
    read_located,
    stored_tensors,
    tensor_of,
)
from acsgd.shards.hub import find_model
from acsgd.shards.manifest import MANIFEST
from acsgd.shards.names import Conversion, conversions, names_in_files
from acsgd.shards.writer import DTYPES

TIE = "tie_word_embeddings"
"""Field of config.json that ties embedding and head."""


class ShardModel(NamedTuple):
    """A layer-shard directory whose files hold the tensors of the model that its config describes."""

    directory: ShardDirectory
    config: PreTrainedConfig
    model: PreTrainedModel
    """The model, its parameters on the meta device."""


class FoundModel(NamedTuple):
    """A model in a local directory whose files were checked."""

    directory: Path
    config: PreTrainedConfig
    num_parameters: int
    layers: ModelLayers | None
    """Its layers, if they were compared with the whole model when it was converted."""


def open_model(
    model: ModelConfig,
    *,
    is_valid: Callable[[PreTrainedConfig], bool] = lambda config: False,
    has_adapter: bool = False,
    config_only: bool = False,
) -> FoundModel:
    """Find a model; download it if its name is a Hugging Face id. is_valid: see `read_config`; has_adapter:
    `open_shards`; config_only: whether to look at nothing but config.json.

    Checks all that headers show. Raises ValueError if the model cannot be found or read, or if it is pretrained and its
    weights are not those of its config; CorruptFileError if a file is not as it was written.
    """
    has_weights = model.init == "pretrained" and not config_only
    directory = find_model(model.name, option="model.name", weights=has_weights, config_only=config_only)
    if config_only:
        config = read_config(directory, model.task, is_valid=is_valid)
        return FoundModel(directory, config, parameter_count(config, model.task), None)
    if os.path.lexists(directory / MANIFEST):
        shards, config, built = open_shards(directory, has_adapter=has_adapter)
        if shards.manifest.task != model.task:
            raise ValueError(
                f"{directory} was converted for the task {shards.manifest.task}, but model.task={model.task}; convert "
                f"the model with --task {model.task}, or use model.task={shards.manifest.task}"
            )
        return FoundModel(directory, config, built.num_parameters(), shards.verified_layers)
    if model.init == "pretrained":
        opened = open_hf(directory, model.task, is_valid=is_valid)
        return FoundModel(directory, opened.config, opened.model.num_parameters(), None)
    model_files(directory)
    config = read_config(directory, model.task, is_valid=is_valid)
    return FoundModel(directory, config, parameter_count(config, model.task), None)


def open_hf(
    directory: Path, task: str = "lm", *, is_valid: Callable[[PreTrainedConfig], bool] = lambda config: False
) -> HFModel:
    """Open a Hugging Face directory. is_valid: see `read_config`.

    Reads only headers, and the values of tied parameters that are stored several times. Raises ValueError if tensors
    are missing, have another shape than in config.json, or are not floating-point numbers, if tied ones differ, or if
    the directory holds tensors that the model does not have; CorruptFileError if a file is not complete.
    """
    config = read_config(directory, task, is_valid=is_valid)
    model_files(directory)
    stored = stored_tensors(directory)
    _check_blocks(stored, config, directory)
    model, has_new_head = MODEL_CLASSES[task].build(config), MODEL_CLASSES[task].has_new_head
    found, unknown = conversions(model, stored)
    _check_dtypes(found, stored, model)
    unexpected = [name for name in unknown if not _may_be_dropped(name, model, has_new_head=has_new_head)]
    if unexpected:
        raise ValueError(_lost(directory, model, unexpected))
    located = _locate(found, stored, model, directory)
    names = names_of(model)
    missing = [key for key, aliases in names.items() if not any(name in located for name in aliases)]
    new = [key for key in missing if has_new_head and not key.startswith(f"{model.base_model_prefix}.")]
    if lost := [key for key in missing if key not in new and not _may_be_missing(key, model)]:
        raise ValueError(describe_lost(directory, lost))
    if untied := _untied(located, names, model, directory):
        setattr(config, UNTIED, untied)
        model = MODEL_CLASSES[task].build(config)
        names = names_of(model)
    tensors = {key: located[name] for key, aliases in names.items() for name in aliases[::-1] if name in located}
    return HFModel(config, model, tensors, tuple(new))


def open_shards(directory: Path, *, has_adapter: bool = False) -> ShardModel:
    """Open a layer-shard directory as a model. Verifies config.json and the tokenizer, and reads the other headers.

    has_adapter: whether the model may have an adapter, which is left out. Raises as `open_hf` and `ShardDirectory`, and
    ValueError if it has one and may not.
    """
    shards = ShardDirectory(directory)
    if shards.manifest.adapter is not None and not has_adapter:
        raise ValueError(
            f"{directory} holds a model with an adapter, {shards.manifest.adapter}; make a model of both: "
            f"acsgd convert merge {directory} MODEL"
        )
    shards.verify_model_files()
    is_verified = shards.verified_layers is not None
    config = read_config(directory, shards.manifest.task, is_valid=lambda config: is_verified)
    model_files(directory)
    layers = shards.manifest.model.stored()
    if [*shards.manifest.layers] != [*layers]:
        first, *_, last = layers
        raise ValueError(
            f"{directory / MANIFEST} lists {len(shards.manifest.layers)} layers, config.json describes {len(layers)} "
            f"({first} .. {last}); restore the directory from a copy"
        )
    stored = {name for names in layers.values() for name in names}
    model = MODEL_CLASSES[shards.manifest.task].build(config)
    if untied := [name for aliases in names_of(model).values() for name in aliases[1:] if name in stored]:
        setattr(config, UNTIED, untied)
        model = MODEL_CLASSES[shards.manifest.task].build(config)
    known = {name for aliases in names_of(model).values() for name in aliases}
    for layer, names in layers.items():
        if shards.lacks(layer):
            continue
        path, headers = directory / shards.file_of(layer).file, shards.tensor_headers(layer)
        for name in names:
            if name in headers and name in known:  # reading the layer finds those missing
                at, tensor = StoredTensor(path, name, headers[name]), tensor_of(model, name)
                _check_dtype(at, tensor)
                _check_shape(at, tensor.shape)
    return ShardModel(shards, config, model)


def _locate(
    found: Iterable[Conversion], stored: Mapping[str, StoredTensor], model: PreTrainedModel, directory: Path
) -> dict[str, LocatedTensor]:
    """Return where each tensor of a model is stored, by each name that it has there. Raises ValueError for shapes."""
    located: dict[str, LocatedTensor] = {}
    for conversion in found:
        sources = {name: stored[name] for name in conversion.names}
        if conversion.converter is None:
            first, *others = sources.values()
            if others:
                raise ValueError(f"{others[0].path} holds {conversion.target} twice, also as {first.name}; remove one")
            _check_shape(first, tensor_of(model, conversion.target).shape)
            made = [conversion.target]
        else:
            made = _convert_headers(conversion, sources, model, directory)
        located |= {name: LocatedTensor(conversion, sources, name) for name in made}
    return located


def _convert_headers(
    conversion: Conversion, sources: Mapping[str, StoredTensor], model: PreTrainedModel, directory: Path
) -> list[str]:
    """Return the names of the tensors that a conversion makes.

    Raises ValueError if their sources do not fit the model, found from their shapes alone.
    """
    problem = "they have other shapes than by config.json"
    try:
        made = conversion.convert(model, {name: each.on_meta() for name, each in sources.items()})
        if all(tensor_of(model, name).shape == tensor.shape for name, tensor in made.items()):
            if len(dtypes := {each.header.dtype for each in sources.values()}) == 1:
                return list(made)
            problem = f"they are of several dtypes, {', '.join(sorted(dtypes))}"
    except Exception as error:  # conversions raise errors of many classes
        problem = str(error).partition("\n")[0]
    expected, prefix = names_in_files(model, conversion.target), f"{model.base_model_prefix}."
    if not any(name in expected for name in sources):  # models saved without their head lack the prefix
        expected = {name.removeprefix(prefix): shape for name, shape in expected.items()}
    if expected.keys() & sources.keys():  # else they have names of old versions
        if missing := [name for name in expected if name not in sources]:
            raise ValueError(describe_lost(directory, missing))
        if unexpected := [name for name in sources if name not in expected]:
            raise ValueError(_lost(directory, model, unexpected))
        for name, shape in expected.items():
            _check_shape(sources[name], shape)
    raise ValueError(f"{directory}: {first_names(list(sources))} cannot become {conversion.target}: {problem}")


def _lost(directory: Path, model: PreTrainedModel, names: Collection[str]) -> str:
    return (
        f"{directory} holds tensors that {type(model).__name__} does not have and that would be lost: "
        f"{first_names(sorted(names))}"
    )


def _check_blocks(stored: Iterable[str], config: PreTrainedConfig, directory: Path) -> None:
    """Raise ValueError if a config describes very many blocks that the files lack, before the model is built."""
    numbers = [int(part) for name in stored for part in name.split(".") if part.isdecimal() and len(part) < 6]
    if (blocks := number_of_blocks(config)) > max(MANY_BLOCKS, *numbers, 0):
        raise ValueError(
            f"{directory / CONFIG} says that the model has {blocks} blocks, but the files have tensors of at most "
            f"{max([*numbers, 0]) + 1}; give config and weights of the same model"
        )


def _may_be_dropped(name: str, model: PreTrainedModel, *, has_new_head: bool) -> bool:
    """Whether a tensor is a buffer that is computed, or belongs to a head for another task."""
    prefix, body = f"{model.base_model_prefix}.", model.base_model
    if {name, prefix + name} & dict(model.named_buffers(remove_duplicate=False)).keys():
        return True
    patterns = model._keys_to_ignore_on_load_unexpected or []
    if any(re.search(pattern, name) for pattern in [*patterns, r"attn\.masked_bias$", r"rotary_emb\.inv_freq$"]):
        return True
    module = name.removeprefix(prefix).partition(".")[0]
    return has_new_head and not (hasattr(model, module) or hasattr(body, module))


def _may_be_missing(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor is a parameter that transformers computes instead of saving it, or a buffer it need not find."""
    if name in (model._keys_to_ignore_on_save or ()):
        return True
    patterns = model._keys_to_ignore_on_load_missing or []
    is_buffer = name not in dict(model.named_parameters())
    return is_buffer and any(re.search(pattern, name) for pattern in patterns)


def _check_dtypes(found: Iterable[Conversion], stored: Mapping[str, StoredTensor], model: PreTrainedModel) -> None:
    for conversion in found:
        for name in conversion.names:
            _check_dtype(stored[name], tensor_of(model, conversion.target))


def _check_dtype(stored: StoredTensor, tensor: Tensor) -> None:
    """Raise ValueError unless a stored tensor has a dtype that a parameter or buffer of the model can have."""
    path, name, header = stored
    if header.dtype not in (FLOATING if tensor.is_floating_point() else DTYPES):
        raise ValueError(
            f"{path}: {name} is of dtype {header.dtype}; acsgd trains weights of dtype {', '.join(FLOATING)}: give "
            "the model without quantization, or cast it"
        )


def _check_shape(stored: StoredTensor, expected: torch.Size) -> None:
    path, name, header = stored
    if header.shape != tuple(expected):
        raise ValueError(
            f"{path}: {name} has shape {header.shape}, but by config.json it has {tuple(expected)}; give config and "
            "weights of the same model"
        )


def _untied(
    located: Mapping[str, LocatedTensor], names: Mapping[str, list[str]], model: PreTrainedModel, directory: Path
) -> list[str]:
    """Return the parameters that the model's class ties to others though config.json does not, if their values differ.

    Raises ValueError for parameters that config.json ties.
    """
    untied = []
    for aliases in names.values():
        first, *others = [name for name in aliases if name in located] or aliases[:1]
        for name in others:
            tensors = read_located({each: located[each] for each in (first, name)}, model)
            if not torch.equal(tensors[first], tensors[name]):
                untied.append(name)
    if untied and read_json_object(directory / CONFIG).get(TIE) is not False:
        first = next(aliases[0] for aliases in names.values() if untied[0] in aliases)
        raise ValueError(
            f"{directory}: config.json ties {untied[0]} to {first}, but their values differ; "
            f'set "{TIE}": false in config.json to keep both'
        )
    return untied
