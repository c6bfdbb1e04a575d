"""A model that generates in stages: each runs transformers' own generate, with its blocks alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Cache, LogitsProcessor, PreTrainedModel, StoppingCriteria

from acsgd.layers.capture import BlockCall, stubbed
from acsgd.layers.composed import ComposedModel
from acsgd.layers.description import HIDDEN, ModelLayers
from acsgd.shards.plan import StageSpec, plan


class Wire(Protocol):
    """Messages of a stage for one batch of prompts. Hidden states are [B, T, H], tokens int64 [B]."""

    def begin(self, hidden: Tensor) -> None:
        """Expect the messages of one call of the model. hidden: has the shape, dtype and device of what is received."""
        ...

    def receive_hidden(self) -> Tensor:
        """Return the output of the previous stage."""
        ...

    def send_hidden(self, hidden: Tensor) -> None:
        """Send the output of this stage to the next one."""
        ...

    def receive_tokens(self) -> Tensor:
        """Return the newest token of each text, from the last stage."""
        ...

    def send_tokens(self, ids: Tensor) -> None:
        """Send the newest token of each text to all other stages."""
        ...


def divide(model: PreTrainedModel, layers: ModelLayers, stages: int) -> list[StageSpec]:
    """Divide a model into stages with about as many parameters each, and a block at least.

    Raises ValueError if it has fewer blocks, or hands more than the hidden state from one block to the next.
    """
    blocks = len(layers.blocks)
    if stages > blocks:
        raise ValueError(f"the model has {blocks} blocks, too few for {stages} processes; start at most {blocks}")
    sizes = [float(sum(model.get_parameter(key).numel() for key in each.parameters)) for each in layers.layers]
    sizes[1] += sizes[0]
    sizes[-2] += sizes[-1]
    specs = [StageSpec(first and first + 1, last + 1 + (last == blocks)) for first, last in plan(sizes[1:-1], stages)]
    for spec in specs[1:]:
        if others := layers.boundary(spec.first).keys() - {HIDDEN}:
            raise ValueError(
                f"{type(model).__name__} generates in one process, since its blocks hand on more than the hidden state "
                f"({', '.join(sorted(others))}); start it without torchrun"
            )
    return specs


class StageModel:
    """A model of which a stage runs its own layers; the model's forward skips the blocks of other stages.

    Every stage calls the model, as transformers' generate does, with the same ids. The hidden state comes from the
    previous stage at the first block of its own, and goes to the next one after the last. Each block that is skipped
    records one number per token in the cache in place of its keys, from which transformers takes positions and
    masks. The last stage chooses the tokens and sends them to all.

    model: with the parameters of the stage, and stand-ins in place of others outside of blocks.
    """

    def __init__(self, model: PreTrainedModel, layers: ModelLayers, stage: StageSpec) -> None:
        self._model = model
        self._composed = ComposedModel(model, layers)
        self._blocks = [model.get_submodule(path) for path in layers.blocks]
        self._own = range(max(stage.first - 1, 0), min(stage.last - 1, len(self._blocks)))
        self._is_last = stage.last == len(layers.layers)
        self._current = threading.local()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the model runs the blocks of this stage alone, in any thread that has called `arguments`."""
        head = self._model.get_output_embeddings()
        modules = self._blocks if self._is_last or head is None else [*self._blocks, head]
        with stubbed(modules, self._call):
            yield

    def arguments(self, wire: Wire) -> dict[str, Any]:
        """Return arguments of transformers' generate for a batch, which this thread generates next."""
        self._current.wire = wire
        if self._is_last:
            return {"stopping_criteria": [_SendTokens(wire)]}
        return {"logits_processor": [_ReceiveTokens(wire)], "do_sample": False}

    def _call(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block of this stage; skip one of another stage, or the head."""
        if index == len(self._blocks):
            hidden, vocabulary = args[0], self._model.config.get_text_config().vocab_size
            return hidden[..., :1].expand(*hidden.shape[:-1], vocabulary)
        wire: Wire = self._current.wire
        call = BlockCall.of(self._blocks[index], args, kwargs)
        if index == 0:
            wire.begin(call.hidden)
        if index not in self._own:
            _record_tokens(call, index)
            return self._composed.skip(index, args, kwargs)
        if index == self._own.start and index:
            args, kwargs = call.replace({HIDDEN: wire.receive_hidden()}).arguments()
        returned = forward(*args, **kwargs)
        if index == self._own.stop - 1 and not self._is_last:
            wire.send_hidden(tree_leaves(returned)[0])
        return returned


def _record_tokens(call: BlockCall, index: int) -> None:
    """Let the cache count the tokens of a call of the block with an index, its position in the cache, too."""
    cache = next((leaf for leaf in call.leaves if isinstance(leaf, Cache)), None)
    if cache is not None:
        batch, length = call.hidden.shape[:2]
        counted = call.hidden.new_zeros(()).expand(batch, 1, length, 1)
        cache.update(counted, counted, index)


class _SendTokens(StoppingCriteria):
    """Sends each new token; ends no text."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self._wire.send_tokens(input_ids[:, -1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _ReceiveTokens(LogitsProcessor):
    """Makes the token that the last stage has chosen the most probable one."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        ids = self._wire.receive_tokens().to(scores.device)
        return torch.zeros_like(scores).scatter(1, ids[:, None], 1)
