"""Which tensors of a model are stored with which layer, and which of them are hidden matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from acsgd.layers.description import ModelLayers
from acsgd.layers.skeleton import parameter_names
from acsgd.shards.manifest import ModelTensors, StoredFile, config_checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayerTensors(NamedTuple):
    """The tensors stored with a layer, by their names in the Hugging Face model. They may be on the meta device."""

    weights: dict[str, Tensor]
    """Trained parameters."""
    constants: dict[str, Tensor]
    """Buffers, and parameters without gradients."""


def layer_tensors(model: PreTrainedModel, layers: ModelLayers, index: int) -> LayerTensors:
    """Return the tensors that are stored with a layer: a tied parameter with the first layer that uses it."""
    params = {key: model.get_parameter(key) for key in layers.own_parameters(index)}
    buffers = {key: model.get_buffer(key) for key in layers.layers[index].buffers}
    constants = {key: (params | buffers)[key].detach() for key in layers.own_constants(index)}
    return LayerTensors({key: param for key, param in params.items() if key not in constants}, constants)


def hidden_matrices(model: PreTrainedModel, layers: ModelLayers) -> frozenset[str]:
    """Return the names of the parameters with two axes that only blocks use, and not as tables of embeddings.

    The embeddings and the head of a model are none of them. Its parameters may be on the meta device.
    """
    outside = {key for layer in layers.layers if layer.block is None for key in layer.parameters}
    tables = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return frozenset(
        key
        for key, names in parameter_names(model).items()
        if model.get_parameter(key).dim() == 2 and key not in outside and tables.isdisjoint(names)
    )


def describe_tensors(model: PreTrainedModel, layers: ModelLayers, model_files: Iterable[StoredFile]) -> ModelTensors:
    """Return what a manifest records of the tensors of a model. model_files: with its config.json."""
    stored = [layer_tensors(model, layers, layer.index) for layer in layers.layers]
    return ModelTensors(
        {key: tuple(tensor.shape) for each in stored for key, tensor in (each.weights | each.constants).items()},
        tuple(sorted(hidden_matrices(model, layers))),
        config_checksum(model_files),
    )
