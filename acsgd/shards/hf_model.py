"""A model in the files of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.layers.skeleton import parameter_names
from acsgd.shards.initial import draw
from acsgd.shards.names import Conversion
from acsgd.shards.stored import PICKLED_SUFFIX, StoredTensor, read_tensors
from acsgd.shards.torch_files import verify_torch_file
from acsgd.shards.writer import bytes_of


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
