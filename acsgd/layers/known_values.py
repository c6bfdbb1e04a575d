"""Values of tensors in a run of forward on fake tensors, as far as they depend on the inputs of the model alone.

Fake tensors have no values. A forward may need some nevertheless: a classifier looks for the end of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from transformers import PreTrainedModel

from acsgd.layers.recorders import reads_shape_only

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
