"""Identity of the model that an adapter was trained on: a checksum of the parameters that it leaves unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from acsgd.errors import RunError
from acsgd.io.files.checksum import new_file_checksum
from acsgd.shards.disk import ShardDirectory

BASE_CHECKSUM = "base_checksum"
"""Key of the checksum of the base in the metadata of adapter_model.safetensors."""


class BaseChecksum:
    """Checksum of names, dtypes, shapes and bits of parameters, which may be added in any order.

    It does not depend on the files that they are stored in: a Hugging Face model and its layer shards have the same.
    """

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}

    def add(self, key: str, tensor: Tensor) -> None:
        """Add a parameter."""
        part = new_file_checksum(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        part.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._parts[key] = part.hexdigest()

    def adding(self, tensors: Iterable[tuple[str, Tensor]], keys: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by name, and add those of them that are named by `keys`."""
        for key, tensor in tensors:
            if key in keys:
                self.add(key, tensor)
            yield key, tensor

    def hexdigest(self) -> str:
        """Return the checksum of all parameters that were added."""
        return new_file_checksum(repr(sorted(self._parts.items())).encode()).hexdigest()


def check_base(checkpoint: ShardDirectory, base: ShardDirectory, layers: Iterable[str], *, name: str) -> None:
    """Raise RunError if frozen parameters of some layers of a checkpoint are not those of a model. name: of the model.

    The checksums of their files are compared and, if these differ, since one of them also has other tensors, the
    parameters themselves.
    """
    for layer in layers:
        constants, entry = checkpoint.manifest.constants.get(layer), base.manifest.layers.get(layer)
        if constants is None or (entry is not None and entry.checksum == constants.checksum):
            continue
        trained, given = checkpoint.read_constants(layer), base.read_layer(layer)
        for key, tensor in trained.items():
            if key not in given or not torch.equal(tensor, given[key]):
                former = (checkpoint.manifest.run or {}).get("origin", {}).get("model")
                raise RunError(
                    f"{checkpoint.path} was trained on another base model{f', {former},' if former else ''} than "
                    f"model.name={name}: {key} differs (checksums of {layer}: {constants.checksum} and "
                    f"{entry.checksum if entry else 'none'}); give the model that it was trained on, or another log.dir"
                )
