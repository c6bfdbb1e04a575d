"""Record what the operations of a model's forward use, and which values depend on its inputs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from transformers import PreTrainedModel


class RandomOps(TorchDispatchMode):
    """Records the segments of a forward in which operations draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.segment = 0
        """Number of blocks that were called before."""
        self.segments: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_without_dropout(func, args, kwargs or {}):
            self.segments.add(self.segment)
        return func(*args, **(kwargs or {}))


def _is_without_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that draws random numbers for dropout only, such as attention, is called without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    return not (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


class Uses(TorchFunctionMode):
    """Records the parameters that operations use, and what depends on them, or on inputs of the model, by value.

    Autograd alone does not see what happens without gradients: indices, masks, and frozen tables under no_grad.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__()
        self._used: set[int] = set()
        self._used_whole: set[int] = set()
        self._indices: dict[int, set[str]] = {}
        self._input_of = {id(x): name for name, x in batch.items() if isinstance(x, Tensor)}
        """Tensors with exactly the values of an input, in another shape."""
        self._params: dict[int, set[int]] = {}
        self._inputs = {id(x): {name} for name, x in batch.items() if isinstance(x, Tensor)}
        self._kept: list[Any] = []  # alive, or Python may give an id twice

    def is_used(self, param: nn.Parameter) -> bool:
        """Whether an operation used the parameter."""
        return id(param) in self._used

    def lookups_of(self, param: nn.Parameter) -> tuple[str, ...]:
        """Return the inputs of the model whose values are the indices of the parameter's rows that operations use.

        Empty if an operation uses other rows, or the whole parameter.
        """
        return () if id(param) in self._used_whole else tuple(sorted(self._indices.get(id(param), ())))

    def is_computed(self, x: Tensor) -> bool:
        """Whether a tensor depends on parameters without gradients."""
        return id(x) in self._params

    def is_computed_from(self, x: Tensor, param: nn.Parameter) -> bool:
        """Whether a tensor depends on a parameter without gradients."""
        return id(param) in self._params.get(id(x), ())

    def inputs_of(self, x: Tensor) -> set[str]:
        """Return the inputs of the model whose values determine a tensor."""
        return self._inputs.get(id(x), set())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        sources = set().union(*(self._params.get(id(x), ()) for x in tensors))
        if name != "__get__":  # reading a property, such as shape
            params = [x for x in tensors if isinstance(x, nn.Parameter)]
            self._used |= {id(x) for x in params}
            self._kept += params
            self._record_rows(func, args, kwargs or {}, params)
            if not torch.is_grad_enabled():
                sources |= {id(x) for x in params}
        origins = set().union(*(self.inputs_of(x) for x in tensors)) if not reads_shape_only(name) else set()
        if name in _SAME_VALUES and isinstance(out, Tensor) and (source := self._input_of.get(id(args[0]))):
            self._input_of[id(out)] = source
            self._kept.append(out)
        written = args[:1] if name == "__setitem__" else ()  # which returns nothing
        for x in (*tree_flatten(out)[0], *written):
            if isinstance(x, Tensor) and (sources or origins):
                self._kept.append(x)
                if sources:
                    self._params[id(x)] = self._params.get(id(x), set()) | sources
                if origins:
                    self._inputs[id(x)] = self.inputs_of(x) | origins
        return out

    def _record_rows(self, func: Any, args: Any, kwargs: Any, params: Sequence[nn.Parameter]) -> None:
        """Record which rows of parameters an operation uses."""
        source = self._input_of.get(id(args[0])) if func is embedding else None
        if source is None or kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq"):
            self._used_whole |= {id(x) for x in params}
        else:
            self._indices.setdefault(id(args[1]), set()).add(source)


_SAME_VALUES = ("view", "reshape", "contiguous", "clone", "detach", "to", "long", "int")


def reads_shape_only(function: str) -> bool:
    """Whether a function of torch makes a tensor of another's shape alone."""
    return function.endswith("_like") or function.startswith("new_")


LARGEST = 2**22
"""Number of elements of a tensor from which its values are not computed."""


class _Known(NamedTuple):
    fake: Tensor
    """Alive, or Python may give its id twice."""
    value: Tensor
    inputs: frozenset[str]
    """Inputs of the model that the value depends on."""


class KnownValues(TorchDispatchMode):
    """Computes the values of small tensors beside the fake ones. Used within FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, _Known] = {}
        self._read: set[str] = set()

    def add(self, name: str, value: Tensor) -> Tensor:
        """Return a fake tensor for an input of the model."""
        return self._add(_fake_like(value), value, frozenset({name}))

    def take_read(self) -> set[str]:
        """Return the inputs whose values decided a branch or a shape since the last call."""
        read, self._read = self._read, set()
        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [index for each in args[1] for index in self._without_mask(each)])
        known = [self._find(x) for x in _tensors((args, kwargs))]
        name = func.overloadpacket.__name__
        if None in known or "empty" in name or torch.Tag.nondeterministic_seeded in func.tags:
            for key in self._written(func, args):
                del self._known[key]
            return func(*args, **kwargs)
        sources = () if reads_shape_only(name) else [each.inputs for each in known if each is not None]
        inputs = frozenset[str]().union(*sources)
        try:
            out = func(*args, **kwargs)
            if any(x.numel() > LARGEST for x in _tensors(out)):
                return out
            value = self._compute(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._read |= inputs
            value = self._compute(func, args, kwargs)
            out = tree_map_only(Tensor, _fake_like, value)
        for key in self._written(func, args):
            self._known[key] = self._known[key]._replace(inputs=self._known[key].inputs | inputs)
        for fake, real in zip(tree_leaves(out), tree_leaves(value), strict=True):
            if isinstance(fake, Tensor):
                self._add(fake, real, inputs)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: known.value if (known := self._find(x)) else x, (args, kwargs))
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _find(self, x: Any) -> _Known | None:
        """Return what is known of a tensor: of a real one, a constant in the code of the model, its values."""
        if isinstance(x, Tensor) and not isinstance(x, FakeTensor):
            return _Known(x, x, frozenset())
        return self._known.get(id(x))

    def _without_mask(self, index: Tensor | None) -> list[Tensor | None]:
        """Return an index, in place of a mask with known values the positions of its ones along each axis."""
        if index is None or index.dtype != torch.bool or id(index) not in self._known:
            return [index]
        _, mask, inputs = self._known[id(index)]
        self._read |= inputs
        with unset_fake_temporarily():
            positions = mask.nonzero(as_tuple=True)
        return [self._add(_fake_like(each), each, inputs) for each in positions]

    def _add(self, fake: Tensor, value: Tensor, inputs: frozenset[str]) -> Tensor:
        self._known[id(fake)] = _Known(fake, value, inputs)
        return fake

    def _written(self, func: Any, args: Any) -> list[int]:
        """Return the keys of what an operation writes in place, with all tensors that share its memory."""
        pairs = zip(func._schema.arguments, args, strict=False)
        written = [self._known[id(x)] for argument, x in pairs if argument.is_write and id(x) in self._known]
        memory = {_memory(each) for each in written}
        return [key for key, each in self._known.items() if _memory(each) in memory] if memory else []


def probe_batch(
    model: PreTrainedModel, inputs: Mapping[str, Sequence[str]], sizes: Mapping[str, int], known: KnownValues
) -> dict[str, Tensor]:
    """Return a batch of fake tensors with known values: ones, and ends of sequences, which classifiers look for."""
    end = getattr(model.config.get_text_config(), "eos_token_id", None)
    batch = {}
    for name, dims in inputs.items():
        with unset_fake_temporarily():
            value = torch.ones([sizes[dim] for dim in dims], dtype=torch.long)
            if name.endswith("input_ids") and isinstance(end, int):
                value[:, -1] = end
        batch[name] = known.add(name, value)
    return batch


def _memory(known: _Known) -> int:
    return known.value.untyped_storage().data_ptr()


def _fake_like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]
