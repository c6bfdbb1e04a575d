"""Run a model layer by layer, of which some layers are on this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from acsgd.layers.capture import BlockCall, Reached, stubbed, unknown_like
from acsgd.layers.description import HIDDEN, LOGITS, ModelLayers, Replicated
from acsgd.layers.masks import masked
from acsgd.layers.stand_ins import compute_relative_bias

State = dict[str, Tensor]
"""Tensors between two layers, by name."""

Inputs = Mapping[str, Tensor]
"""Inputs of the model for one micro-batch, by name, and DOCUMENTS where sequences hold several."""

Context = Mapping[int, BlockCall]
"""How forward calls the blocks of this rank for one micro-batch, by position among all blocks."""


class ComposedModel:
    """Layers of a model, run one at a time through the model's own forward.

    model: its parameters on this rank are loaded, those of other ranks outside of blocks are stand-ins
    (`fill_with_stand_ins`); the model's blocks on other ranks may be on the meta device.
    """

    def __init__(self, model: PreTrainedModel, layers: ModelLayers) -> None:
        self.model = model
        self.layers = layers.layers
        self._has_replicated = any(layer.replicated for layer in layers.layers)
        self._blocks = [model.get_submodule(path) for path in layers.blocks]

    def context(self, inputs: Inputs, layers: range) -> Context:
        """Record the arguments with which forward calls the blocks of `layers`: masks, positions, rotary tables.

        Gradients of replicated tensors flow through the context into the parameters of this rank.
        """
        calls: dict[int, BlockCall] = {}
        blocks = range(max(layers.start - 1, 0), min(layers.stop - 1, len(self._blocks)))
        if not len(blocks):
            return calls

        def stub(index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index in blocks:
                calls[index] = BlockCall.of(self._blocks[index], args, kwargs)
            if index == blocks[-1]:
                raise Reached(calls[index])
            return self._skip(index, args, kwargs)

        needs_grad = torch.is_grad_enabled() and self._has_replicated
        with torch.set_grad_enabled(needs_grad), stubbed(self._blocks, stub), contextlib.suppress(Reached):
            self._forward(inputs)
        with torch.set_grad_enabled(needs_grad):
            return self._complete(calls)

    def _complete(self, calls: Context) -> Context:
        """Return the calls with the replicated tensors that blocks of other stages would have computed."""
        computed: dict[Replicated, Tensor | None] = {}
        complete = {}
        for index, call in calls.items():
            replicated = self.layers[index + 1].replicated
            made = {name: how for name, how in replicated.items() if how.kind != "forward"}
            for how in made.values():
                if how not in computed:  # blocks that share a table have hidden states of one length
                    computed[how] = compute_relative_bias(self.model, how, call)
            complete[index] = call.replace({name: computed[how] for name, how in made.items()}) if made else call
        return complete

    def call(self, index: int, state: State, inputs: Inputs, context: Context) -> State:
        """Run layer `index`: return the inputs of the next layer, or {"logits"} for the last layer."""
        if index == 0:
            return self._run_first(inputs)
        if index == len(self.layers) - 1:
            return self._run_last(state, inputs)
        if self.layers[index].runs_forward:
            return self._run_with_forward(index, state, inputs, context[index - 1])
        args, kwargs = context[index - 1].replace(state).arguments()
        return self._outputs(index, state, self._blocks[index - 1](*args, **kwargs), {})

    def _run_first(self, inputs: Inputs) -> State:
        """Run forward up to the call of the first block."""

        def stub(index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise Reached(BlockCall.of(self._blocks[index], args, kwargs))

        try:
            with stubbed(self._blocks, stub):
                self._forward(inputs)
        except Reached as reached:
            tensors = reached.call.tensors()
            return {name: tensors[name] for name in self.layers[1].inputs}
        raise AssertionError("forward calls no block")

    def _run_last(self, state: State, inputs: Inputs) -> State:
        """Run forward with the hidden state in place of the last block's output; all before it runs on stand-ins."""
        is_training = torch.is_grad_enabled()
        last = len(self._blocks) - 1

        def stub(index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index < last:
                return self._skip(index, args, kwargs)
            torch.set_grad_enabled(is_training)
            return self._skip(index, args, kwargs, hidden=state[HIDDEN])

        with torch.no_grad(), stubbed(self._blocks, stub):
            return {LOGITS: self._forward(inputs).logits}

    def _run_with_forward(self, index: int, state: State, inputs: Inputs, recorded: BlockCall) -> State:
        """Run a block and the model's code up to the call of the next block."""
        is_training, block = torch.is_grad_enabled(), index - 1
        returned: Any = None

        def stub(position: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal returned
            if position == block + 1:
                raise Reached(BlockCall.of(self._blocks[position], args, kwargs))
            if position < block:
                return self._skip(position, args, kwargs)
            torch.set_grad_enabled(is_training)
            call = BlockCall.of(self._blocks[block], args, kwargs)
            hidden = _write_hidden(call, state[HIDDEN])
            args, kwargs = recorded.replace(state | {HIDDEN: hidden}).arguments()
            returned = forward(*args, **kwargs)
            return returned

        try:
            with torch.no_grad(), stubbed(self._blocks, stub):
                self._forward(inputs)
        except Reached as reached:
            return self._outputs(index, state, returned, reached.call.tensors())
        raise AssertionError("forward calls no block after this one")

    def _outputs(self, index: int, state: State, returned: Any, made: Mapping[str, Tensor]) -> State:
        """Return the outputs of a block's layer: from what the block returned, its inputs, and what forward made."""
        leaves = tree_flatten(returned)[0]
        outputs = {}
        for name, origin in self.layers[index].origins.items():
            match origin.kind:
                case "output":
                    outputs[name] = leaves[origin.index]
                case "input":
                    outputs[name] = state[name]
                case "forward":
                    outputs[name] = made[name]
        return outputs

    def _skip(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None = None) -> Any:
        """Return what a block that is not run would return, with stand-ins in place of tensors except the hidden state.

        hidden: in place of the hidden state that enters the block.
        """
        if hidden is None:
            hidden = BlockCall.of(self._blocks[index], args, kwargs).hidden
        layer = self.layers[index + 1]
        assert layer.outputs is not None
        others = (unknown_like(hidden[:0].sum()) if leaf == "tensor" else leaf for leaf in layer.outputs[1:])
        leaves = (hidden, *others)
        match layer.returns:
            case "tensor":
                return hidden
            case "list":
                return list(leaves)
        return leaves

    def _forward(self, inputs: Inputs) -> Any:
        with masked(self.model, inputs) as arguments:
            return self.model(**arguments, use_cache=False)


def _write_hidden(call: BlockCall, hidden: Tensor) -> Tensor:
    """Write the hidden state into the tensor that forward passes to the block, since forward may use it again.

    Returns that tensor, or `hidden` if it cannot be written; then a second use gives NaN.
    """
    target = call.hidden
    if target.requires_grad or target._is_view() or 0 in target.stride():
        return hidden
    return target.copy_(hidden)
