"""Activation recomputation (Chen et al. 2016, arXiv:1604.06174): what model.recompute names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acsgd.streams import generator_states, restore_generators


class Recompute(NamedTuple):
    """What backward computes again instead of keeping it. Gradients are the same, bit for bit."""

    layers: int = 0
    """Number of consecutive layers of a stage of which only the first one's inputs are kept; 0 = all is kept."""
    attention: bool = False
    """Whether only the input of each attention module is kept."""

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Parse model.recompute. Raises ValueError."""
        if text in ("none", "layers", "attention"):
            return cls(int(text == "layers"), text == "attention")
        if (every := re.fullmatch(r"every:([1-9]\d{0,4})", text)) is None:
            raise ValueError(
                f'model.recompute="{text}" is unknown; use none, attention, layers, or every:2 for groups of 2 layers'
            )
        return cls(int(every[1]))


KEEP_ALL = Recompute()


def recompute(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function whose backward runs it again. `run` seeds torch's generators itself, if it reads them."""
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def attention_modules(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules of a block that have "Attention" in the name of their class."""
    for child in block.children():
        if "attention" in type(child).__name__.lower():
            yield child
        else:
            yield from attention_modules(child)


def check_attention(blocks: Iterable[nn.Module]) -> None:
    """Raise ValueError if no block has an attention module."""
    if not any(True for block in blocks for _ in attention_modules(block)):
        raise ValueError(
            "model.recompute=attention: the blocks of the model have no module that is called Attention; use "
            "--model.recompute layers"
        )


def recompute_attention(block: nn.Module, *, is_random: bool) -> None:
    """Let the attention modules of a block keep only their inputs for backward, in place.

    is_random: whether they may read torch's generators.
    """
    for module in attention_modules(block):
        forward = type(module).forward.__get__(module)
        module.forward = functools.partial(_recompute_forward, forward, is_random)


def _recompute_forward(forward: Callable[..., Any], is_random: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return recompute(_with_same_random_numbers(forward) if is_random else forward, *args, **kwargs)


def _with_same_random_numbers(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reads the same random numbers in each call.

    torch's checkpoint restores those of a GPU only if it is that of a positional argument.
    """
    states: list[Tensor] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if states:
            restore_generators(states)
        else:
            states.extend(generator_states())
        return forward(*args, **kwargs)

    return run
