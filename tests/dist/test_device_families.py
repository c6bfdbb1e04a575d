"""Law: the stages of a model of any type run on a device apart from the host, with the loss and gradients of the CPU.

An operation that mixes tensors of both raises there, and one that waits for the device is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lib.direct import CPU, build_stages
from lib.model_types import TYPES, VOCABULARY, small_config, task_of
from lib.models import layers_of
from lib.ranks import on_ranks
from lib.stand_in import on_stand_in
from torch import Tensor

from acsgd.config.options import OptimConfig
from acsgd.optim.adamw import AdamW
from acsgd.pp.stage import MicroBatch
from acsgd.streams import Streams

COMMON = ("gpt2", "llama", "deberta-v2", "t5")
OTHERS = tuple(name for name in TYPES if name not in COMMON)
WAITS = {  # of transformers' own code, in each forward
    "albert": {"_local_scalar_dense"},
    "bart": {"_local_scalar_dense"},  # whether a mask has no padding
    "t5": {"_local_scalar_dense"},
    "deberta-v2": {"copy from the host"},  # constants of attention
    "gpt_neo": {"copy from the host"},
}


class Trained(NamedTuple):
    """A step of one micro-batch through two stages."""

    loss: float
    grads: list[Tensor]
    waits: dict[str, int]
    """What waited for the device before the loss was read."""


def train(model_type: str, streams: Streams, waits: Counter[str]) -> Trained:
    config, task = small_config(model_type), task_of(model_type)
    torch.manual_seed(0)
    sizes = {"batch": 2, "sequence": 12, "target": 10}
    shapes = {name: [sizes[size] for size in axes] for name, axes in task.inputs_of(config).items()}
    ranges = {"attention_mask": (1, 2), "token_type_ids": (0, getattr(config, "type_vocab_size", 1))}
    inputs = {name: torch.randint(*ranges.get(name, (3, VOCABULARY)), shape) for name, shape in shapes.items()}
    classes = config.num_labels if task.has_new_head else VOCABULARY
    labels = torch.randint(classes, [sizes[size] for size in task.labels])
    layers = len(layers_of(config, task.name).layers)
    cuts = [range(layers // 2), range(layers // 2, layers)]
    first, last = build_stages(config, cuts, task=task.name, device=streams.device, targets=20)
    weights = [weight for stage in (first, last) for weight in stage.weights]
    optimizer = AdamW().open(weights, OptimConfig(lr=1e-3, steps=1))
    waits.clear()
    on_device = {name: streams.load(tensor) for name, tensor in inputs.items()}
    micro = MicroBatch(0, 0, 0, (0, 1))
    state = first.forward(micro, on_device, {})
    loss = last.forward(micro, on_device, {name: x.clone() for name, x in state.items()}, streams.load(labels))["loss"]
    first.backward(0, last.backward(0, None, last=True), last=True)
    grads = [weight.master.grad for weight in weights if weight.master.grad is not None]
    optimizer.step(0)
    counted = dict(waits)
    assert all(weight.master.device == streams.device for weight in weights)
    return Trained(float(loss), [grad.cpu() for grad in grads], counted)


def train_both(rank: int, world_size: int, types: Sequence[str]) -> list[tuple[Trained, Trained]]:
    torch.set_num_threads(1)
    with on_stand_in() as streams:
        host = Streams(CPU)
        return [(train(name, streams, streams.waits), train(name, host, Counter())) for name in types]


@pytest.mark.parametrize("types", [COMMON, pytest.param(OTHERS, marks=pytest.mark.soak)])
def test_every_type_trains_on_a_device(types: tuple[str, ...], tmp_path: Path) -> None:
    for name, (there, here) in zip(types, on_ranks(1, train_both, types)[0], strict=True):
        assert there.loss == pytest.approx(here.loss, rel=1e-6), name
        largest = max(float(grad.abs().max()) for grad in here.grads)
        for ours, expected in zip(there.grads, here.grads, strict=True):  # sums over uses of a weight in any order
            assert torch.allclose(ours, expected, rtol=0, atol=1e-6 * largest), name
        assert {*there.waits} <= WAITS.get(name, set()), (name, there.waits)
