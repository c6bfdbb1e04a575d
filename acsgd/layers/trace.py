"""Trace one run of a model's own forward on fake tensors, from block to block: no weights, no arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import Cache, PreTrainedModel

from acsgd.layers.capture import BlockCall, find_blocks, stubbed
from acsgd.layers.description import HIDDEN, LayersError, Origin
from acsgd.layers.recorders import KnownValues, RandomOps, Uses, probe_batch
from acsgd.layers.skeleton import experts_without_values, parameter_names, set_tied_parameter


class TraceSegment(NamedTuple):
    """What the trace found between two blocks."""

    call: BlockCall | None
    """Call of the block that ends the segment; None at the end of forward."""
    inputs: dict[str, Tensor]
    """Tensors of the call that depend on parameters or earlier blocks."""
    origins: dict[str, Origin]
    parameters: list[str]
    """Parameters outside of blocks that the segment uses."""
    trained: list[str]
    """Those of them that get a gradient from the segment."""
    lookups: dict[str, tuple[str, ...]]
    """Those of them that the segment uses as tables of embeddings only, with the inputs that are the indices."""
    reads: set[str]
    """Inputs of the model whose values determine tensors that the segment makes."""
    parameters_of: dict[str, list[str]]
    """Parameters outside of blocks that one input of the call depends on, by the name of the input."""


class Trace(NamedTuple):
    """One run of forward."""

    model: PreTrainedModel
    sizes: Mapping[str, int]
    blocks: list[str]
    """Module paths in the order of the calls; of a block that is called several times, as often."""
    segments: list[TraceSegment]
    returned: list[Any]
    """What each block returned."""
    passed_on: list[dict[int, str]]
    """Per block, the positions among its outputs of those of its inputs that it returns unchanged, with their names."""
    context_inputs: set[str]
    random: set[int]
    """Layers that draw random numbers."""


@contextlib.contextmanager
def on_fake_tensors(model: PreTrainedModel) -> Iterator[None]:
    """Context in which operations run on fake tensors; replaces parameters and buffers of a model by such, in place."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fill_with_fakes(model)
        yield


def trace(
    model: PreTrainedModel,
    inputs: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    paths: Sequence[str] | None = None,
) -> Trace:
    """Run forward, within `on_fake_tensors`. paths: of the blocks; by default, of all that forward calls.

    Those that it does not call, as of a vision tower without images, are left to the last layer as unused.
    """
    if paths is None:
        paths = find_blocks(model)
    known = KnownValues()
    batch = probe_batch(model, inputs, sizes, known)
    tracer = _Tracer(model, paths, batch, known)
    with (
        _forward_errors(model, inputs),
        stubbed(tracer.blocks, tracer.stub),
        experts_without_values(model),
        known,
        tracer.uses,
        tracer.random,
    ):
        logits = model(**batch, use_cache=False).logits
    called = [path for index, path in enumerate(paths) if index in tracer.order]
    if 0 < len(called) < len(paths):
        return trace(model, inputs, sizes, called)
    tracer.finish(logits)
    return Trace(
        model=model,
        sizes=sizes,
        blocks=[paths[i] for i in tracer.order],
        segments=tracer.segments,
        returned=tracer.returned,
        passed_on=tracer.passed_on,
        context_inputs=tracer.context_inputs,
        random=tracer.random_layers(),
    )


@contextlib.contextmanager
def _forward_errors(model: PreTrainedModel, inputs: Iterable[str]) -> Iterator[None]:
    """Turn errors of forward into a LayersError."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise LayersError(f"{type(model).__name__}: forward depends on the values of tensors ({error.func})") from None
    except LayersError:
        raise
    except Exception as error:  # raised in transformers' code
        reason = f"{error}".rstrip(".")
        if "padding token" in reason:  # of classifiers, which look for the last token of each sequence
            reason += '; set "pad_token_id" in config.json'
        raise LayersError(f"{type(model).__name__}: forward fails with {', '.join(inputs)} alone: {reason}") from error


class _BlockResult(NamedTuple):
    """What a block returned, flattened."""

    leaves: list[Any]
    spec: TreeSpec
    passed_on: dict[int, str]
    """As in Trace."""
    is_random: bool
    """Whether the block draws random numbers."""


class _Tracer:
    """Follows one run of forward from block to block."""

    def __init__(
        self, model: PreTrainedModel, paths: Sequence[str], batch: Mapping[str, Tensor], known: KnownValues
    ) -> None:
        self.blocks = [model.get_submodule(path) for path in paths]
        self.order: list[int] = []
        self.segments: list[TraceSegment] = []
        self.returned: list[Any] = []
        self.passed_on: list[dict[int, str]] = []
        self.context_inputs: set[str] = set()
        self.uses = Uses(batch)
        self._known = known
        self.random = RandomOps()
        self._random_blocks: set[int] = set()
        """Layers whose blocks draw random numbers."""
        inside = tuple(f"{path}." for path in paths)
        self._model = model
        self._names = {name: names for name, names in parameter_names(model).items() if not name.startswith(inside)}
        self._params = {name: model.get_parameter(name) for name in self._names}
        self._results: dict[str, _BlockResult] = {}
        self._stale: list[tuple[str, Tensor]] = []
        """Tensors that forward must not use any more, with their descriptions."""

    def stub(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():  # what the block does is no use of a parameter by the model's own code
            return self._enter(index, forward, args, kwargs)

    def finish(self, logits: Tensor) -> None:
        """Close the last segment. Raises LayersError if forward called no block, or does not use their outputs."""
        if not self.order:
            raise LayersError(f"forward calls none of {len(self.blocks)} blocks")
        hidden = tree_flatten(self.returned[-1])[0][0]
        parameters, trained = self._parameters_of([logits])
        if not logits.requires_grad or torch.autograd.grad(logits.sum(), [hidden], allow_unused=True)[0] is None:
            raise LayersError("the head does not use the output of the last block")
        reads = self.uses.inputs_of(logits) | self._known.take_read()
        self.segments.append(
            TraceSegment(
                None, {HIDDEN: hidden}, {HIDDEN: Origin("output")}, parameters, trained, self._lookups(), reads, {}
            )
        )

    def random_layers(self) -> set[int]:
        """Return the layers that draw random numbers. The code after the last block is a layer of its own."""
        count = len(self.order)
        return self._random_blocks | {i if i < count else count + 1 for i in self.random.segments}

    def _enter(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = BlockCall.of(self.blocks[index], args, kwargs)
        _check_arguments(call)
        inputs = {name: x for name, x in call.tensors().items() if self._is_computed(name, x)}
        origins = {name: self._origin(name, x) for name, x in inputs.items()}
        made = {name: inputs[name] for name, origin in origins.items() if origin.kind == "forward"}
        reached = {name: self._made_of(x) for name, x in made.items() if name != HIDDEN}
        reads = {name for x in made.values() for name in self.uses.inputs_of(x)}
        parameters, trained = self._parameters_of([*made.values()])
        self.segments.append(TraceSegment(call, inputs, origins, parameters, trained, self._lookups(), reads, reached))
        self.context_inputs |= {
            name for key, x in call.tensors().items() if key not in inputs for name in self.uses.inputs_of(x)
        }
        self._start_segment(call)
        self.order.append(index)
        self.random.segment = len(self.order)
        result = self._run(self.blocks[index], call, lambda: forward(*args, **kwargs))
        if result.is_random:
            self._random_blocks.add(len(self.order))
        self.context_inputs |= self._known.take_read()  # forward depends on them on its way to this block
        self.passed_on.append(result.passed_on)
        self.returned.append(tree_unflatten([_new_leaf(x) for x in result.leaves], result.spec))
        return self.returned[-1]

    def _run(self, block: nn.Module, call: BlockCall, forward: Callable[[], Any]) -> _BlockResult:
        """Run a block, or return the result of an equal block that was called alike."""
        key = repr((block, [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in call.leaves], call.spec))
        if key not in self._results:
            random = RandomOps()
            with torch.no_grad(), random:
                leaves, spec = tree_flatten(forward())
            if not isinstance(leaves[0], Tensor) or leaves[0].shape != call.hidden.shape:
                raise LayersError("a block does not return the hidden state first")
            passed_on = {i: name for i, x in enumerate(leaves) for name, y in call.tensors().items() if x is y}
            self._results[key] = _BlockResult(leaves, spec, passed_on, bool(random.segments))
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

    def _parameters_of(self, tensors: Sequence[Tensor]) -> tuple[list[str], list[str]]:
        """Return the parameters outside of blocks that the current segment uses, and those with gradients of `tensors`.

        The first includes those that it uses for whatever purpose. Raises LayersError for stale tensors.
        """
        reached = self._reached(tensors)
        return [name for name, p in self._params.items() if name in reached or self.uses.is_used(p)], reached

    def _lookups(self) -> dict[str, tuple[str, ...]]:
        """Return the tables of embeddings of the current segment, with the inputs that are the indices of the rows."""
        return {name: indices for name, p in self._params.items() if (indices := self.uses.lookups_of(p))}

    def _made_of(self, x: Tensor) -> list[str]:
        """Return the parameters outside of blocks that a tensor of the current segment depends on."""
        reached = self._reached([x])
        return [name for name, p in self._params.items() if name in reached or self.uses.is_computed_from(x, p)]

    def _reached(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the parameters outside of blocks that `tensors` depend on through autograd."""
        sources = [x.sum() for x in tensors if x.requires_grad]
        if not sources:
            return []
        targets = [*self._params.values(), *(x for _, x in self._stale)]
        grads = torch.autograd.grad(sources, targets, allow_unused=True, retain_graph=True)
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
        self._params = {name: nn.Parameter(p.detach()) for name, p in self._params.items()}
        for name, p in self._params.items():
            set_tied_parameter(self._model, self._names[name], p)
        if call.hidden.grad_fn is not None and not call.hidden._is_view():
            call.hidden.detach_()  # code that uses it again after the block uses an input of that block's layer


def _check_arguments(call: BlockCall) -> None:
    """Raise LayersError for a cache among the arguments of a block: it holds state of other blocks."""
    for name, leaf in zip(call.names, call.leaves, strict=True):
        if isinstance(leaf, Cache):
            raise LayersError(f"forward passes a cache to its blocks ({name}) although use_cache is false")


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
