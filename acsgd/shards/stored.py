"""Find every tensor in the files of a Hugging Face directory, from the headers of the files alone; read some of them.

The files are safetensors, or those of torch.save (*.bin) if there are none: read without running code in them.
"""

from __future__ import annotations

import functools
import os
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from acsgd.fields import from_json
from acsgd.shards.check import first_names
from acsgd.shards.files import TensorHeader, check_file_name, open_tensors, read_json_object, tensor_headers, unusable
from acsgd.shards.torch_files import read_torch_file
from acsgd.shards.writer import DTYPES, NAMES

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_SUFFIX = ".bin"
FLOATING = tuple(DTYPES)[:4]
"""safetensors names of the dtypes that weights may have."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    header: TensorHeader

    def on_meta(self) -> Tensor:
        """Return a tensor of the same shape and dtype without memory."""
        return torch.empty(self.header.shape, dtype=DTYPES[self.header.dtype], device="meta")


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a Hugging Face directory by its name.

    Raises ValueError if the directory has no weights, an index that is wrong, or a file with code in it;
    CorruptFileError if a file is not complete.
    """
    for name in (SINGLE, PICKLED):
        index, single = directory / f"{name}.index.json", directory / name
        if os.path.lexists(index):
            return _indexed_tensors(index)
        if os.path.lexists(single):
            return {name: StoredTensor(single, name, header) for name, header in _headers(single).items()}
    raise ValueError(
        f"{directory} has neither {SINGLE} nor {INDEX} nor {PICKLED}; save the model there with transformers' "
        "save_pretrained, or train new weights with --model.init scratch"
    )


def read_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Read tensors; they lie in memory-mapped files."""
    by_file = defaultdict(list)
    for key, tensor in stored.items():
        by_file[tensor.path].append((key, tensor.name))
    tensors: dict[str, Tensor] = {}
    for path, names in by_file.items():
        if path.suffix == PICKLED_SUFFIX:
            pickled = _read_pickled(path)
            tensors |= {key: pickled[name] for key, name in names}
        else:
            with open_tensors(path) as file:
                tensors |= {key: file.get_tensor(name) for key, name in names}
    return tensors


def _headers(path: Path) -> dict[str, TensorHeader]:
    """Read the dtype and shape of each tensor in a file, by name."""
    if path.suffix != PICKLED_SUFFIX:
        return tensor_headers(path)
    return {
        name: TensorHeader(NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in _read_pickled(path).items()
    }


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Read a file of torch.save. One that cannot be memory-mapped, of torch < 1.6, is kept for the next call."""
    return read_torch_file(path) if zipfile.is_zipfile(path) else _read_whole(path)


@functools.lru_cache(maxsize=1)
def _read_whole(path: Path) -> dict[str, Tensor]:
    return read_torch_file(path)


@dataclass(frozen=True)
class _Index:
    """Fields of the index of a model in several files."""

    weight_map: dict[str, Annotated[str, check_file_name]]


def _indexed_tensors(index: Path) -> dict[str, StoredTensor]:
    fields = read_json_object(index)
    try:
        weight_map = from_json(_Index, fields, ignore_unknown=True).weight_map
    except ValueError as error:
        raise ValueError(f"{index} is not an index of files with weights: {error}") from None
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if unusable(index.parent / file) == "is missing"]
    if absent:
        raise ValueError(f"{index} names missing files: {first_names(absent)}; download them")
    headers = {file: _headers(index.parent / file) for file in files}
    wrong = [name for name, file in weight_map.items() if name not in headers[file]]
    if wrong:
        raise ValueError(
            f"{index}: {weight_map[wrong[0]]} does not hold {wrong[0]}, which the index says; download both again"
        )
    return {name: StoredTensor(index.parent / file, name, headers[file][name]) for name, file in weight_map.items()}
