"""Run a model layer by layer, of which some layers are on this rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from acsgd.layers.capture import BlockCall, Reached, stubbed, unknown_like
from acsgd.layers.description import HIDDEN, LOGITS, Head, ModelLayers, Replicated
from acsgd.layers.masks import masked
from acsgd.layers.stand_ins import compute_relative_bias
from acsgd.streams import generator_states, restore_generators

COMPILE: Mapping[str, Any] = {"options": {"fallback_random": True}}
"""Arguments of torch.compile. Random numbers are those of torch's generators, so that seeds give the same masks."""

State = dict[str, Tensor]
"""Tensors between two layers, by name."""

Inputs = Mapping[str, Tensor]
"""Inputs of the model for one micro-batch, by name, and DOCUMENTS where sequences hold several."""

Context = Mapping[int, BlockCall]
"""How forward calls the blocks of this rank for one micro-batch, by position among all blocks."""


class ComposedModel:
    """Layers of a model, run one at a time through the model's own forward.

    model: its parameters on this rank are loaded, those of other ranks outside of blocks are stand-ins
    (`fill_with_stand_ins`); the model's blocks on other ranks may be on the meta device. compiles: whether torch
    compiles each block that runs by itself.
    """

    def __init__(self, model: PreTrainedModel, layers: ModelLayers, *, compiles: bool = False) -> None:
        self.model = model
        self.layers = layers.layers
        self._has_replicated = any(layer.replicated for layer in layers.layers)
        self._blocks = [model.get_submodule(path) for path in layers.blocks]
        self._run_block = [torch.compile(block, **COMPILE) if compiles else block for block in self._blocks]
        for module in model.modules():
            if isinstance(module, PreTrainedModel):  # advice for which each forward would wait for the device
                module.warn_if_padding_and_no_attention_mask = _ignore  # type: ignore[method-assign]
        self._head: nn.Module | None = model.get_output_embeddings()
        self._head_is_last = False
        """Whether it is known that forward returns what the module of the head returns."""

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Context in which no block is compiled, so that hooks of the modules in it are called."""
        compiled, self._run_block = self._run_block, [*self._blocks]
        try:
            yield
        finally:
            self._run_block = compiled

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
            return self.skip(index, args, kwargs)

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
            return {LOGITS: self._run_last(inputs, state[HIDDEN])}
        if self.layers[index].runs_forward:
            return self._run_with_forward(index, state, inputs, context[index - 1])
        args, kwargs = context[index - 1].replace(state).arguments()
        return self._outputs(index, state, self._run_block[index - 1](*args, **kwargs), {})

    def call_to_head(self, state: State, inputs: Inputs) -> tuple[Tensor, Head]:
        """Run the last layer up to its head. Returns the hidden states that enter the head, and the head.

        The head is the module of the output embeddings, with the model's code after it, such as a soft cap of the
        logits. If forward calls no such module after the last block, as in classifiers, the logits take the place of
        the hidden states, and the head is the identity.
        """

        def stop(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise _HeadReached(args[0])

        try:
            return self._run_last(inputs, state[HIDDEN], stop), _identity
        except _HeadReached as reached:
            return reached.hidden, functools.partial(self._run_head, inputs)

    def _run_head(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states. Runs forward on stand-ins for its code after the head, if it has any."""
        assert self._head is not None
        if self._head_is_last:
            return cast("Tensor", self._head(hidden))
        generators, made = generator_states(), None

        def replace(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal made
            restore_generators(generators)  # the code before has run already, with its random numbers
            made = forward(hidden, *args[1:], **kwargs)
            return made

        logits = self._run_last(inputs, None, replace)
        self._head_is_last = logits is made
        return logits

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

    def _run_last(self, inputs: Inputs, hidden: Tensor | None, at_head: Callable[..., Any] | None = None) -> Tensor:
        """Run forward with the hidden state in place of the last block's output; all before it runs on stand-ins.

        hidden: None = on stand-ins up to the head. at_head: called in place of the module of the head with its forward
        and the arguments. Returns the logits.
        """
        is_training = torch.is_grad_enabled()
        last, is_after = len(self._blocks) - 1, False

        def stub(index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal is_after
            if index > last and not is_after:  # such as an embedding that is the head, too
                return forward(*args, **kwargs)
            if index > last:
                torch.set_grad_enabled(is_training)
                assert at_head is not None
                return at_head(forward, args, kwargs)
            is_after = index == last
            if hidden is not None and is_after:
                torch.set_grad_enabled(is_training)
            return self.skip(index, args, kwargs, hidden=hidden if is_after else None)

        modules = self._blocks if at_head is None or self._head is None else [*self._blocks, self._head]
        with torch.no_grad(), stubbed(modules, stub):
            return cast("Tensor", self._forward(inputs).logits)

    def _run_with_forward(self, index: int, state: State, inputs: Inputs, recorded: BlockCall) -> State:
        """Run a block and the model's code up to the call of the next block."""
        is_training, block = torch.is_grad_enabled(), index - 1
        returned: Any = None

        def stub(position: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal returned
            if position == block + 1:
                raise Reached(BlockCall.of(self._blocks[position], args, kwargs))
            if position < block:
                return self.skip(position, args, kwargs)
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

    def skip(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None = None) -> Any:
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


class _HeadReached(Exception):  # noqa: N818  not an error: leaves forward at the head
    """Raised by a stub to leave forward; carries what enters the head."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _ignore(*_: Any) -> None:
    """Do nothing."""


def _identity(logits: Tensor) -> Tensor:
    return logits


def _write_hidden(call: BlockCall, hidden: Tensor) -> Tensor:
    """Write the hidden state into the tensor that forward passes to the block, since forward may use it again.

    Returns that tensor, or `hidden` if it cannot be written; then a second use gives NaN.
    """
    target = call.hidden
    if target.requires_grad or target._is_view() or 0 in target.stride():
        return hidden
    return target.copy_(hidden)
