"""Load single layers of a meta-device model onto a device, from layer shards or with random weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.seeds import mix_seed
from acsgd.shards.layers import LayerShard, meta_model, parameter_keys, stored_weights, tied_keys
from acsgd.shards.weights import Weight


class WeightSource(Protocol):
    """Source of the weights of layers."""

    def tensors(self, layer: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all tensors of one layer, of the shapes of its parameters. weights: these, by key."""
        ...

    def tensor(self, layer: str, key: str) -> Tensor:
        """Return one tensor of one layer."""
        ...


class RandomWeights:
    """Weights initialised as transformers does, each layer from (seed, layer): independent of the number of stages.

    Reseeds torch's global generators.
    """

    def __init__(self, config: PreTrainedConfig, shards: Sequence[LayerShard], *, seed: int) -> None:
        self._config = config
        self._shards = {shard.name: shard for shard in shards}
        self._seed = seed

    @functools.cached_property
    def _model(self) -> PreTrainedModel:
        return meta_model(self._config)

    @torch.no_grad()
    def tensors(self, layer: str, weights: Collection[str]) -> dict[str, Tensor]:
        shard = self._shards[layer]
        torch.manual_seed(mix_seed(self._seed, shard.index))
        drawn: dict[str, Tensor] = {}
        for path in shard.modules:
            module = copy.deepcopy(self._model.get_submodule(path)).to_empty(device="cpu")
            module.apply(self._model._init_weights)
            drawn |= {f"{path}.{name}": param.detach().float() for name, param in module.named_parameters()}
        return {key: drawn[key] for key in weights}

    def tensor(self, layer: str, key: str) -> Tensor:
        return self.tensors(layer, [key])[key]


def load_layer(
    model: PreTrainedModel,
    shard: LayerShard,
    source: WeightSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    embedding: LayerShard,
) -> list[Weight]:
    """Replace the meta parameters of one layer of `model`, in place, by loaded ones; return its weights.

    embedding: the layer that holds the originals of tied parameters. A tied parameter becomes the same object as its
    original if that is loaded on this rank, else a copy with `copy_of` set.
    """
    weights = []
    stored = source.tensors(shard.name, stored_weights(model, shard))
    tied = tied_keys(model)
    for key in parameter_keys(model, shard):
        original = tied.get(key)
        if original is not None and model.get_parameter(original).device.type != "meta":
            _set_parameter(model, key, model.get_parameter(original))
            continue
        tensor = stored[key] if original is None else source.tensor(embedding.name, original)
        # copies, because `tensor` lies in a memory-mapped file
        master = nn.Parameter(tensor.to(device=device, dtype=torch.float32, copy=True))
        param = master if dtype == torch.float32 else nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True))
        _set_parameter(model, key, param)
        weights.append(Weight(key, param, master, original, is_tied=original is not None or key in tied.values()))
    return weights


def _set_parameter(model: PreTrainedModel, key: str, param: nn.Parameter) -> None:
    path, _, name = key.rpartition(".")
    setattr(model.get_submodule(path), name, param)
