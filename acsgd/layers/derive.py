"""Derive the layers of a model from one run of its own forward, on fake tensors: no weights, no code per type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.layers.description import (
    HIDDEN,
    Dim,
    LayersError,
    LayerSpec,
    ModelLayers,
    Replicated,
    TensorShape,
    layer_names,
)
from acsgd.layers.skeleton import parameter_names
from acsgd.layers.small_config import maximum_length
from acsgd.layers.stand_ins import relative_bias
from acsgd.layers.trace import Trace, on_fake_tensors, trace


def check_config(config: PreTrainedConfig) -> None:
    """Raise LayersError for an option that stages do not support, with the value to set."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            check_config(value)
        elif "layerdrop" in name and isinstance(value, float) and value > 0:
            raise LayersError(
                f'{name} is {value}, but stages cannot skip layers at random; set "{name}": 0.0 in config.json'
            )
        elif name == "output_router_logits" and value:
            raise LayersError(
                "output_router_logits is true, but the balancing loss of the routers needs all layers on one rank; "
                'set "output_router_logits": false in config.json to train without that loss'
            )


PROBES: tuple[Mapping[str, int], ...] = (
    {"batch": 2, "sequence": 16, "target": 8},
    {"batch": 3, "sequence": 33, "target": 13},
)
"""Sizes of the batches with which forward is run. An axis with the same size in both does not depend on the batch. The
second ones are odd, so that an axis that is padded to a multiple shows it."""


def derive(build: Callable[[], PreTrainedModel], inputs: Mapping[str, Sequence[str]]) -> ModelLayers:
    """Derive the layers of a model.

    build: returns a new model built within `weights_on_meta`. inputs: integer inputs of forward by name, each with the
    names of its sizes, of those in PROBES: {"input_ids": ("batch", "sequence")}. Raises LayersError with the reason if
    the model cannot be divided into layers.
    """
    model = build()
    check_config(model.config)
    with on_fake_tensors(model):
        first, second = (trace(model, inputs, sizes) for sizes in _probes_within(maximum_length(model.config)))
        if (length := _constant_length(first, second)) is not None:
            first, second = (trace(model, inputs, sizes) for sizes in _probes_around(length))
        layers = _describe(first, second)
    _check_batch_axes(layers)
    return layers


def _probes_within(longest: int | None) -> Sequence[Mapping[str, int]]:
    """Return sizes of batches whose sequences a model of a maximum length takes."""
    if longest is None or longest >= max(max(sizes.values()) for sizes in PROBES):
        return PROBES
    short, long = max(1, longest // 4), longest - 1 + longest % 2
    return {"batch": 2, "sequence": short, "target": short}, {"batch": 3, "sequence": long, "target": max(1, long - 2)}


def _constant_length(first: Trace, second: Trace) -> int | None:
    """Return the length of a hidden state that is the same for both batches: sequences may be padded to windows."""
    pairs = [
        (a.inputs[HIDDEN].shape, b.inputs[HIDDEN].shape) for a, b in zip(first.segments, second.segments, strict=True)
    ]
    return next((int(a[1]) for a, b in pairs if len(a) == 3 and a[1:] == b[1:]), None)


def _probes_around(length: int) -> tuple[Mapping[str, int], ...]:
    """Return sizes of batches of which one has longer sequences than a length."""
    target = length // 4
    return (
        {"batch": 2, "sequence": length // 2, "target": target},
        {"batch": 3, "sequence": length + 1, "target": target + 5},
    )


def _check_batch_axes(layers: ModelLayers) -> None:
    """Raise LayersError unless axis 0 of all tensors between layers has one entry per sequence."""
    for layer in layers.layers:
        for name, shape in layer.inputs.items():
            if shape.batch_axis != 0:
                axis = "no axis" if shape.batch_axis is None else f"axis {shape.batch_axis}"
                raise LayersError(
                    f"{name} enters layer {layer.name} with {axis} for the sequences of a batch; stages process some "
                    "sequences at a time, along axis 0"
                )


class _Parts(NamedTuple):
    """Properties of layers, by layer or by block."""

    own: dict[str, list[str]]
    """Parameters inside each block, by its path."""
    shapes: list[dict[str, TensorShape]]
    """Shapes of the inputs of each block, and of the last layer."""
    buffers: list[tuple[str, ...]]
    """Buffers stored with each layer."""
    replicated: list[dict[str, tuple[Replicated, list[str]]]]
    """Inputs of each block, and of the last layer, that are not sent, with the parameters that each takes."""


def _describe(first: Trace, second: Trace) -> ModelLayers:
    """Combine two traces with different sizes of the batch."""
    shapes = _shapes(first, second, weights=next(first.model.parameters()).dtype)
    replicated = [_replicated(first, index, shapes) for index in range(len(first.segments))]
    parts = _Parts(_own_parameters(first), shapes, _stored_buffers(first), replicated)
    names = layer_names(len(first.blocks))
    return ModelLayers(
        layers=tuple(_describe_layer(first, parts, index, name) for index, name in enumerate(names)),
        frozen=_frozen_parameters(first),
        context_inputs=tuple(sorted(first.context_inputs)),
        version=transformers.__version__,
    )


def _describe_layer(trace: Trace, parts: _Parts, index: int, name: str) -> LayerSpec:
    count = len(trace.blocks)
    entering = parts.replicated[index - 1] if index else {}
    block = trace.blocks[index - 1] if 0 < index <= count else None
    # the model's code after the last block is the last layer
    code = None if index == count else trace.segments[min(index, count)]
    used = [*parts.own.get(block or "", ()), *(code.parameters if code else ())]
    used += [key for _, keys in entering.values() for key in keys if key not in used]
    spec = LayerSpec(
        name=name,
        index=index,
        block=block,
        parameters=tuple(used),
        buffers=parts.buffers[index],
        random=index in trace.random,
        reads=tuple(sorted(code.reads if code else ())),
        inputs={key: x for key, x in parts.shapes[index - 1].items() if key not in entering} if index else {},
        replicated={key: how for key, (how, _) in entering.items()},
        origins={},
        lookups={key: indices for key, indices in (code.lookups if code else {}).items() if used.count(key) == 1},
    )
    if block is None:
        return spec
    returned = trace.returned[index - 1]
    sent = {k: origin for k, origin in trace.segments[index].origins.items() if k not in parts.replicated[index]}
    return replace(spec, origins=sent, outputs=_form(returned), returns=_container(returned))


def _frozen_parameters(trace: Trace) -> tuple[str, ...]:
    """Return the parameters outside of blocks that get no gradient."""
    blocks = tuple(f"{path}." for path in trace.blocks)
    trained = {key for segment in trace.segments for key in segment.trained}
    names = (name for name, _ in trace.model.named_parameters())
    return tuple(name for name in names if name not in trained and not name.startswith(blocks))


def _replicated(
    trace: Trace, index: int, shapes: Sequence[Mapping[str, TensorShape]]
) -> dict[str, tuple[Replicated, list[str]]]:
    """Return how the inputs of block `index` that are not sent are computed, and the parameters that each takes.

    Not sent is what forward makes before the first block, and what has no batch axis. Raises LayersError if it is
    unknown how to compute it.
    """
    found = {}
    for name, shape in shapes[index].items():
        made = index
        while trace.segments[made].origins[name].kind == "input" or _is_passed_on(trace, made, name):
            made -= 1  # unchanged since an earlier block
        if name == HIDDEN or (shape.batch_axis is not None and made > 0):
            continue
        segment = trace.segments[made]
        if segment.origins[name].kind == "forward":
            found[name] = Replicated("forward"), segment.parameters_of[name]
        else:
            found[name] = relative_bias(trace.model, trace.blocks[made - 1], name)
    return found


def _is_passed_on(trace: Trace, index: int, name: str) -> bool:
    """Whether block `index - 1` returned an input of its own as input `name` of block `index`."""
    earlier = trace.segments[index - 1].inputs.get(name) if index else None
    return earlier is not None and trace.passed_on[index - 1].get(trace.segments[index].origins[name].index) == name


def _own_parameters(trace: Trace) -> dict[str, list[str]]:
    """Return the parameters inside each block, by its path. Blocks may share some."""
    own: dict[str, list[str]] = {path: [] for path in trace.blocks}
    for name, all_names in parameter_names(trace.model).items():
        modules = (".".join(parts[:end]) for parts in (x.split(".") for x in all_names) for end in range(len(parts)))
        for path in dict.fromkeys(module for module in modules if module in own):
            own[path].append(name)
    return own


def _stored_buffers(trace: Trace) -> list[tuple[str, ...]]:
    """Return the buffers stored with each layer: those inside its block; all others with the last layer.

    Those of a block that is called several times are among the latter, as ranks may need them that lack the first call.
    """
    keys = trace.model.state_dict().keys()
    stored = [name for name, _ in trace.model.named_buffers() if name in keys]
    inside = [f"{path}." if trace.blocks.count(path) == 1 else None for path in trace.blocks]
    by_block = [tuple(name for name in stored if path is not None and name.startswith(path)) for path in inside]
    rest = tuple(name for name in stored if not any(name in names for names in by_block))
    return [(), *by_block, rest]


def _form(returned: Any) -> tuple[Any, ...]:
    return tuple("tensor" if isinstance(x, Tensor) else x for x in tree_flatten(returned)[0])


def _container(returned: Any) -> Literal["tensor", "tuple", "list"]:
    if isinstance(returned, Tensor):
        return "tensor"
    if type(returned) in (tuple, list) and not any(isinstance(x, (tuple, list, dict)) for x in returned):
        return "tuple" if isinstance(returned, tuple) else "list"
    raise LayersError(f"a block returns {type(returned).__name__} of several values; only a flat tuple is supported")


def _shapes(first: Trace, second: Trace, weights: torch.dtype) -> list[dict[str, TensorShape]]:
    """Return the shapes of the inputs of each block, and of the last layer."""
    return [
        {name: _shape(name, (x, first.sizes), (b.inputs[name], second.sizes), weights) for name, x in a.inputs.items()}
        for a, b in zip(first.segments, second.segments, strict=True)
    ]


def _shape(
    name: str, first: tuple[Tensor, Mapping[str, int]], second: tuple[Tensor, Mapping[str, int]], weights: torch.dtype
) -> TensorShape:
    (x, sizes_x), (y, sizes_y) = first, second
    dims: list[Dim] = []
    for a, b in zip(x.shape, y.shape, strict=True):
        shifted = (Dim(symbol, int(a) - sizes_x[symbol]) for symbol in sizes_x)
        rounded = (Dim(symbol, 0, multiple) for symbol in sizes_x for multiple in range(2, int(a) + 1))
        fitting = (
            dim for dim in itertools.chain(shifted, rounded) if (dim.resolve(sizes_x), dim.resolve(sizes_y)) == (a, b)
        )
        if a == b:
            dims.append(Dim(None, int(a)))
        elif dim := next(fitting, None):
            dims.append(dim)
        else:
            raise LayersError(
                f"{name} enters a block in shape {tuple(x.shape)} for a batch of {dict(sizes_x)} and in shape "
                f"{tuple(y.shape)} for {dict(sizes_y)}: an axis does not follow one size of the batch"
            )
    return TensorShape(tuple(dims), "weights" if x.dtype == weights else str(x.dtype).removeprefix("torch."))
