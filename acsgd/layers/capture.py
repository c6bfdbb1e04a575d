"""Run a model's own forward with stubs in place of its blocks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from acsgd.layers.description import HIDDEN, LayersError

Stub = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of a block with its index, its forward, and the arguments; its result is returned to forward."""


class BlockCall(NamedTuple):
    """Arguments of one call of a block, flattened."""

    names: tuple[str, ...]
    """Name of each leaf: HIDDEN, or the block's argument with the path inside it, as "position_embeddings[0]"."""
    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """Flatten the arguments of a call. Raises LayersError if there is no hidden state among them."""
        leaves, spec = tree_flatten((args, kwargs))
        names = list(_leaf_names(type(block).forward, spec))
        names[_find_hidden(names, leaves)] = HIDDEN
        return cls(tuple(names), tuple(leaves), spec)

    @property
    def hidden(self) -> Tensor:
        """The hidden state."""
        return self.leaves[self.names.index(HIDDEN)]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors among the arguments by name."""
        return {name: leaf for name, leaf in zip(self.names, self.leaves, strict=True) if isinstance(leaf, Tensor)}

    def replace(self, state: Mapping[str, Any]) -> BlockCall:
        """Return the call with other values for the named leaves."""
        return self._replace(
            leaves=tuple(state.get(name, leaf) for name, leaf in zip(self.names, self.leaves, strict=True))
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments."""
        return tree_unflatten(self.leaves, self.spec)


@functools.cache  # blocks are called alike in each pass, and paths take several times as long as the leaves alone
def _leaf_names(forward: Callable[..., Any], spec: TreeSpec) -> tuple[str, ...]:
    """Return the name of each leaf of (args, kwargs) of a call: the argument, with the path inside it."""
    parameters = tuple(inspect.signature(forward).parameters)[1:]
    names = []
    for (_, first, *rest), _ in tree_flatten_with_path(tree_unflatten([None] * spec.num_leaves, spec))[0]:
        assert isinstance(first, (SequenceKey, MappingKey))
        argument = parameters[first.idx] if isinstance(first, SequenceKey) else str(first.key)
        names.append(argument + "".join(map(str, rest)))
    return tuple(names)


def _find_hidden(names: Sequence[str], leaves: Sequence[Any]) -> int:
    for i, name in enumerate(names):
        if name == "hidden_states":
            return i
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return i
    raise LayersError("a block is called without a hidden state")


def find_blocks(model: PreTrainedModel) -> list[str]:
    """Return the module paths of the blocks: members of the outermost lists of blocks, in the order of the modules.

    A list of blocks is a ModuleList of layers with gradient checkpointing, or of modules that must not be divided
    (`_no_split_modules`); without any, one of equal modules as long as config.num_hidden_layers; else any of equal
    modules, which may be called several times.
    """
    rules = (_holds_blocks(model), _is_as_deep_as(model), _is_of_one_type)
    lists = next(filter(None, (_block_lists(model, rule) for rule in rules)), None)
    if not lists:
        raise LayersError(f"{type(model).__name__} has no list of blocks to assign to stages; give another model")
    return [f"{path}.{index}" for path, length in lists.items() for index in range(length)]


def parent_of(path: str) -> str:
    """Return the module path of the list that a block is in."""
    return path.rpartition(".")[0]


def _block_lists(model: PreTrainedModel, is_list_of_blocks: Callable[[nn.ModuleList], bool]) -> dict[str, int]:
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        is_nested = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) and not is_nested and is_list_of_blocks(module):
            found[path] = len(module)
    return found


def _holds_blocks(model: PreTrainedModel) -> Callable[[nn.ModuleList], bool]:
    unsplit = set(model._no_split_modules or ())
    return lambda modules: all(
        isinstance(m, GradientCheckpointingLayer) or type(m).__name__ in unsplit for m in modules
    )


def _is_as_deep_as(model: PreTrainedModel) -> Callable[[nn.ModuleList], bool]:
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    return lambda modules: len(modules) == depth and _is_of_one_type(modules)


def _is_of_one_type(modules: nn.ModuleList) -> bool:
    return len({type(module) for module in modules}) == 1


@contextlib.contextmanager
def stubbed(blocks: Sequence[nn.Module], stub: Stub) -> Iterator[None]:
    """Context for one run of forward, in which calls of `blocks` go to `stub`. Paths and types of the modules stay.

    A block that is called several times is among `blocks` as often, or once; then all its calls have one index.
    """
    indices: dict[nn.Module, list[int]] = {}
    for index, block in enumerate(blocks):
        indices.setdefault(block, []).append(index)

    def forward_of(block: nn.Module) -> Callable[..., Any]:
        forward, calls = block.forward, itertools.cycle(indices[block])
        return lambda *args, **kwargs: stub(next(calls), forward, args, kwargs)

    try:
        for block in indices:
            block.__dict__["forward"] = forward_of(block)  # hides the method of the class
        yield
    finally:
        for block in indices:
            block.__dict__.pop("forward", None)


class Reached(Exception):  # noqa: N818  not an error: leaves forward at a block
    """Raised by a stub to leave forward; carries how the block was called."""

    def __init__(self, call: BlockCall) -> None:
        super().__init__()
        self.call = call


def unknown_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, without memory, that stands for a value of another rank: NaN if floating."""
    fill = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), fill, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
