"""One stage of the pipeline: its layers, and forward and backward of one micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from acsgd.dp.sync import GradSync
from acsgd.seeds import mix_seed
from acsgd.shards.layers import LayerShard, ModelFamily, State
from acsgd.shards.weights import Weight

_UNASKED: Any = object()
"""In place of a context: None is one, of a model whose attention is causal by itself."""
_OTHER_HEADS = ("summary_", "classifier_")
"""How options of a config begin that are not those of a language model: GPT-2's summary_first_dropout is 0.1."""


class MicroBatch(NamedTuple):
    """Which micro-batch a stage works on. All that is random in it depends on these numbers alone."""

    step: int
    local_index: int
    """Position among the micro-batches of this replica in this step."""
    global_index: int
    """Position among the micro-batches of the global batch."""
    sample_ids: tuple[int, ...]
    """Of its B sequences."""


class Stage:
    """The layers of one stage on one rank.

    layers: those of the stage, loaded into `model`, with their weights; sync: how replicas agree on them;
    targets: what the summed loss is divided by. recompute: keep only the input of each layer for backward, and
    compute the rest again (Chen et al. 2016, arXiv:1604.06174); the gradients stay the same, bit for bit.

    Reseeds torch's global generators before each layer that may draw: dropout depends on (seed, step, micro-batch,
    layer) or, with mask_per_sample, on (seed, sample, layer). Since one seed gives the masks of all that goes through a
    layer together, training with dropout then runs sequence by sequence, as if each were a micro-batch of its own.
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
        recompute: bool = False,
        mask_per_sample: bool = False,
    ) -> None:
        self.layers = layers
        self.shards = tuple(layers)
        self.weights = tuple(weight for weights in layers.values() for weight in weights)
        self.sync = sync
        self.model = model
        self._family = family
        self._targets = targets
        self._seed = seed
        self._recompute = recompute
        self._random = has_dropout(model)
        self._by_sequence = self._random and mask_per_sample
        self._live: dict[int, list[_Pass]] = {}
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
        passes = [self._pass(part, rows, inputs, labels) for part, rows in self._parts(micro)]
        self._live[micro.local_index] = passes
        return {name: tensor.detach() for name, tensor in _join([each.outputs for each in passes]).items()}

    def backward(self, micro: int, grads: State | None, *, last: bool, scale: float = 1.0) -> State:
        """Run backward of a micro-batch, add to the gradients, and return those of its inputs.

        grads: of what forward returned; None for the last stage, whose loss gets `scale` as its gradient. last: no
        other backward follows in this step, so each gradient is complete as soon as it is made.
        """
        passes = self._live.pop(micro)
        for each in passes:
            self._last_backward = last and each is passes[-1]
            given = [
                torch.full_like(made, scale) if grads is None else grads[name][each.rows]
                for name, made in each.outputs.items()
            ]
            torch.autograd.backward(list(each.outputs.values()), given)
        self._last_backward = False
        return _join([{name: x.grad for name, x in each.inputs.items() if x.grad is not None} for each in passes])

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Turn dropout off within; `evaluate` belongs in here."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    @torch.no_grad()  # not inference_mode: the links' buffers, which training uses too, may be made here
    def evaluate(self, micro: MicroBatch, inputs: State, labels: Tensor | None = None) -> State:
        """Run the layers on one micro-batch and keep nothing.

        Takes and returns what `forward` does, except that {"loss": scalar} is not divided by anything.
        """
        return self._through_layers(micro, inputs, labels)

    def _parts(self, micro: MicroBatch) -> list[tuple[MicroBatch, slice]]:
        """Return what of a micro-batch goes through the layers together, and in which rows of its tensors that is."""
        if not self._by_sequence:
            return [(micro, slice(None))]
        return [(micro._replace(sample_ids=(id_,)), slice(row, row + 1)) for row, id_ in enumerate(micro.sample_ids)]

    def _pass(self, micro: MicroBatch, rows: slice, inputs: State, labels: Tensor | None) -> _Pass:
        """Run the layers on some rows of `inputs` and `labels`."""
        inputs = {name: tensor[rows] for name, tensor in inputs.items()}
        for tensor in inputs.values():
            tensor.requires_grad_(tensor.is_floating_point())
        if labels is None:
            return _Pass(rows, inputs, self._through_layers(micro, inputs, None))
        loss = self._through_layers(micro, inputs, labels[rows])["loss"]
        return _Pass(rows, inputs, {"loss": loss / self._targets})

    def _through_layers(self, micro: MicroBatch, state: State, labels: Tensor | None) -> State:
        context = _UNASKED
        for shard in self.shards:
            if shard.kind == "block" and context is _UNASKED:
                context = self._family.context(self.model, state)
            layer = self._layer(shard, micro, context, labels)
            if self._recompute:
                state = checkpoint(layer, state, use_reentrant=False, preserve_rng_state=False)
            else:
                state = layer(state)
        return state

    def _layer(
        self, shard: LayerShard, micro: MicroBatch, context: Any, labels: Tensor | None
    ) -> Callable[[State], State]:
        """Return a layer as a function that gives the same each time it is called; the head includes the loss.

        So no logits are kept where layers are recomputed: [B, T, V] in fp32 outweigh many blocks.
        """

        def run(state: State) -> State:
            if self._random and self.model.training:
                torch.manual_seed(self._seed_of(micro, shard))
            made = self._family.call(self.model, shard, state, context)
            if shard.kind == "head" and labels is not None:
                return {"loss": self._family.loss(made["logits"], labels)}
            return made

        return run

    def _seed_of(self, micro: MicroBatch, shard: LayerShard) -> int:
        if self._by_sequence:  # three numbers, so their hash is unlike that of any four
            (sample_id,) = micro.sample_ids
            return mix_seed(self._seed, sample_id, shard.index)
        return mix_seed(self._seed, micro.step, micro.global_index, shard.index)

    def _hook(self, weight: Weight) -> Callable[[nn.Parameter], None]:
        def grad_ready(param: nn.Parameter) -> None:
            if weight.master is not param:
                _accumulate_in_fp32(param, weight.master)
            self.sync.grad_ready(weight, is_final=self._last_backward)

        return grad_ready


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether the model's config asks for dropout of any kind."""
    options = {key: value for key, value in model.config.to_dict().items() if not key.startswith(_OTHER_HEADS)}
    return any(value for key, value in options.items() if "drop" in key and isinstance(value, float))


class _Pass(NamedTuple):
    """What backward needs of sequences that went through the layers together."""

    rows: slice
    """Where they are in the micro-batch."""
    inputs: State
    """Leaves, which get the gradients."""
    outputs: State


def _join(parts: Sequence[State]) -> State:
    """Put the rows of a micro-batch together again; losses are summed."""
    if len(parts) == 1:
        return parts[0]
    by_name = {name: [part[name] for part in parts] for name in parts[0]}
    return {name: torch.cat(rows) if rows[0].dim() else torch.stack(rows).sum() for name, rows in by_name.items()}


def _accumulate_in_fp32(param: nn.Parameter, master: nn.Parameter) -> None:
    """Move a narrow gradient into the master's: sums over micro-batches lose bits in bf16."""
    assert param.grad is not None
    if master.grad is None:
        master.grad = param.grad.float()
    else:
        master.grad += param.grad
    param.grad = None
