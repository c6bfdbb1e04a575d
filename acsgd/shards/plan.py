"""Which layers go to which stage: what each layer costs, and the cut that keeps the dearest stage cheapest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig

from acsgd.shards.layers import LayerShard, ModelFamily, meta_model

FLOPS_PER_BYTE = {"cpu": 8.0, "cuda": 200.0}
"""Arithmetic a device does while it moves one byte that an operation gives; from timings of single blocks on a
CPU core, and for GPUs from the ratio of bf16 arithmetic to memory bandwidth of present data-centre cards."""


class StageSpec(NamedTuple):
    """A contiguous range of layers, half-open."""

    first: int
    last: int


def plan(costs: Sequence[float], stages: int) -> list[StageSpec]:
    """Cut layers into contiguous stages, none empty, keeping the dearest stage as cheap as possible.

    costs: one per layer, any unit. Raises ValueError if there are fewer layers than stages.
    Exact, by dynamic programming over prefixes: O(stages * layers^2).
    """
    num_layers = len(costs)
    if stages > num_layers:
        raise ValueError(
            f"there are more stages ({stages}) than layers ({num_layers}: an embedding, {num_layers - 2} blocks and "
            f"a head); use at most {num_layers}"
        )
    total = [0.0, *itertools.accumulate(costs)]
    # best[n]: (cost of the dearest stage, cuts) for the first n layers in the number of stages reached so far
    best: list[tuple[float, tuple[int, ...]]] = [(total[n], (0, n)) for n in range(num_layers + 1)]
    for count in range(2, stages + 1):
        longer = list(best)
        for n in range(count, num_layers + 1):
            cut = min(range(count - 1, n), key=lambda k: max(best[k][0], total[n] - total[k]))
            longer[n] = (max(best[cut][0], total[n] - total[cut]), (*best[cut][1], n))
        best = longer
    return [StageSpec(first, last) for first, last in itertools.pairwise(best[num_layers][1])]


def plan_blocks(blocks: Sequence[int], num_blocks: int, stages: int) -> list[StageSpec]:
    """Cut as told: blocks per stage, the embedding and the head on top of the first and the last.

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


def layer_costs(family: ModelFamily, config: PreTrainedConfig, *, sequence: int, device: str) -> list[float]:
    """Compute what forward and backward of each layer cost on one sequence, in arithmetic operations.

    The layers are run on the meta device, which touches no memory: matrix products count their operations, and
    everything that is made counts its bytes, weighed by what the kind of device, "cpu" or "cuda", moves meanwhile.
    Layers made of the same modules cost the same; one of them is run.
    """
    model = meta_model(config)
    family.rebuild_buffers(model, torch.device("meta"))
    state = {"tokens": torch.empty(1, sequence, dtype=torch.long, device="meta")}
    context: Any = None
    known: dict[str, float] = {}
    costs = []
    for shard in family.layers(config):
        made_of = repr([model.get_submodule(path) for path in shard.modules])
        if made_of in known:
            costs.append(known[made_of])  # and its output has the shape of the state that there is
            continue
        with FlopCounterMode(display=False) as flops, _BytesMade() as moved:
            if shard.kind == "block" and context is None:
                context = family.context(model, state)
            out = family.call(model, shard, _detached(state), context)
            total = sum(_scalar(family, shard, tensor) for tensor in out.values())
            assert isinstance(total, Tensor)
            total.backward()
        known[made_of] = flops.get_total_flops() + FLOPS_PER_BYTE[device] * moved.bytes
        costs.append(known[made_of])
        state = out
    return costs


def _detached(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in state.items()}


def _scalar(family: ModelFamily, shard: LayerShard, out: Tensor) -> Tensor:
    """Reduce a layer's output to what backward can start from."""
    if shard.kind == "head":
        return family.loss(out, torch.empty(out.shape[:-1], dtype=torch.long, device="meta"))
    return out.sum()


class _BytesMade(TorchDispatchMode):
    """Counts the bytes of all tensors that operations give."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        return out
