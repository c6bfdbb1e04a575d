"""A model in the files of a Hugging Face directory, whose tensors are found by the headers of the files."""

from __future__ import annotations

import functools
import os
import zipfile
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.io.files.fields import from_json
from acsgd.layers.skeleton import parameter_names
from acsgd.shards.check import first_names
from acsgd.shards.files import (
    TensorHeader,
    check_file_name,
    open_tensors,
    read_json_object,
    read_torch_file,
    tensor_headers,
    unusable,
    verify_torch_file,
)
from acsgd.shards.load import draw
from acsgd.shards.names import Conversion
from acsgd.shards.writer import DTYPES, NAMES, bytes_of

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
            found = _indexed_tensors(index)
            if os.path.lexists(single) and single not in (tensor.path for tensor in found.values()):
                raise ValueError(
                    f"{directory} has {name}, which transformers loads, and {index.name} of other files, which may "
                    "hold other weights; remove one of them"
                )
            return found
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


class LocatedTensor(NamedTuple):
    """A tensor of a model in files."""

    conversion: Conversion
    """How it is made from tensors in files."""
    sources: dict[str, StoredTensor]
    """These, by name."""
    name: str
    """Its name among the tensors that the conversion makes; of a tied parameter, any of its names."""


class HFModel(NamedTuple):
    """A Hugging Face directory whose files hold exactly the tensors of the model that its config describes."""

    config: PreTrainedConfig
    model: PreTrainedModel
    """The model, its parameters on the meta device."""
    tensors: dict[str, LocatedTensor]
    """Parameters and stored buffers by name; of a tied parameter, the first of its names."""
    new: tuple[str, ...]
    """Parameters of a new head, which the files lack."""

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read tensors of the model. Those that are not converted lie in memory-mapped files. names: without new ones.

        What the files may lack has the value that the model's class gives it.
        """
        found = read_located({name: self.tensors[name] for name in names if name in self.tensors}, self.model)
        absent = [name for name in names if name not in found]
        params = dict(self.model.named_parameters())
        found |= draw(self.model, [name for name in absent if name in params])
        return found | {name: self.model.get_buffer(name) for name in absent if name not in params}

    def verify(self) -> None:
        """Verify the checksums of files that torch.save wrote; safetensors have none. Raises CorruptFileError."""
        paths = dict.fromkeys(stored.path for x in self.tensors.values() for stored in x.sources.values())
        for path in paths:
            if path.suffix == PICKLED_SUFFIX:
                verify_torch_file(path)

    def path_of(self, name: str) -> Path:
        """Return the file with a tensor, of a converted one the first."""
        return next(iter(self.tensors[name].sources.values())).path

    def bytes_of(self, name: str) -> int:
        """Return the number of bytes of a tensor in the files, 0 if they lack it."""
        if name not in self.tensors:
            return 0
        return sum(bytes_of(stored.header) for stored in self.tensors[name].sources.values())


def read_located(tensors: Mapping[str, LocatedTensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Read tensors; those that are not converted first, at once."""
    plain = {key: x for key, x in tensors.items() if x.conversion.converter is None}
    found = read_tensors({key: stored for key, x in plain.items() for stored in x.sources.values()})
    wanted = {x.name: key for key, x in tensors.items() if key not in plain}
    for x in {tensors[key].conversion.target: tensors[key] for key in wanted.values()}.values():
        made = x.conversion.convert(model, read_tensors(x.sources))
        found |= {wanted[name]: tensor for name, tensor in made.items() if name in wanted}
    return found


def tensor_of(model: PreTrainedModel, name: str) -> Tensor:
    """Return a parameter or a buffer of a model."""
    path, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), leaf)
    return tensor


def names_of(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the names of each parameter and stored buffer, several of a tied one, by the first of them."""
    stored = model.state_dict().keys()
    buffers = {name: [name] for name, _ in model.named_buffers(remove_duplicate=False) if name in stored}
    return parameter_names(model) | buffers
