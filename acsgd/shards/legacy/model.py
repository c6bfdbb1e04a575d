"""A model in a directory of a replaced system: its files, and its tensors under their Hugging Face names."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.model_classes import MODEL_CLASSES
from acsgd.shards.check import FLOATING, first_names
from acsgd.shards.config import MANY_BLOCKS, number_of_blocks, read_config
from acsgd.shards.files import CONFIG, read_json_object, read_torch_file, verify_torch_file
from acsgd.shards.legacy.layouts import BLOCK, LAYOUTS, LegacyLayout

LAYER = re.compile(r"pytorch_(.+)\.pt")
"""Files of a model, one per layer."""
STAGE = re.compile(r"prank_(\d+)_checkpoint\.pt")
"""Files of a training checkpoint, one per pipeline stage. Its optimizer state and other replicas' files differ."""
LATEST = "latest"
"""File beside training checkpoints with the step of the last one."""


class LegacyPart(NamedTuple):
    """One layer of the old layout in a file."""

    path: Path
    prefix: str
    """Start of its names in the file."""

    def read(self) -> dict[str, Tensor]:
        """Read its tensors by their names in a file of one layer; they lie in the memory-mapped file."""
        tensors = read_torch_file(self.path)
        return {
            name.removeprefix(self.prefix): tensor for name, tensor in tensors.items() if name.startswith(self.prefix)
        }


def find_parts(directory: Path, names: Iterable[str]) -> dict[str, LegacyPart]:
    """Return where each layer of a model is stored, and verify the files' checksums.

    names: of the layers, first to last, as in file names. Raises ValueError if layers are missing, or if the directory
    has files of others; CorruptFileError.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one with pytorch_*.pt or prank_*_checkpoint.pt files")
    files = {path.name: path for path in sorted(directory.iterdir())}
    layers = {match[1]: path for name, path in files.items() if (match := LAYER.fullmatch(name))}
    stages = {int(match[1]): path for name, path in files.items() if (match := STAGE.fullmatch(name))}
    if layers and stages:
        raise ValueError(f"{directory} holds both pytorch_*.pt and prank_*_checkpoint.pt files; remove one kind")
    if not layers and not stages:
        raise ValueError(
            f"{directory} holds neither pytorch_*.pt nor prank_*_checkpoint.pt files; {_advice(directory)}"
        )
    for path in (*layers.values(), *stages.values()):
        verify_torch_file(path)
    return _of_stages(directory, stages, [*names]) if stages else _of_layers(directory, layers, [*names])


def _advice(directory: Path) -> str:
    if os.path.lexists(directory / LATEST):
        return f"give the directory of one of its checkpoints, {directory}/checkpoint_*"
    return "give a model or a training checkpoint of AC-SGD, CocktailSGD or OpenChatKit"


def _of_layers(directory: Path, files: Mapping[str, Path], names: list[str]) -> dict[str, LegacyPart]:
    if missing := [f"pytorch_{name}.pt" for name in names if name not in files]:
        raise ValueError(f"{directory} lacks layers of the model in config.json: {first_names(missing)}; copy them")
    if extra := [path.name for name, path in files.items() if name not in names]:
        raise ValueError(
            f"{directory} holds layers that the model in config.json does not have: {first_names(extra)}; give the "
            "config of the model, or remove them"
        )
    return {name: LegacyPart(files[name], "") for name in names}


def _of_stages(directory: Path, files: Mapping[int, Path], names: list[str]) -> dict[str, LegacyPart]:
    """Number the layers of all stages, which are the entries of an nn.Sequential in each: "0.wte.weight"."""
    if missing := [f"prank_{rank}_checkpoint.pt" for rank in range(max(files)) if rank not in files]:
        raise ValueError(f"{directory} lacks stages of the model: {first_names(missing)}; copy them")
    parts = []
    for _, path in sorted(files.items()):
        tensors = read_torch_file(path)
        if wrong := [name for name in tensors if not re.match(r"\d+\.", name)]:
            raise ValueError(
                f"{path} holds {first_names(wrong)}, whose name does not start with the number of a layer; give a "
                "checkpoint of CocktailSGD or OpenChatKit"
            )
        numbers = sorted({int(name.partition(".")[0]) for name in tensors})
        if absent := [str(number) for number in range(len(numbers)) if number not in numbers]:
            raise ValueError(f"{path} lacks layers of its stage: {first_names(absent)}; copy it again")
        parts += [LegacyPart(path, f"{number}.") for number in numbers]
    if missing := names[len(parts) :]:
        raise ValueError(
            f"{directory} holds {len(parts)} layers, with embedding and head, but the model in config.json has "
            f"{len(names)}: it lacks the last {len(missing)} ({', '.join(missing[-3:])}); copy all of its "
            "prank_*_checkpoint.pt files, or give its config"
        )
    if len(parts) > len(names):
        raise ValueError(
            f"{directory} holds {len(parts)} layers, with embedding and head, but the model in config.json has only "
            f"{len(names)}; give the config of the model"
        )
    return dict(zip(names, parts, strict=True))


RTOL, ATOL = 5e-3, 1e-7
"""Tolerances of buffers, which may have been rounded to bf16 or fp16."""


class LegacyModel(NamedTuple):
    """A model whose files hold exactly the parameters that its config describes, untied."""

    config: PreTrainedConfig
    model: PreTrainedModel
    """The model, its parameters on the meta device."""
    layout: LegacyLayout
    parts: dict[str, LegacyPart]
    """Where each layer of the old layout is stored."""
    names: dict[str, dict[str, str]]
    """By layer of the old layout, the names in its file and those in the model."""
    new: tuple[str, ...]
    """Parameters of a new head, which the files lack."""
    sizes: dict[str, int]
    """Number of bytes of each parameter in the files."""

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read parameters of the model; they lie in memory-mapped files. names: without new ones."""
        found: dict[str, Tensor] = {}
        for layer, keys in self.names.items():
            if wanted := {key: name for key, name in keys.items() if name in names}:
                tensors = self.parts[layer].read()
                found |= {name: tensors[key] for key, name in wanted.items()}
        return found

    def path_of(self, name: str) -> Path:
        """Return the file with a parameter."""
        return next(self.parts[layer].path for layer, keys in self.names.items() if name in keys.values())

    def bytes_of(self, name: str) -> int:
        """Return the number of bytes of a parameter in the files, 0 if they lack it."""
        return self.sizes.get(name, 0)


def open_legacy(directory: Path, config_directory: Path) -> LegacyModel:
    """Open a model of a replaced system, and verify its files.

    config_directory: with its config.json. Raises ValueError if the type of the model has no old layout, if layers or
    parameters are missing, are others than in config.json, or are not floating-point numbers; CorruptFileError if a
    file is not complete.
    """
    layout = layout_of(config_directory)
    config = untie(read_config(config_directory, layout.task))
    if (blocks := number_of_blocks(config)) > MANY_BLOCKS:  # building them takes long
        raise ValueError(
            f"{config_directory / CONFIG} says that the model has {blocks} blocks, more than any of the replaced "
            "systems had; give config and weights of the same model"
        )
    model = MODEL_CLASSES[layout.task].build(config)
    names, new = layout.names(model), dict[str, str]()
    if layout.new_head is not None and not os.path.lexists(directory / f"pytorch_{layout.new_head}.pt"):
        new = names.pop(layout.new_head)
    legacy = LegacyModel(config, model, layout, find_parts(directory, names), names, tuple(new.values()), {})
    for layer in names:
        legacy.sizes.update(_check(legacy, layer))
    return legacy


def untie(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the same model with weights of its own in the head."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    return config


def layout_of(config_directory: Path) -> LegacyLayout:
    """Return the old layout of the type of model in config.json. Raises ValueError if it has none."""
    path = config_directory / CONFIG
    if not os.path.lexists(path):
        raise ValueError(f"{config_directory} has no {CONFIG}; give the directory of the model's with --config")
    model_type = read_json_object(path).get("model_type")
    layouts = {name: layout for name, layout in LAYOUTS.items() if layout.task in MODEL_CLASSES}
    if not isinstance(model_type, str) or model_type not in layouts:
        raise ValueError(
            f"{path} is of a model of type {model_type!r}, for which there is no old layout; there is one for "
            f"{', '.join(layouts)}"
        )
    return layouts[model_type]


def _check(legacy: LegacyModel, name: str) -> dict[str, int]:
    """Return the number of bytes of each parameter in a layer of the old layout, without reading their values.

    Raises ValueError if the tensors are not those of the model in config.json.
    """
    part, names = legacy.parts[name], legacy.names[name]
    tensors = part.read()
    if missing := [part.prefix + key for key in names if key not in tensors]:
        raise ValueError(f"{part.path} lacks tensors of the model: {first_names(missing)}; copy the file again")
    extra = []
    for key, tensor in tensors.items():
        if key in names:
            _check_parameter(part, key, tensor, legacy.model.get_parameter(names[key]))
        elif not _is_buffer(legacy, name, key, tensor):
            extra.append(part.prefix + key)
    if extra:
        raise ValueError(
            f"{part.path} holds tensors that {type(legacy.model).__name__} does not have and that would be lost: "
            f"{first_names(extra)}; give the config of the model"
        )
    return {names[key]: tensor.nbytes for key, tensor in tensors.items() if key in names}


def _check_parameter(part: LegacyPart, key: str, tensor: Tensor, param: Tensor) -> None:
    if tensor.shape != param.shape:
        raise ValueError(
            f"{part.path}: {part.prefix}{key} has shape {tuple(tensor.shape)}, but by config.json it has "
            f"{tuple(param.shape)}; give config and weights of the same model"
        )
    if tensor.dtype not in FLOATING:
        raise ValueError(
            f"{part.path}: {part.prefix}{key} is of dtype {tensor.dtype}; acsgd trains floating-point weights"
        )


def _is_buffer(legacy: LegacyModel, name: str, key: str, tensor: Tensor) -> bool:
    """Whether a tensor is one that the model computes itself. Raises ValueError if it computes another one."""
    block = int(name) if name.isdecimal() else 0
    buffer = legacy.layout.buffers.get(f"{BLOCK if name.isdecimal() else name}.{key}")
    if buffer is None:
        return False
    if buffer.is_checked:
        positions = tensor.shape[-1] if tensor.dim() else 0
        computed = buffer.compute(legacy.model, block, positions).float()
        if computed.shape != tensor.shape or not torch.allclose(tensor.float(), computed, rtol=RTOL, atol=ATOL):
            part = legacy.parts[name]
            raise ValueError(
                f"{part.path}: {part.prefix}{key} is not what a model of this config.json computes, so the model was "
                "trained with another attention; give its config, or remove the tensor to convert it nevertheless"
            )
    return True
