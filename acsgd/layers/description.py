"""Description of a model as a list of layers: parameters per layer, and the tensors between layers.

A model's forward calls its blocks one after another and runs code of its own before, between and after them. Layer 0
is the code before the first block, layer k + 1 is block k with the code up to the next block, and the last layer is the
code after the last block. Each layer is a function of its inputs and its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from acsgd.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BATCH = "batch"
"""Symbol of an axis with one entry per sequence."""

HIDDEN = "hidden"
"""Name of the hidden state between layers."""

LOGITS = "logits"
"""Name of the output of the last layer."""

Head: TypeAlias = "Callable[[Tensor], Tensor]"
"""Returns the logits of hidden states [B, T, H]; may be called with some of the T positions at a time."""


class LayersError(InputError):
    """The model cannot be divided into layers. The message says why."""


@dataclass(frozen=True)
class Dim:
    """Size of an axis: a size of the batch, rounded up to a multiple, plus a number."""

    symbol: str | None
    """Size of the batch: "batch", "sequence" or "target". None = 0."""
    offset: int
    """Number to add, such as 32 in a model that prepends 32 embeddings."""
    multiple: int = 1
    """Number to whose multiple the size is rounded up, such as 512 in a model that pads sequences to whole windows."""

    def resolve(self, sizes: Mapping[str, int]) -> int:
        """Return the size for given sizes of the batch."""
        size = 0 if self.symbol is None else sizes[self.symbol]
        return -(-size // self.multiple) * self.multiple + self.offset


@dataclass(frozen=True)
class TensorShape:
    """Shape, with symbols for the sizes of the batch, and dtype of a tensor between layers."""

    dims: tuple[Dim, ...]
    dtype: str
    """Name of the torch dtype. That of the weights = "weights"."""

    @property
    def batch_axis(self) -> int | None:
        """Axis with one entry per sequence; None if there is none."""
        return next((axis for axis, dim in enumerate(self.dims) if dim == Dim(BATCH, 0)), None)

    def resolve(self, sizes: Mapping[str, int], weights: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape for given sizes of the batch, and the dtype for a given dtype of the weights."""
        import torch  # takes seconds, and a manifest is read without it

        shape = tuple(dim.resolve(sizes) for dim in self.dims)
        return shape, weights if self.dtype == "weights" else getattr(torch, self.dtype)


@dataclass(frozen=True)
class Origin:
    """Origin of an input of a layer."""

    kind: Literal["output", "input", "forward"]
    """An output of the block before; an unchanged input of that block's layer; or made by the model's code between."""
    index: int = 0
    """Position among the outputs of the block."""


@dataclass(frozen=True)
class Replicated:
    """A tensor that every stage computes for itself, with its own copy of the parameters, instead of receiving it."""

    kind: Literal["forward", "relative_bias", "default"]
    """The model's code before the blocks computes it; or an attention module does, from its table of relative biases;
    or the block itself does, if it is not given."""
    module: str = ""
    """Module path of the attention with the table."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer: never divided between ranks, stored in one file."""

    name: str
    """Name of its file, without suffix."""
    index: int
    """Position in the model, 0 = first; part of every seed that concerns the layer."""
    block: str | None
    """Module path of its block; None for the first and the last layer. Layers have the same if forward calls a block
    several times."""
    parameters: tuple[str, ...]
    """Names of the parameters it uses, as in the Hugging Face model. One that several layers use is tied."""
    buffers: tuple[str, ...]
    """Names of its buffers that are stored with the model."""
    random: bool
    """Whether it draws random numbers in training, as for dropout."""
    reads: tuple[str, ...]
    """Inputs of the model whose values, not only shapes, the model's code in the layer uses."""
    inputs: dict[str, TensorShape]
    """Tensors from the previous layer, by name; none for the first layer."""
    replicated: dict[str, Replicated]
    """Further tensors that enter the block and depend on parameters, by name: those that forward makes before the first
    block, and those without a batch axis, since codecs cache tensors per sequence."""
    origins: dict[str, Origin]
    """Origin of each output of a block's layer, by name; empty for the first and the last layer."""
    outputs: tuple[Any, ...] | None = None
    """Form of what the block returns, leaf by leaf: "tensor", or the value of anything else. None without a block."""
    returns: Literal["tensor", "tuple", "list"] | None = None
    """Type of what the block returns. None without a block."""
    lookups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters that the layer uses as tables of embeddings and for nothing else, with the inputs of the model whose
    values are the indices of the rows."""

    @property
    def runs_forward(self) -> bool:
        """Whether the model runs code of its own after the block of this layer."""
        return any(origin.kind == "forward" for origin in self.origins.values())


def are_connected(layers: Sequence[LayerSpec]) -> bool:
    """Return whether weights of some layers are used in several of them, by themselves or in replicated tensors.

    The gradients of such weights need all of these layers at once.
    """
    uses = Counter(key for layer in layers for key in layer.parameters)
    return any(count > 1 for count in uses.values()) or any(layer.replicated for layer in layers)


@dataclass(frozen=True)
class ModelLayers:
    """All layers of a model."""

    layers: tuple[LayerSpec, ...]
    frozen: tuple[str, ...]
    """Parameters without gradients: used without autograd, such as tables of sinusoids, not used at all, or frozen by
    `freeze`. Those that no layer uses are stored with the last one."""
    context_inputs: tuple[str, ...]
    """Inputs of the model whose values, not only shapes, determine masks, positions and other arguments of blocks."""
    version: str
    """Version of transformers with which the layers were derived."""

    @property
    def blocks(self) -> list[str]:
        """Module paths of all blocks, in the order of the calls."""
        return [layer.block for layer in self.layers if layer.block is not None]

    @property
    def first_trained(self) -> int:
        """Index of the first layer with a parameter that is trained. Gradients travel down to this layer."""
        frozen = {*self.frozen}
        return next(layer.index for layer in self.layers if not frozen.issuperset(layer.parameters))

    def freeze(self, patterns: Sequence[str], kept: Collection[str] = ()) -> ModelLayers:
        """Return the layers with further frozen parameters: those whose names match a shell-style pattern.

        kept: names of parameters that stay as they are.

        Raises ValueError if a pattern matches no trained parameter, or if none remains.
        """
        trained = [key for key in self.holders() if key not in self.frozen]
        for pattern in patterns:
            if not any(fnmatchcase(key, pattern) for key in trained):
                raise ValueError(f'"{pattern}" matches no parameter; names are {", ".join(trained[:3])}, ...')
        frozen = [key for key in trained if key not in kept and any(fnmatchcase(key, pattern) for pattern in patterns)]
        if len(frozen) == len(trained):
            raise ValueError("no parameter is left to train")
        return replace(self, frozen=(*self.frozen, *frozen))

    def index(self, name: str) -> int:
        """Return the position of a layer."""
        return next(layer.index for layer in self.layers if layer.name == name)

    def holders(self) -> dict[str, list[int]]:
        """Return, by parameter, the indices of the layers that use it, first to last."""
        holders: dict[str, list[int]] = {}
        for layer in self.layers:
            for key in layer.parameters:
                holders.setdefault(key, []).append(layer.index)
        return holders

    def first_holder(self, key: str) -> LayerSpec:
        """Return the layer with which a parameter is stored."""
        return next(layer for layer in self.layers if key in layer.parameters)

    def tied(self) -> dict[str, list[int]]:
        """Return the trained parameters that several layers use, with the indices of these layers."""
        return {key: holders for key, holders in self.holders().items() if len(holders) > 1 and key not in self.frozen}

    def tables(self) -> dict[str, list[int]]:
        """Return those of `tied` that some layers use as tables of embeddings only."""
        return {
            key: holders
            for key, holders in self.tied().items()
            if any(key in self.layers[index].lookups for index in holders)
        }

    def own_parameters(self, index: int) -> list[str]:
        """Return the parameters stored with a layer: those that no earlier layer uses; unused ones with the last."""
        earlier = {key for layer in self.layers[:index] for key in layer.parameters}
        keys = list(self.layers[index].parameters)
        if index == len(self.layers) - 1:
            keys += [key for key in self.frozen if key not in keys]
        return [key for key in keys if key not in earlier]

    def own_constants(self, index: int) -> list[str]:
        """Return the tensors stored with a layer that are not trained: frozen parameters, then buffers."""
        frozen = {*self.frozen}
        return [*(key for key in self.own_parameters(index) if key in frozen), *self.layers[index].buffers]

    def stored(self) -> dict[str, list[str]]:
        """Return the names of the tensors in the file of each layer, first layer first."""
        return {layer.name: [*self.own_parameters(layer.index), *layer.buffers] for layer in self.layers}

    def boundary(self, cut: int) -> Mapping[str, TensorShape]:
        """Return the tensors that travel between two stages of which the second starts with layer `cut`."""
        return self.layers[cut].inputs

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Verification:
    """Result of a comparison of layers with the whole model that found no difference beyond rounding."""

    batches: tuple[str, ...]
    """Batches that were compared: "plain", "padded", "packed" if the model keeps documents apart, "prefixed" if its
    attention can have both directions in a prefix."""
    difference: float
    """Largest difference of an output or a gradient, relative to its largest absolute value, or to 1."""
    blocks: int
    """Number of blocks of the small model that was compared."""
    parameters: int
    """Number of parameters of the small model."""
    version: str
    """Version of transformers."""
    ignores_padding: bool = False
    """Whether padded rows have the same logits when they are cut to the longest row."""


def layer_names(num_blocks: int) -> Sequence[str]:
    """Return the names of the layers of a model, first to last."""
    return ["embed", *(f"block-{index:05d}" for index in range(num_blocks)), "head"]
