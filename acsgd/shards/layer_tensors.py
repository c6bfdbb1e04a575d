"""Which tensors of a model are stored with which layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from acsgd.layers.description import ModelLayers


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
