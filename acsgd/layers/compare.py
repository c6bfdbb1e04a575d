"""Comparison of a model run layer by layer, in stages, with the whole model, in one process: outputs and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from acsgd.layers.capture import stubbed
from acsgd.layers.composed import ComposedModel, Context, State
from acsgd.layers.description import LOGITS, LayersError, ModelLayers
from acsgd.layers.masks import masked
from acsgd.layers.skeleton import fill_with_stand_ins, parameter_names, set_buffer, set_parameter, set_tied_parameter
from acsgd.streams import seed_generators

TOLERANCE = 1e-5
"""Largest difference of an output or a gradient, relative to its largest absolute value, or to 1."""

InputTensors = dict[str, Tensor]
"""Inputs of a model by name."""


class ComparedStages:
    """A whole model, and its stages, which take turns in one skeleton, each with its own parameters."""

    def __init__(self, whole: PreTrainedModel, skeleton: PreTrainedModel, layers: ModelLayers) -> None:
        """whole: with weights; skeleton: a new model of the same config, without weights."""
        self.whole = whole
        self.layers = layers
        self.composed = ComposedModel(skeleton, layers)
        self._skeleton = skeleton
        self._names = parameter_names(skeleton)
        self._absent = dict(skeleton.named_parameters(remove_duplicate=False))
        self._initial = {name: skeleton.get_buffer(name).clone() for spec in layers.layers for name in spec.buffers}

    def run_whole(self, batch: InputTensors) -> Tensor:
        """Run forward of the whole model. Random numbers, of routers for example, have a seed per layer."""
        blocks = [self.whole.get_submodule(path) for path in self.layers.blocks]

        def stub(index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seed_generators(index + 1)
            returned = forward(*args, **kwargs)
            if index == len(blocks) - 1:
                seed_generators(index + 2)
            return returned

        with torch.random.fork_rng(devices=[]), stubbed(blocks, stub), masked(self.whole, batch) as arguments:
            seed_generators(0)
            return self.whole(**arguments, use_cache=False).logits

    def load(self, stage: range) -> dict[str, nn.Parameter]:
        """Load the parameters and stored buffers of the layers of a stage alone; return the parameters by name.

        The buffers of the last layer are loaded in every stage, as in a run: those outside of blocks are among them.
        """
        values = dict(self.whole.named_parameters())
        specs = [self.layers.layers[index] for index in stage]
        for name, param in self._absent.items():
            set_parameter(self._skeleton, name, param)
        own = {name: nn.Parameter(values[name].detach()) for spec in specs for name in spec.parameters}
        for name, param in own.items():
            set_tied_parameter(self._skeleton, self._names[name], param)
        fill_with_stand_ins(self._skeleton, self.layers.blocks, torch.device("cpu"), self._skeleton.dtype)
        stored = {name for spec in (*specs, self.layers.layers[-1]) for name in spec.buffers}
        for name, initial in self._initial.items():
            buffer = self.whole.get_buffer(name) if name in stored else initial
            set_buffer(self._skeleton, name, buffer.clone())  # backward of earlier stages may need theirs
        return own


def compare(stages: ComparedStages, batch: InputTensors, splits: Sequence[Sequence[int]], where: str) -> float:
    """Compare outputs and gradients for one batch; return the largest relative difference.

    splits: divisions into stages, each by the first layers of the stages. Raises LayersError that names the tensor.
    """
    whole, count = stages.whole, len(stages.layers.layers)
    whole.zero_grad()
    logits = stages.run_whole(batch)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    largest = 0.0
    for starts in splits:
        ranges = [range(first, stop) for first, stop in itertools.pairwise([*starts, count])]
        with torch.random.fork_rng(devices=[]):
            composed, gradients = _run_stages(stages, ranges, batch, weights)
        largest = max(largest, _difference(composed, logits, f"the output for {where}"))
        for name, param in whole.named_parameters():
            what = f"the gradient of {name} for {where}"
            largest = max(largest, _difference(gradients.get(name), param.grad, what))
    return largest


def _run_layer(composed: ComposedModel, index: int, state: State, batch: InputTensors, context: Context) -> State:
    """Run a layer as a stage does."""
    if index < len(composed.layers) - 1:
        return composed.call(index, state, batch, context)
    hidden, head = composed.call_to_head(state, batch)
    return {LOGITS: head(hidden)}


def _difference(ours: Tensor | None, theirs: Tensor | None, what: str) -> float:
    """Return the relative difference. Raises LayersError if it is too large; no gradient equals zeros."""
    known = ours if theirs is None else theirs
    if known is None:
        return 0.0
    zeros = torch.zeros_like(known)
    ours, theirs = zeros if ours is None else ours, zeros if theirs is None else theirs
    difference = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()
    if not difference <= TOLERANCE:  # NaN, too: a layer used a weight of another stage
        raise LayersError(f"the model run layer by layer differs from the whole model: {what} by {difference:.1e}")
    return difference


def _run_stages(
    stages: ComparedStages, ranges: Sequence[range], batch: InputTensors, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward of (logits * weights).sum(), stage by stage; return logits and gradients by name."""
    state: State = {}
    runs: list[tuple[State, State, dict[str, nn.Parameter]]] = []
    for stage in ranges:
        own = stages.load(stage)
        received = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in state.items()}
        context = stages.composed.context(batch, stage)
        state = received
        for index in stage:
            seed_generators(index)
            try:
                state = _run_layer(stages.composed, index, state, batch, context)
            except Exception as error:  # raised in transformers' code, by what the stage lacks
                name = stages.layers.layers[index].name
                raise LayersError(f"layer {name} does not run without the layers before it: {error}") from error
        runs.append((received, state, own))
    (state[LOGITS] * weights).sum().backward()
    for (_, sent, _), (received, _, _) in reversed([*itertools.pairwise(runs)]):
        pairs = [(x, received[name].grad) for name, x in sent.items() if x.requires_grad]
        used = [(x, grad) for x, grad in pairs if grad is not None]
        torch.autograd.backward([x for x, _ in used], [grad for _, grad in used])
    gradients: dict[str, Tensor] = {}
    for _, _, own in runs:
        for name, param in own.items():
            if param.grad is not None:  # a tied parameter's is the sum over the stages
                gradients[name] = gradients[name] + param.grad if name in gradients else param.grad
    return state[LOGITS], gradients
