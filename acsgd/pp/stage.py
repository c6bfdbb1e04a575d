"""One stage of the pipeline: its layers, and forward and backward of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from acsgd.dp.base import GradSync
from acsgd.shards.base import LayerShard, ModelFamily, State, Weight
from acsgd.shards.load import mix_seed

_UNASKED: Any = object()
"""In place of a context: None is one, of a model whose attention is causal by itself."""


class MicroBatch(NamedTuple):
    """Which micro-batch a stage works on. All that is random in it depends on these numbers alone."""

    step: int
    place: int
    """Among the micro-batches of this replica."""
    global_place: int
    """Among those of the global batch."""


class Stage:
    """The layers of one stage on one rank.

    layers: those of the stage, loaded into `model`, with their weights; sync: how replicas agree on them;
    targets: what the summed loss is divided by.
    Reseeds torch's global generators before each layer that may draw (dropout by seed, step, micro-batch, layer).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: ModelFamily,
        layers: Mapping[LayerShard, Sequence[Weight]],
        sync: GradSync,
        *,
        targets: int,
        seed: int,
    ) -> None:
        self.layers = layers
        self.shards = tuple(layers)
        self.weights = tuple(weight for weights in layers.values() for weight in weights)
        self.sync = sync
        self.model = model
        self._family = family
        self._targets = targets
        self._seed = seed
        self._random = has_dropout(model)
        self._live: dict[int, tuple[State, State]] = {}
        self._last_backward = False
        for weight in self.weights:
            weight.param.register_post_accumulate_grad_hook(self._hook(weight))

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self.shards[0].kind == "embed"

    @property
    def is_last(self) -> bool:
        """Whether it gives the loss."""
        return self.shards[-1].kind == "head"

    def forward(self, micro: MicroBatch, inputs: State, labels: Tensor | None = None) -> State:
        """Run the layers on one micro-batch and keep what backward needs.

        inputs: {"tokens": [B, T]}, or what the previous stage gave, in tensors of its own. Returns what travels on,
        or, of the last stage, {"loss": scalar}: the summed loss over `labels` [B, T], divided by `targets`.
        """
        for tensor in inputs.values():
            tensor.requires_grad_(tensor.is_floating_point())
        state, context = inputs, _UNASKED
        for shard in self.shards:
            if shard.kind == "block" and context is _UNASKED:
                context = self._family.context(self.model, state)
            if self._random:
                torch.manual_seed(mix_seed(self._seed, micro.step, micro.global_place, shard.index))
            state = self._family.call(self.model, shard, state, context)
        if labels is not None:
            state = {"loss": self._family.loss(state["logits"], labels) / self._targets}
        self._live[micro.place] = (inputs, state)
        return {name: tensor.detach() for name, tensor in state.items()}

    def backward(self, micro: int, grads: State | None, *, last: bool) -> State:
        """Run backward of a micro-batch, add to the gradients, and return those of its inputs.

        grads: of what forward returned; None for the last stage. last: no other backward follows in this step, so
        each gradient is complete as soon as it is made.
        """
        inputs, outputs = self._live.pop(micro)
        self._last_backward = last
        torch.autograd.backward(list(outputs.values()), None if grads is None else [grads[name] for name in outputs])
        self._last_backward = False
        return {name: x.grad for name, x in inputs.items() if x.grad is not None}

    def _hook(self, weight: Weight) -> Callable[[nn.Parameter], None]:
        def grad_made(param: nn.Parameter) -> None:
            if weight.master is not param:
                _accumulate_in_fp32(param, weight.master)
            self.sync.grad_made(weight, complete=self._last_backward)

        return grad_made


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether the model's config asks for dropout of any kind."""
    options = model.config.to_dict().items()
    return any(value for key, value in options if "drop" in key and isinstance(value, float))


def _accumulate_in_fp32(param: nn.Parameter, master: nn.Parameter) -> None:
    """Move a narrow gradient into the master's: sums over micro-batches lose bits in bf16."""
    assert param.grad is not None
    if master.grad is None:
        master.grad = param.grad.float()
    else:
        master.grad += param.grad
    param.grad = None
