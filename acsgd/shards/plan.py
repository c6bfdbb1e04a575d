"""Assign layers to stages: estimate the cost of each layer and minimise the cost of the most expensive stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedConfig

from acsgd.layers.composed import ComposedModel, State
from acsgd.layers.description import BATCH, LOGITS, LayerSpec, ModelLayers
from acsgd.layers.recorders import KnownValues, probe_batch
from acsgd.layers.skeleton import experts_without_values
from acsgd.layers.trace import on_fake_tensors
from acsgd.model_classes import LogitsLoss, ModelClass

FLOPS_PER_BYTE = {"cpu": 8.0, "cuda": 200.0}
"""Arithmetic operations in the time that a device takes to write one byte of output. CPU: from timings of single blocks
on one core; GPU: ratio of bf16 arithmetic to memory bandwidth of current data-centre cards."""


def _scores_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of both products of attention, from the shapes of fused attention's arguments."""
    return sdpa_flop_count(query, key, value)


def _scores_backward_flops(gradient: Sequence[int], *shapes: Any, **__: Any) -> int:
    """Return those of the gradients of both products. Scores that a fused kernel computes again are not counted."""
    return 2 * sdpa_flop_count(*shapes[:3])


FUSED_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _scores_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _scores_backward_flops,
}
"""Operations of what torch's counter does not know, in the form of its registry. As eager attention has: also those of
masked positions."""


class StageSpec(NamedTuple):
    """Layers of a stage: the half-open range [first, last)."""

    first: int
    last: int


def plan(costs: Sequence[float], stages: int) -> list[StageSpec]:
    """Split layers into contiguous, non-empty stages, minimising the cost of the most expensive stage.

    costs: one per layer, any unit. Raises ValueError if there are fewer layers than stages.
    """
    return plan_unequal([costs] * stages)


def plan_unequal(costs: Sequence[Sequence[float]], largest: Mapping[int, int] | None = None) -> list[StageSpec]:
    """Split layers into stages that are unequally fast, minimizing the cost of the most expensive one.

    costs: by stage, one per layer, any unit. largest: the highest number of layers that some stages may have. Raises
    ValueError if there are fewer layers than stages, or the stages may not have all layers.
    Exact, by dynamic programming over prefixes: O(stages * layers^2).
    """
    stages, num_layers, largest = len(costs), len(costs[0]), largest or {}
    if stages > num_layers:
        raise ValueError(
            f"there are more stages ({stages}) than layers ({num_layers}: an embedding, {num_layers - 2} blocks and "
            f"a head); use at most {num_layers}"
        )
    totals = [[0.0, *itertools.accumulate(of_stage)] for of_stage in costs]

    def cost(stage: int, first: int, last: int) -> float:
        is_allowed = last - first <= largest.get(stage, num_layers)
        return totals[stage][last] - totals[stage][first] if is_allowed else math.inf

    # best[n]: (cost of the most expensive stage, cuts) for the first n layers in the stages before
    best: list[tuple[float, tuple[int, ...]]] = [(cost(0, 0, n), (0, n)) for n in range(num_layers + 1)]
    for stage in range(1, stages):
        longer = list(best)
        for n in range(stage + 1, num_layers + 1):
            cut = min(range(stage, n), key=lambda k: max(best[k][0], cost(stage, k, n)))
            longer[n] = (max(best[cut][0], cost(stage, cut, n)), (*best[cut][1], n))
        best = longer
    if best[num_layers][0] == math.inf:
        raise ValueError(f"the stages may have {sum(largest.values())} layers, but the model has {num_layers}")
    return [StageSpec(first, last) for first, last in itertools.pairwise(best[num_layers][1])]


def blocks_of(specs: Sequence[StageSpec]) -> tuple[int, ...]:
    """Return the number of blocks per stage: layers without the embedding and the head."""
    last = len(specs) - 1
    return tuple(spec.last - spec.first - (stage == 0) - (stage == last) for stage, spec in enumerate(specs))


def plan_blocks(blocks: Sequence[int], num_blocks: int, stages: int) -> list[StageSpec]:
    """Split layers by the number of blocks per stage; the embedding joins the first stage, the head the last.

    Raises ValueError if the numbers do not fit the model or the number of stages, or leave a stage empty.
    """
    if len(blocks) != stages:
        raise ValueError(f"pp.layers={list(blocks)} has {len(blocks)} entries, but there are {stages} stages")
    if sum(blocks) != num_blocks:
        raise ValueError(f"pp.layers={list(blocks)} adds up to {sum(blocks)}, but the model has {num_blocks} blocks")
    if min(blocks) < 0 or (stages > 2 and min(blocks[1:-1]) < 1):
        raise ValueError(f"pp.layers={list(blocks)} leaves a stage without layers")
    cuts = [0, *(1 + n for n in itertools.accumulate(blocks))]
    cuts[-1] += 1
    return [StageSpec(first, last) for first, last in itertools.pairwise(cuts)]


def training_costs(costs: Sequence[float], layers: ModelLayers) -> list[float]:
    """Return the costs of layers without what frozen parameters save.

    Forward, gradients of inputs, and gradients of weights cost about the same. Layers up to the first trained one need
    no gradients of inputs, and layers without trained parameters none of weights.
    """
    first, frozen = layers.first_trained, {*layers.frozen}

    def remaining(layer: LayerSpec) -> float:
        now = 1 + (layer.index > first) + (not frozen.issuperset(layer.parameters))
        return now / (1 + (layer.index > 0) + bool(layer.parameters))

    return [cost * remaining(layer) for cost, layer in zip(costs, layers.layers, strict=True)]


class LayerWork(NamedTuple):
    """Forward and backward of a layer on one micro-batch, without recomputation."""

    flops: int
    """Arithmetic operations of matrix products, attention's among them, by torch's counter."""
    output_bytes: int
    """Bytes of all outputs of operations."""


def layer_costs(
    model_class: ModelClass, config: PreTrainedConfig, layers: ModelLayers, sizes: Mapping[str, int], *, device: str
) -> list[float]:
    """Estimate the cost of forward and backward of each layer on one micro-batch, in arithmetic operations.

    Runs the layers on fake tensors, which need no memory: cost = operations of the matrix products + bytes of all
    outputs * FLOPS_PER_BYTE[device]. Of equal blocks only one is run. sizes: of the micro-batch. device: "cpu" or
    "cuda". If forward reads values of tensors that are too large for `KnownValues`, the costs are those of shorter
    sequences, whose ratio is about the same.
    """
    while True:
        try:
            work = layer_work(model_class, config, layers, sizes)
            return [each.flops + FLOPS_PER_BYTE[device] * each.output_bytes for each in work]
        except (DataDependentOutputException, DynamicOutputShapeException):
            shorter = {name: size if name == BATCH else max(size // 2, 1) for name, size in sizes.items()}
            if shorter == sizes:
                raise
            sizes = shorter


def token_flops(
    model_class: ModelClass, config: PreTrainedConfig, layers: ModelLayers, sizes: Mapping[str, int]
) -> float:
    """Return the arithmetic operations per token of forward and backward on rows of full length; 0 = unknown.

    Known for models of one sequence, unless forward reads values of tensors. Arguments as `layer_costs`.
    """
    if any("target" in shape for shape in model_class.inputs.values()):
        return 0.0
    try:
        work = layer_work(model_class, config, layers, sizes)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return 0.0
    return sum(each.flops for each in work) / (sizes[BATCH] * sizes["sequence"])


def layer_work(
    model_class: ModelClass, config: PreTrainedConfig, layers: ModelLayers, sizes: Mapping[str, int]
) -> list[LayerWork]:
    """Run forward and backward of each layer on fake tensors, and count. Arguments as `layer_costs`."""
    model = model_class.build(config)
    with on_fake_tensors(model), experts_without_values(model), KnownValues() as known:
        inputs = probe_batch(model, model_class.inputs_of(config), sizes, known)
        composed = ComposedModel(model, layers)
        with torch.no_grad():  # each layer has a backward of its own
            context = composed.context(inputs, range(len(layers.layers)))
        state: State = {}
        found: dict[str, tuple[LayerWork, State]] = {}
        counted = []
        for layer in layers.layers:
            kind = repr(model.get_submodule(layer.block)) if layer.block and not layer.runs_forward else layer.name
            key = repr((kind, {name: x.shape for name, x in state.items()}))
            if key not in found:
                with FlopCounterMode(display=False, custom_mapping=FUSED_ATTENTION) as flops, _OutputBytes() as outputs:
                    out = composed.call(layer.index, _detached(state), inputs, context)
                    _backward(model_class.loss, out)
                found[key] = LayerWork(flops.get_total_flops(), outputs.bytes), _detached(out)
            work, state = found[key]
            counted.append(work)
    return counted


def _detached(state: State) -> State:
    return {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in state.items()}


def _backward(loss: LogitsLoss, out: State) -> None:
    """Run the backward of a layer, of the last one from the loss."""
    if LOGITS in out:
        logits = out[LOGITS]
        loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.long), 0.0).backward()
    else:
        torch.stack([x.float().sum() for x in out.values() if x.requires_grad]).sum().backward()


class _OutputBytes(TorchDispatchMode):
    """Counts the bytes of the outputs of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        return out
