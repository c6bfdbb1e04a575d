"""Find the parts of a model in a directory of a replaced system and check that none is missing or unexpected."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from acsgd.shards.check import first_names
from acsgd.shards.torch_files import read_torch_file, verify_torch_file

LAYER = re.compile(r"pytorch_(.+)\.pt")
"""Files of a model, one per layer."""
STAGE = re.compile(r"prank_(\d+)_checkpoint\.pt")
"""Files of a training checkpoint, one per pipeline stage. Its optimizer state and other replicas' files differ."""
LATEST = "latest"
"""File beside training checkpoints with the step of the last one."""


class Part(NamedTuple):
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


def find_parts(directory: Path, names: Iterable[str]) -> dict[str, Part]:
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


def _of_layers(directory: Path, files: Mapping[str, Path], names: list[str]) -> dict[str, Part]:
    if missing := [f"pytorch_{name}.pt" for name in names if name not in files]:
        raise ValueError(f"{directory} lacks layers of the model in config.json: {first_names(missing)}; copy them")
    if extra := [path.name for name, path in files.items() if name not in names]:
        raise ValueError(
            f"{directory} holds layers that the model in config.json does not have: {first_names(extra)}; give the "
            "config of the model, or remove them"
        )
    return {name: Part(files[name], "") for name in names}


def _of_stages(directory: Path, files: Mapping[int, Path], names: list[str]) -> dict[str, Part]:
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
        parts += [Part(path, f"{number}.") for number in numbers]
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
