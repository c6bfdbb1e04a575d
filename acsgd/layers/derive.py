"""Derive the layers of a model from one run of its own forward, on fake tensors: no weights, no arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from acsgd.layers.capture import BlockCall, find_blocks, stubbed
from acsgd.layers.description import (
    HIDDEN,
    Dim,
    LayersError,
    LayerSpec,
    ModelLayers,
    Origin,
    Replicated,
    TensorShape,
    layer_names,
)
from acsgd.layers.relative_bias import relative_bias
from acsgd.layers.skeleton import experts_without_values

PROBES: tuple[Mapping[str, int], ...] = (
    {"batch": 2, "sequence": 16, "target": 8},
    {"batch": 3, "sequence": 32, "target": 12},
)
"""Sizes of the batches with which forward is run. An axis with the same size in both does not depend on the batch."""


def derive(build: Callable[[], PreTrainedModel], inputs: Mapping[str, Sequence[str]]) -> ModelLayers:
    """Derive the layers of a model.

    build: returns a new model built within `weights_on_meta`. inputs: integer inputs of forward by name, each with the
    names of its sizes, of those in PROBES: {"input_ids": ("batch", "sequence")}. Raises LayersError with the reason if
    the model cannot be divided into layers.
    """
    traces = [_trace(build(), inputs, sizes) for sizes in PROBES]
    return _describe(*traces)


class _Segment(NamedTuple):
    """What the trace found between two blocks."""

    call: BlockCall | None
    """Call of the block that ends the segment; None at the end of forward."""
    inputs: dict[str, Tensor]
    """Tensors of the call that depend on parameters or earlier blocks."""
    origins: dict[str, Origin]
    parameters: list[str]
    """Parameters outside of blocks that the segment uses."""
    parameters_of: dict[str, list[str]]
    """Parameters outside of blocks that one input of the call depends on, by the name of the input."""


class _Trace(NamedTuple):
    """One run of forward."""

    model: PreTrainedModel
    sizes: Mapping[str, int]
    blocks: list[str]
    """Module paths in the order of the calls."""
    segments: list[_Segment]
    returned: list[Any]
    """What each block returned."""
    passed_on: list[dict[int, str]]
    """Per block, the positions among its outputs of those of its inputs that it returns unchanged, with their names."""
    context_inputs: set[str]
    random: set[int]
    """Layers that draw random numbers."""


def _trace(model: PreTrainedModel, inputs: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> _Trace:
    paths = find_blocks(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        _fill_with_fakes(model)
        batch: dict[str, Any] = {
            name: torch.ones([sizes[dim] for dim in dims], dtype=torch.long) for name, dims in inputs.items()
        }
        tracer = _Tracer(model, paths, batch)
        try:
            with stubbed(tracer.blocks, tracer.stub), experts_without_values(model), tracer.uses, tracer.random:
                logits = model(**batch, use_cache=False).logits
            tracer.finish(logits)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise LayersError(
                f"{type(model).__name__}: forward depends on the values of tensors ({error.func})"
            ) from None
    return _Trace(
        model=model,
        sizes=sizes,
        blocks=[paths[i] for i in tracer.order],
        segments=tracer.segments,
        returned=tracer.returned,
        passed_on=tracer.passed_on,
        context_inputs=tracer.context_inputs,
        random=tracer.random.layers,
    )


class _BlockResult(NamedTuple):
    """What a block returned, flattened."""

    leaves: list[Any]
    spec: TreeSpec
    passed_on: dict[int, str]
    """As in _Trace."""
    is_random: bool
    """Whether the block draws random numbers."""


class _Tracer:
    """Follows one run of forward from block to block."""

    def __init__(self, model: PreTrainedModel, paths: Sequence[str], batch: Mapping[str, Any]) -> None:
        self.blocks = [model.get_submodule(path) for path in paths]
        self.order: list[int] = []
        self.segments: list[_Segment] = []
        self.returned: list[Any] = []
        self.passed_on: list[dict[int, str]] = []
        self.context_inputs: set[str] = set()
        self.uses = _Uses(batch)
        self.random = _RandomOps()
        inside = tuple(f"{path}." for path in paths)
        self._model = model
        self._params = {name: p for name, p in model.named_parameters() if not name.startswith(inside)}
        self._results: dict[str, _BlockResult] = {}
        self._stale: list[tuple[str, Tensor]] = []
        """Tensors that forward must not use any more, with their descriptions."""

    def stub(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():  # what the block does is no use of a parameter by the model's own code
            return self._enter(index, forward, args, kwargs)

    def finish(self, logits: Tensor) -> None:
        """Close the last segment. Raises LayersError if forward did not call every block."""
        if len(self.order) != len(self.blocks):
            raise LayersError(f"forward calls {len(self.order)} of {len(self.blocks)} blocks")
        hidden = tree_flatten(self.returned[-1])[0][0]
        parameters = self._parameters_of([logits])
        if torch.autograd.grad(logits.sum(), [hidden], allow_unused=True)[0] is None:
            raise LayersError("the head does not use the output of the last block")
        self.segments.append(_Segment(None, {HIDDEN: hidden}, {HIDDEN: Origin("output")}, parameters, {}))

    def _enter(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index in self.order:
            raise LayersError("forward calls a block more than once")
        call = BlockCall.of(self.blocks[index], args, kwargs)
        inputs = {name: x for name, x in call.tensors().items() if self._is_computed(name, x)}
        origins = {name: self._origin(name, x) for name, x in inputs.items()}
        made = {name: inputs[name] for name, origin in origins.items() if origin.kind == "forward"}
        reached = {name: self._reached([x]) for name, x in made.items() if name != HIDDEN}
        self.segments.append(_Segment(call, inputs, origins, self._parameters_of([*made.values()]), reached))
        self.context_inputs |= {
            name for key, x in call.tensors().items() if key not in inputs for name in self.uses.inputs_of(x)
        }
        self._start_segment(call)
        self.order.append(index)
        self.random.layer = len(self.order)
        result = self._run(self.blocks[index], call, lambda: forward(*args, **kwargs))
        if result.is_random:
            self.random.layers.add(len(self.order))
        self.passed_on.append(result.passed_on)
        if len(self.order) == len(self.blocks):
            self.random.layer += 1  # the code after the last block is the last layer
        self.returned.append(tree_unflatten([_new_leaf(x) for x in result.leaves], result.spec))
        return self.returned[-1]

    def _run(self, block: nn.Module, call: BlockCall, forward: Callable[[], Any]) -> _BlockResult:
        """Run a block, or return the result of an equal block that was called alike."""
        key = repr((block, [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in call.leaves], call.spec))
        if key not in self._results:
            random = _RandomOps()
            with torch.no_grad(), random:
                leaves, spec = tree_flatten(forward())
            if not isinstance(leaves[0], Tensor) or leaves[0].shape != call.hidden.shape:
                raise LayersError("a block does not return the hidden state first")
            passed_on = {i: name for i, x in enumerate(leaves) for name, y in call.tensors().items() if x is y}
            self._results[key] = _BlockResult(leaves, spec, passed_on, bool(random.layers))
        return self._results[key]

    def _is_computed(self, name: str, x: Tensor) -> bool:
        """Whether an argument of a block depends on parameters or on earlier blocks."""
        return name == HIDDEN or x.requires_grad or self.uses.is_computed(x) or any(x is y for y in self._earlier())

    def _earlier(self) -> Iterable[Any]:
        """Yield the outputs of the block before and its inputs except the hidden state."""
        if self.returned:
            yield from tree_flatten(self.returned[-1])[0]
            yield from (x for name, x in self.segments[-1].inputs.items() if name != HIDDEN)

    def _origin(self, name: str, x: Tensor) -> Origin:
        if self.returned:
            for index, y in enumerate(tree_flatten(self.returned[-1])[0]):
                if y is x:
                    return Origin("output", index)
            if name != HIDDEN and self.segments[-1].inputs.get(name) is x:
                return Origin("input")
        return Origin("forward")

    def _parameters_of(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the parameters outside of blocks that the current segment uses to compute `tensors`.

        Includes those that it uses without gradients, for whatever purpose. Raises LayersError for stale tensors.
        """
        reached = self._reached(tensors)
        return [name for name, p in self._params.items() if name in reached or self.uses.is_used(p)]

    def _reached(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the parameters outside of blocks that `tensors` depend on through autograd."""
        targets = [*self._params.values(), *(x for _, x in self._stale)]
        grads: Sequence[Tensor | None] = [None] * len(targets)
        if sources := [x for x in tensors if x.requires_grad]:
            grads = torch.autograd.grad([x.sum() for x in sources], targets, allow_unused=True, retain_graph=True)
        for (description, _), grad in zip(self._stale, grads[len(self._params) :], strict=True):
            if grad is not None:
                raise LayersError(f"forward uses {description} again after a later block")
        return [name for name, grad in zip(self._params, grads, strict=False) if grad is not None]

    def _start_segment(self, call: BlockCall) -> None:
        """Make the parameters new objects, so that what the next segment uses is told from what earlier ones used."""
        self._stale += [(f"parameter {name}", p) for name, p in self._params.items()]
        if self.returned:
            self._stale += [
                ("the output of a block", x)
                for x in tree_flatten(self.returned[-1])[0]
                if isinstance(x, Tensor) and x.requires_grad
            ]
        new = {id(p): nn.Parameter(p.detach()) for p in self._params.values()}
        for module in self._model.modules():
            for leaf, p in module._parameters.items():
                if p is not None and id(p) in new:
                    module._parameters[leaf] = new[id(p)]
        self._params = {name: new[id(p)] for name, p in self._params.items()}
        if call.hidden.grad_fn is not None and not call.hidden._is_view():
            call.hidden.detach_()  # code that uses it again after the block uses an input of that block's layer


class _RandomOps(TorchDispatchMode):
    """Records the layers in which operations draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = 0
        """Layer that runs now."""
        self.layers: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_without_dropout(func, args, kwargs or {}):
            self.layers.add(self.layer)
        return func(*args, **(kwargs or {}))


def _is_without_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that draws random numbers for dropout only, such as attention, is called without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    return not (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


class _Uses(TorchFunctionMode):
    """Records the parameters that operations use, and what depends on them, or on inputs of the model, by value.

    Autograd alone does not see what happens without gradients: indices, masks, and frozen tables under no_grad.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__()
        self._used: set[int] = set()
        self._computed: set[int] = set()
        self._inputs = {id(x): {name} for name, x in batch.items() if isinstance(x, Tensor)}
        self._kept: list[Any] = []  # alive, or Python may give an id twice

    def is_used(self, param: nn.Parameter) -> bool:
        """Whether an operation used the parameter."""
        return id(param) in self._used

    def is_computed(self, x: Tensor) -> bool:
        """Whether a tensor depends on parameters without gradients."""
        return id(x) in self._computed

    def inputs_of(self, x: Tensor) -> set[str]:
        """Return the inputs of the model whose values determine a tensor."""
        return self._inputs.get(id(x), set())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        is_computed = any(id(x) in self._computed for x in tensors)
        if name != "__get__":  # reading a property, such as shape
            params = [x for x in tensors if isinstance(x, nn.Parameter)]
            self._used |= {id(x) for x in params}
            self._kept += params
            is_computed |= bool(params) and not torch.is_grad_enabled()
        origins = set().union(*(self.inputs_of(x) for x in tensors)) if not _reads_shape_only(name) else set()
        for x in tree_flatten(out)[0]:
            if isinstance(x, Tensor) and (is_computed or origins):
                self._kept.append(x)
                if is_computed:
                    self._computed.add(id(x))
                if origins:
                    self._inputs[id(x)] = self.inputs_of(x) | origins
        return out


def _reads_shape_only(function: str) -> bool:
    return function.endswith("_like") or function.startswith("new_")


def _fill_with_fakes(model: nn.Module) -> None:
    """Replace all parameters and buffers by fake tensors, in place; ties are kept. Call it within FakeTensorMode."""
    fakes: dict[int, nn.Parameter] = {}
    kept = list(model.parameters())  # alive, or Python may give an id twice
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in fakes:
                    fakes[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
                module._parameters[name] = fakes[id(p)]
        for name, x in module._buffers.items():
            if x is not None:
                module._buffers[name] = torch.empty(x.shape, dtype=x.dtype)
    del kept


def _new_leaf(x: Any) -> Any:
    return torch.empty_like(x).requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x


def _describe(first: _Trace, second: _Trace) -> ModelLayers:
    """Combine two traces with different sizes of the batch."""
    names = layer_names(len(first.blocks))
    weights = next(first.model.parameters()).dtype
    own = _own_parameters(first)
    shapes = _shapes(first, second, weights)
    buffers = _stored_buffers(first)
    replicated = [_replicated(first, index, shapes) for index in range(len(first.segments))]
    layers = []
    for index, name in enumerate(names):
        is_block = 0 < index < len(names) - 1
        block = first.blocks[index - 1] if is_block else None
        entering = replicated[index - 1] if index else {}
        parameters = list(own.get(block or "", ()))
        if name != names[-2]:  # the model's code after the last block is the last layer
            segment = first.segments[min(index, len(first.segments) - 1)]
            parameters += segment.parameters
        parameters += [key for _, keys in entering.values() for key in keys if key not in parameters]
        leaving = replicated[index] if is_block else {}
        layers.append(
            LayerSpec(
                name=name,
                index=index,
                block=block,
                parameters=tuple(parameters),
                buffers=buffers[index],
                random=index in first.random,
                inputs={key: x for key, x in shapes[index - 1].items() if key not in entering} if index else {},
                replicated={key: how for key, (how, _) in entering.items()},
                origins={k: o for k, o in first.segments[index].origins.items() if k not in leaving}
                if is_block
                else {},
                outputs=_form(first.returned[index - 1]) if is_block else None,
                returns=_container(first.returned[index - 1]) if is_block else None,
            )
        )
    used = {key for layer in layers for key in layer.parameters}
    return ModelLayers(
        layers=tuple(layers),
        unused=tuple(name for name, _ in first.model.named_parameters() if name not in used),
        context_inputs=tuple(sorted(first.context_inputs)),
        version=transformers.__version__,
    )


def _replicated(
    trace: _Trace, index: int, shapes: Sequence[Mapping[str, TensorShape]]
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


def _is_passed_on(trace: _Trace, index: int, name: str) -> bool:
    """Whether block `index - 1` returned an input of its own as input `name` of block `index`."""
    earlier = trace.segments[index - 1].inputs.get(name) if index else None
    return earlier is not None and trace.passed_on[index - 1].get(trace.segments[index].origins[name].index) == name


def _own_parameters(trace: _Trace) -> dict[str, list[str]]:
    """Return the parameters inside each block, by its path."""
    names = [name for name, _ in trace.model.named_parameters()]
    return {path: [name for name in names if name.startswith(f"{path}.")] for path in trace.blocks}


def _stored_buffers(trace: _Trace) -> list[tuple[str, ...]]:
    """Return the buffers stored with each layer: those inside its block; all others with the last layer."""
    keys = trace.model.state_dict().keys()
    stored = [name for name, _ in trace.model.named_buffers() if name in keys]
    by_block = [tuple(name for name in stored if name.startswith(f"{path}.")) for path in trace.blocks]
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


def _shapes(first: _Trace, second: _Trace, weights: torch.dtype) -> list[dict[str, TensorShape]]:
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
        symbols = [symbol for symbol in sizes_x if b - a == sizes_y[symbol] - sizes_x[symbol]]
        if a == b:
            dims.append(int(a))
        elif symbols:
            dims.append((symbols[0], int(a) - sizes_x[symbols[0]]))
        else:
            raise LayersError(
                f"{name} enters a block in shape {tuple(x.shape)} for a batch of {dict(sizes_x)} and in shape "
                f"{tuple(y.shape)} for {dict(sizes_y)}: an axis does not follow one size of the batch"
            )
    return TensorShape(tuple(dims), "weights" if x.dtype == weights else str(x.dtype).removeprefix("torch."))
