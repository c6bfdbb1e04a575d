"""Initial values of adapters, and the identity of the model that an adapter was trained on.

The values depend on the seed and their names alone, so not on the stages that hold them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.adapters.inject import inject_into, is_of_adapter, loaded_module, module_of, peft_config
from acsgd.adapters.virtual_tokens import draw_prefix, draw_prompt
from acsgd.config.adapters import Adapter, PrefixTuning, PromptTuning
from acsgd.errors import RunError
from acsgd.io.files.checksum import new_file_checksum
from acsgd.layers.description import ModelLayers
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.layer_tensors import LayerTensors
from acsgd.shards.load import WeightSource
from acsgd.shards.writer import OpenTensor
from acsgd.streams import mix_seed

BASE_CHECKSUM = "base_checksum"
"""Key of the checksum of the base in the metadata of adapter_model.safetensors."""
DTYPE = "dtype"
"""Key of model.dtype of the run there."""


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


class NewAdapter:
    """Weights of a model with a new adapter. A `WeightSource`.

    base: weights of the model; model: without adapter, its parameters on the meta device; layers: with adapter;
    tokenizer: its directory.
    """

    def __init__(
        self,
        base: WeightSource,
        model: PreTrainedModel,
        layers: ModelLayers,
        adapter: Adapter,
        task: str,
        *,
        seed: int,
        tokenizer: Path,
    ) -> None:
        self.base = base
        self._model = model
        self._layers = layers
        self._adapter = adapter
        self._task = task
        self._seed = seed
        self._tokenizer = tokenizer

    def tensors(self, layer: str, stored: LayerTensors) -> dict[str, Tensor]:
        new = [key for key in stored.weights if is_of_adapter(key)]
        weights = {key: tensor for key, tensor in stored.weights.items() if key not in new}
        tensors = self.base.tensors(layer, LayerTensors(weights, stored.constants))
        return tensors | self._draw(new, tensors.__getitem__)

    def constants(self, layer: str, stored: LayerTensors, *, check: bool = True) -> dict[str, Tensor]:
        return self.base.constants(layer, stored, check=check)

    def tensor(self, layer: str, key: str) -> Tensor:
        if not is_of_adapter(key):
            return self.base.tensor(layer, key)
        return self._draw([key], lambda name: self.base.tensor(self._layers.first_holder(name).name, name))[key]

    def stored(self, layer: str, key: str) -> OpenTensor:
        return self.base.stored(layer, key)

    def _draw(self, keys: Iterable[str], base: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return new parameters of adapters. base: returns a parameter of the model."""
        wanted, drawn = set(keys), dict[str, Tensor]()
        for path in dict.fromkeys(map(module_of, wanted)):
            drawn |= {f"{path}.{name}": tensor for name, tensor in self._draw_module(path, base).items()}
        return {key: drawn[key] for key in wanted}

    def _draw_module(self, path: str, base: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        """Return the parameters that PEFT adds to a module, as it initializes them."""
        number = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=7).digest(), "little")
        seed = mix_seed(self._seed, number)
        if isinstance(self._adapter, PrefixTuning):
            return draw_prefix(self._adapter, self._model.config, seed=seed)
        module = loaded_module(self._model, path, base)
        if isinstance(self._adapter, PromptTuning):
            return draw_prompt(module, self._adapter, self._model.config, self._tokenizer, seed=self._seed)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            adapted = inject_into(module, peft_config(self._adapter, self._model, self._task), path)
        return {name: param.detach() for name, param in adapted.named_parameters() if is_of_adapter(name)}
