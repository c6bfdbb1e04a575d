"""Modes that record what the operations of a model's forward use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


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
