"""One stage of the pipeline: forward and backward of its layers on one micro-batch."""

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
from acsgd.streams import seed_generators

_NOT_BUILT: Any = object()
"""Marks a context that is not built yet; None is a valid context."""
_OTHER_HEADS = ("summary_", "classifier_")
"""Prefixes of config options that do not concern language models: GPT-2's summary_first_dropout is 0.1."""


class MicroBatch(NamedTuple):
    """Identity of a micro-batch. Its randomness depends on these numbers and the seed alone."""

    step: int
    local_index: int
    """Position among the micro-batches of this replica in this step."""
    global_index: int
    """Position among the micro-batches of the global batch."""
    sample_ids: tuple[int, ...]
    """One per sequence, B in all."""


class Stage:
    """The layers of one stage on one rank.

    Args:
        layers: the layers of the stage, loaded into `model`, each with its weights
        sync: gradient sync of these weights over the replicas
        targets: divisor of the summed loss
        recompute: activation checkpointing per layer (Chen et al. 2016, arXiv:1604.06174): keep only the input of each
            layer and recompute the rest in the backward; gradients are the same, bit for bit
        mask_per_sample: draw dropout masks from (seed, sample, layer) instead of (seed, step, micro-batch, layer)

    Reseeds torch's global generators before each layer if the model has dropout. With mask_per_sample, training with
    dropout runs one sequence at a time, because one seed determines the masks of all sequences in one call.
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
        self._per_sequence = self._random and mask_per_sample
        self._in_flight: dict[int, list[_Pass]] = {}  # by local index of the micro-batch
        self._last_backward = False
        for weight in self.weights:
            weight.param.register_post_accumulate_grad_hook(self._hook(weight))

    @property
    def is_first(self) -> bool:
        """Whether the stage starts with the embedding."""
        return self.shards[0].kind == "embed"

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with the head and computes the loss."""
        return self.shards[-1].kind == "head"

    def forward(self, micro: MicroBatch, inputs: State, labels: Tensor | None = None) -> State:
        """Run the layers on one micro-batch and keep what its backward needs.

        inputs: {"tokens": [B, T]} for the first stage, else the outputs of the previous stage in separate tensors.
        Returns the inputs of the next stage; the last stage returns {"loss": scalar}, the loss summed over `labels`
        [B, T] and divided by `targets`.
        """
        passes = [self._run_pass(part, rows, inputs, labels) for part, rows in self._parts(micro)]
        self._in_flight[micro.local_index] = passes
        return {name: tensor.detach() for name, tensor in _join([each.outputs for each in passes]).items()}

    def backward(self, micro: int, grads: State | None, *, last: bool, scale: float = 1.0) -> State:
        """Run the backward of a micro-batch: accumulate gradients of the weights, return those of the inputs.

        grads: gradients of the outputs; None for the last stage, whose loss gets the gradient `scale`. last: whether
        this is the last backward of the step, after which the gradients are final.
        """
        passes = self._in_flight.pop(micro)
        for each in passes:
            self._last_backward = last and each is passes[-1]
            output_grads = [
                torch.full_like(output, scale) if grads is None else grads[name][each.rows]
                for name, output in each.outputs.items()
            ]
            torch.autograd.backward(list(each.outputs.values()), output_grads)
        self._last_backward = False
        return _join([{name: x.grad for name, x in each.inputs.items() if x.grad is not None} for each in passes])

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which dropout is off, for `evaluate`."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    @torch.no_grad()  # not inference_mode: buffers of links that training uses, too, may be created here
    def evaluate(self, micro: MicroBatch, inputs: State, labels: Tensor | None = None) -> State:
        """Run the layers on one micro-batch without a backward.

        Arguments and result as in `forward`, but the loss is not divided by `targets`.
        """
        return self._run_layers(micro, inputs, labels)

    def _parts(self, micro: MicroBatch) -> list[tuple[MicroBatch, slice]]:
        """Split a micro-batch into the parts that run together, each with its rows in the tensors."""
        if not self._per_sequence:
            return [(micro, slice(None))]
        return [(micro._replace(sample_ids=(id_,)), slice(row, row + 1)) for row, id_ in enumerate(micro.sample_ids)]

    def _run_pass(self, micro: MicroBatch, rows: slice, inputs: State, labels: Tensor | None) -> _Pass:
        """Run the layers on some rows of `inputs` and `labels`."""
        inputs = {name: tensor[rows] for name, tensor in inputs.items()}
        for tensor in inputs.values():
            tensor.requires_grad_(tensor.is_floating_point())
        if labels is None:
            return _Pass(rows, inputs, self._run_layers(micro, inputs, None))
        loss = self._run_layers(micro, inputs, labels[rows])["loss"]
        return _Pass(rows, inputs, {"loss": loss / self._targets})

    def _run_layers(self, micro: MicroBatch, state: State, labels: Tensor | None) -> State:
        context = _NOT_BUILT
        for shard in self.shards:
            if shard.kind == "block" and context is _NOT_BUILT:
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
        """Return a layer as a function of its inputs alone, as recomputation needs; the head includes the loss.

        So recomputation does not keep the logits: [B, T, V] in fp32 is larger than many blocks.
        """

        def run(state: State) -> State:
            if self._random and self.model.training:
                seed_generators(self._seed_of(micro, shard))
            outputs = self._family.call(self.model, shard, state, context)
            if shard.kind == "head" and labels is not None:
                return {"loss": self._family.loss(outputs["logits"], labels)}
            return outputs

        return run

    def _seed_of(self, micro: MicroBatch, shard: LayerShard) -> int:
        if self._per_sequence:  # three numbers, so never the seed of another four
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
    """Whether any dropout probability of the model's config is above zero."""
    options = {key: value for key, value in model.config.to_dict().items() if not key.startswith(_OTHER_HEADS)}
    return any(value for key, value in options.items() if "drop" in key and isinstance(value, float))


class _Pass(NamedTuple):
    """Tensors that the backward of a part of a micro-batch needs."""

    rows: slice
    """Rows of the part in the micro-batch."""
    inputs: State
    """Autograd leaves that receive gradients."""
    outputs: State


def _join(parts: Sequence[State]) -> State:
    """Concatenate the rows of the parts of a micro-batch; sum losses."""
    if len(parts) == 1:
        return parts[0]
    by_name = {name: [part[name] for part in parts] for name in parts[0]}
    return {name: torch.cat(rows) if rows[0].dim() else torch.stack(rows).sum() for name, rows in by_name.items()}


def _accumulate_in_fp32(param: nn.Parameter, master: nn.Parameter) -> None:
    """Add a 16-bit gradient to the master's and clear it: sums over micro-batches in 16 bits would lose precision."""
    assert param.grad is not None
    if master.grad is None:
        master.grad = param.grad.float()
    else:
        master.grad += param.grad
    param.grad = None
