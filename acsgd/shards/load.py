"""Load single layers of a model whose parameters are on the meta device, from layer shards or initial values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.layers.description import LayerSpec, ModelLayers
from acsgd.layers.quantize import is_quantized, quantize
from acsgd.layers.skeleton import move_buffers, parameter_names, set_buffer, set_tied_parameter
from acsgd.layers.stand_ins import LookupTable
from acsgd.model_classes import ModelClass
from acsgd.shards.layer_tensors import LayerTensors, hidden_matrices, layer_tensors
from acsgd.shards.weights import Weight, as_own_master
from acsgd.shards.writer import OpenTensor
from acsgd.streams import mix_seed


@torch.no_grad()
def draw(model: PreTrainedModel, names: Collection[str]) -> dict[str, Tensor]:
    """Return new parameters, as transformers initialises them, the same in every conversion."""
    drawn: dict[str, Tensor] = {}
    for index, path in enumerate(dict.fromkeys(name.rpartition(".")[0] for name in names)):
        module = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(mix_seed(0, index))
            model._init_weights(module)
        drawn |= {f"{path}.{leaf}": param.detach() for leaf, param in module.named_parameters(recurse=False)}
    return {name: drawn[name] for name in names}


class WeightSource(Protocol):
    """Source of the tensors of layers."""

    def tensors(self, layer: str, stored: LayerTensors) -> dict[str, Tensor]:
        """Return all tensors of one layer. stored: their names and shapes."""
        ...

    def constants(self, layer: str, stored: LayerTensors, *, check: bool = True) -> dict[str, Tensor]:
        """Return those tensors of one layer that are not trained. stored: see `tensors`.

        check: whether the values are checked, which reads those of a file into memory.
        """
        ...

    def tensor(self, layer: str, key: str) -> Tensor:
        """Return one tensor of one layer."""
        ...

    def stored(self, layer: str, key: str) -> OpenTensor:
        """Return where one tensor of one layer that is not trained is, in a file that stays open."""
        ...


class LoadedLayer(NamedTuple):
    """The tensors of a layer on this rank."""

    spec: LayerSpec
    weights: list[Weight]
    """Without tied parameters that an earlier layer on this rank has."""
    constants: dict[str, Tensor]
    """Tensors stored with the layer that are not trained, by name, as stored."""
    tables: dict[str, LookupTable]
    """Tied parameters of which another rank sends the rows that a batch uses, by name."""


class LayerLoader:
    """Loads layers of one model, one at a time.

    model: its parameters are on the meta device; changed in place. dtype: of the parameters; master weights are fp32.
    looked_up: tied parameters of which another rank sends rows to this rank; they are not loaded. sent: tied parameters
    of which this rank sends rows. defers_constants: load trained weights alone; `load_constants` must follow.
    has_masters: keep master weights apart from the parameters; masters_on_host: in host memory.
    keeps_files: keep constants as they are stored, even if the parameters in use are equal, which lose their values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: ModelLayers,
        source: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        looked_up: Collection[str] = (),
        sent: Collection[str] = (),
        defers_constants: bool = False,
        has_masters: bool = False,
        masters_on_host: bool = False,
        keeps_files: bool = False,
    ) -> None:
        self._model = model
        self._layers = layers
        self._source = source
        self._device = device
        self._dtype = dtype
        self._looked_up = looked_up
        self._sent = sent
        self._names = parameter_names(model)
        self._holders = layers.holders()
        self._hidden_matrices = hidden_matrices(model, layers)
        self._frozen = frozenset(layers.frozen)
        self._has_frozen: set[str] = set()
        """Frozen parameters that are loaded."""
        self._defers_constants = defers_constants
        self._has_masters = has_masters
        self._master_device = torch.device("cpu") if masters_on_host else device
        self._keeps_files = keeps_files
        move_buffers(model, device)
        if not defers_constants:
            self._load_outer_buffers()

    def load(self, index: int) -> LoadedLayer:
        """Load the tensors of a layer, without its constants if these are deferred.

        A tied parameter is one object in all layers on this rank.
        """
        layer, stored = self._layers.layers[index], layer_tensors(self._model, self._layers, index)
        tensors = self._source.tensors(layer.name, stored)
        loaded = LoadedLayer(layer, [], {}, {})
        for key in layer.parameters:
            if key not in self._frozen and self._model.get_parameter(key).is_meta:
                self._load_trained(loaded, key, tensors)
        if not self._defers_constants:
            self._load_constants(loaded, stored, tensors)
        return loaded

    def load_constants(self, layers: Iterable[LoadedLayer]) -> Iterator[LoadedLayer]:
        """Load the constants of layers, which were deferred. Yields each layer that has its own."""
        self._load_outer_buffers()
        for loaded in layers:
            stored = layer_tensors(self._model, self._layers, loaded.spec.index)
            self._load_constants(loaded, stored, self._source.constants(loaded.spec.name, stored))
            yield loaded

    def _load_trained(self, loaded: LoadedLayer, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Load a trained parameter, or add a table in its place. tensors: of this layer."""
        if key in self._looked_up:
            loaded.tables[key] = LookupTable(self._model.get_parameter(key).shape, self._dtype, self._device)
            set_tied_parameter(self._model, self._names[key], loaded.tables[key])
            return
        tensor = self._tensor(loaded.spec, key, tensors)
        param = nn.Parameter(_copy(tensor, self._device, self._dtype))
        set_tied_parameter(self._model, self._names[key], param)
        is_copy = self._holders[key][0] != loaded.spec.index
        loaded.weights.append(self._weight(key, param, tensor, is_copy=is_copy))

    def _load_constants(self, loaded: LoadedLayer, stored: LayerTensors, tensors: Mapping[str, Tensor]) -> None:
        """Load the constants of a layer, in place. tensors: of this layer."""
        for key in loaded.spec.parameters:
            if key in self._frozen and key not in self._has_frozen:
                self._load_frozen(key, self._tensor(loaded.spec, key, tensors))
        for key in loaded.spec.buffers:
            self._set_buffer(key, tensors[key])
        if self._keeps_files:  # mapped once more, so that nothing of the file is in memory yet
            loaded.constants.update(self._source.constants(loaded.spec.name, stored, check=False))
            return
        loaded.constants.update({key: self._constant(key, tensors[key]) for key in stored.constants})

    def _load_frozen(self, key: str, tensor: Tensor) -> None:
        if is_quantized(held := self._model.get_parameter(key)):
            param = quantize(held, tensor, key, device=self._device, dtype=self._dtype)
        else:
            param = nn.Parameter(_copy(tensor, self._device, self._dtype), requires_grad=False)
        set_tied_parameter(self._model, self._names[key], param)
        self._has_frozen.add(key)

    def _tensor(self, layer: LayerSpec, key: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a parameter of a layer, which may be stored with an earlier one. tensors: those stored with it."""
        first = self._holders[key][0]
        return tensors[key] if first == layer.index else self._source.tensor(self._layers.layers[first].name, key)

    def _constant(self, key: str, tensor: Tensor) -> Tensor:
        """Return a constant as it is stored: the parameter in use, which takes no more memory, if it is the same."""
        param = self._model.get_parameter(key) if key in self._names else None
        return tensor if param is None or param.is_meta or param.dtype != tensor.dtype else param.detach()

    def _weight(self, key: str, param: nn.Parameter, tensor: Tensor, *, is_copy: bool) -> Weight:
        if self._has_masters:
            master = nn.Parameter(_copy(tensor, self._master_device, torch.float32))
        else:
            master = as_own_master(param)
        is_sent = key in self._sent
        is_tied = len(self._holders[key]) > 1
        return Weight(
            key,
            param,
            master,
            is_copy=is_copy and not is_sent,
            is_tied=is_tied,
            has_remote_lookups=is_sent,
            is_hidden_matrix=key in self._hidden_matrices,
        )

    def _load_outer_buffers(self) -> None:
        """Load the stored buffers outside of blocks, which any layer may use, from the file of the last layer."""
        last = self._layers.layers[-1]
        for key in last.buffers:
            self._set_buffer(key, self._source.tensor(last.name, key))

    def _set_buffer(self, key: str, tensor: Tensor) -> None:
        set_buffer(self._model, key, tensor.to(self._device, self._model.get_buffer(key).dtype, copy=True))


def _copy(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a copy; the tensor lies in a memory-mapped file."""
    return tensor.to(device=device, dtype=dtype, copy=True)


class Constants:
    """The tensors of layers that are not trained: frozen parameters and stored buffers, from a source of weights."""

    def __init__(self, source: WeightSource, layers: ModelLayers) -> None:
        self._source = source
        self._names = {*layers.frozen, *(key for layer in layers.layers for key in layer.buffers)}

    def of_layer(self, layer: str, stored: LayerTensors, *, check: bool = True) -> dict[str, Tensor]:
        """Return the constants of one layer. stored, check: see `WeightSource.constants`."""
        return self._source.constants(layer, stored, check=check)

    def find(self, layer: str, key: str) -> Tensor | None:
        """Return one tensor of one layer, None if it is trained."""
        return self._source.tensor(layer, key) if key in self._names else None

    def stored(self, layer: str, key: str) -> OpenTensor:
        """Return where one of them is, in a file that stays open."""
        return self._source.stored(layer, key)


class BlankWeights:
    """Zeros in place of the trained weights of layers, for a rank that gets them later. A `WeightSource`.

    Its layers must be loaded with `defers_constants`. model: its parameters may be on the meta device.
    """

    def __init__(self, model: PreTrainedModel, constants: Constants) -> None:
        self._model = model
        self._constants = constants

    def tensors(self, layer: str, stored: LayerTensors) -> dict[str, Tensor]:
        return {key: torch.zeros_like(weight, device="cpu") for key, weight in stored.weights.items()}

    def constants(self, layer: str, stored: LayerTensors, *, check: bool = True) -> dict[str, Tensor]:
        return self._constants.of_layer(layer, stored, check=check)

    def tensor(self, layer: str, key: str) -> Tensor:
        constant = self._constants.find(layer, key)
        return torch.zeros_like(self._model.get_parameter(key), device="cpu") if constant is None else constant

    def stored(self, layer: str, key: str) -> OpenTensor:
        return self._constants.stored(layer, key)


class RandomWeights:
    """Weights initialised as transformers does, each layer from (seed, layer): independent of the number of stages.

    Reseeds torch's global generators.
    """

    def __init__(self, model_class: ModelClass, config: PreTrainedConfig, layers: ModelLayers, *, seed: int) -> None:
        self._class = model_class
        self._config = config
        self._layers = layers
        self._seed = seed

    @functools.cached_property
    def _model(self) -> PreTrainedModel:
        return self._class.build(self._config)

    def tensors(self, layer: str, stored: LayerTensors) -> dict[str, Tensor]:
        drawn = self._draw(layer)
        return {key: drawn[key] for key in (*stored.weights, *stored.constants)}

    def constants(self, layer: str, stored: LayerTensors, *, check: bool = True) -> dict[str, Tensor]:
        drawn = self._draw(layer) if stored.constants else {}
        return {key: drawn[key] for key in stored.constants}

    def tensor(self, layer: str, key: str) -> Tensor:
        return self._draw(layer)[key]

    def stored(self, layer: str, key: str) -> OpenTensor:
        """Raise, since drawn weights are in no file."""
        raise KeyError(key)

    @torch.no_grad()
    def _draw(self, layer: str) -> dict[str, Tensor]:
        """Return the tensors that are stored with a layer; leaves the model as it was."""
        index, model, names = self._layers.index(layer), self._model, parameter_names(self._model)
        keys = self._layers.own_parameters(index)
        on_meta = {key: model.get_parameter(key) for key in keys}
        try:
            for key, param in on_meta.items():
                set_tied_parameter(model, names[key], nn.Parameter(torch.empty_like(param, device="cpu")))
            torch.manual_seed(mix_seed(self._seed, index))
            if (block := self._layers.layers[index].block) is not None:
                model.get_submodule(block).apply(model._init_weights)
                after = [key for key in keys if not any(name.startswith(f"{block}.") for name in names[key])]
                for path in dict.fromkeys(key.rpartition(".")[0] for key in after):  # such as an encoder's last norm
                    model._init_weights(model.get_submodule(path))
            else:
                _apply_outside(model, {model.get_submodule(path) for path in self._layers.blocks}, model._init_weights)
            params = {key: model.get_parameter(key).detach().float() for key in keys}
            return params | {key: model.get_buffer(key) for key in self._layers.layers[index].buffers}
        finally:
            for key, param in on_meta.items():
                set_tied_parameter(model, names[key], param)


def _apply_outside(module: nn.Module, blocks: set[nn.Module], function: Callable[[nn.Module], object]) -> None:
    """Apply a function to all modules but blocks, as `nn.Module.apply` does: to children first."""
    for child in module.children():
        if child not in blocks:
            _apply_outside(child, blocks, function)
    function(module)
