"""Time and peak memory of a micro-batch whose loss is computed in chunks of positions, against all logits at once:

    .venv/bin/python -m benchmarks.models.logits [--json runs/benchmarks/logits.json]

GPT-2 of 124 M parameters, 2 x 1024 tokens, fp32, forward and backward of one stage. Both sides alternate in one process
(common/compare.py); memory is the peak of the tensors that a step creates, beyond the weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config

from acsgd.dp.sync import SingleReplicaSync
from acsgd.layers.composed import ComposedModel
from acsgd.model_classes import MODEL_CLASSES
from acsgd.pp.chunked_loss import HeadLoss, HeadUse
from acsgd.pp.recompute import KEEP_ALL, Recompute
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.run.plan.layer_trace import MemoryTracker
from acsgd.shards.load import LayerLoader, RandomWeights
from acsgd.tasks import TASKS
from benchmarks.common.compare import Comparison, RankRounds, alternate, on_ranks, summarise

SEQUENCES, LENGTH = 2, 1024
FORMS: dict[str, dict[str, Any]] = {
    "all trained": {},
    "all trained, model.recompute=layers": {"recompute": Recompute(1)},
    "embedding and head frozen": {"frozen": True},
}
"""Options of `build` by name."""


def build(blocks: int, *, recompute: Recompute = KEEP_ALL, frozen: bool = False) -> Stage:
    """Return a stage with all layers of a GPT-2."""
    config = GPT2Config(n_layer=blocks, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    task = MODEL_CLASSES["lm"]
    description, model = task.layers(config), task.build(config)
    if frozen:
        description = replace(description, frozen=("transformer.wte.weight",))
    cpu = torch.device("cpu")
    loader = LayerLoader(
        model, description, RandomWeights(task, config, description, seed=0), device=cpu, dtype=torch.float32
    )
    layers = [loader.load(index) for index in range(len(description.layers))]
    sync = SingleReplicaSync([weight for layer in layers for weight in layer.weights])
    composed = ComposedModel(model, description)
    return Stage(composed, HeadLoss(TASKS["lm"]), layers, sync, seed=0, targets=SEQUENCES * LENGTH, recompute=recompute)


def steps_of(stage: Stage) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Return forward and backward of a micro-batch with the loss in chunks, and with all logits at once."""
    tokens = torch.randint(50257, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))

    def step(number: int, *, whole: bool) -> float:
        at_once = patch.object(HeadUse, "chunk_length", lambda use, hidden, at_once: hidden.shape[1])
        with at_once if whole else nullcontext():
            loss = stage.forward(MicroBatch(number, 0, 0, (0, 1)), {"input_ids": tokens}, {}, tokens)["loss"]
            stage.backward(0, None, last=True)
        for weight in stage.weights:
            weight.master.grad = None
        return loss.item()

    return (lambda number: step(number, whole=False)), (lambda number: step(number, whole=True))


def time_on_rank(rank: int, blocks: int, form: str, rounds: int) -> RankRounds:
    """Alternate the sides."""
    torch.set_num_threads(1)
    chunks, whole = steps_of(build(blocks, **FORMS[form]))
    return alternate(chunks, whole, warmup=1, rounds=rounds, steps=1, barrier=lambda: None)


def memory_on_rank(rank: int, blocks: int, form: str, side: int) -> int:
    """Return the peak of the tensors that one step of a side creates, bytes."""
    torch.set_num_threads(1)
    step = steps_of(build(blocks, **FORMS[form]))[side]
    with MemoryTracker() as tracker:
        step(0)
    return tracker.peak


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/logits.json"), help="path of the results")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds, each with a step of both sides")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of the model")
    options = parser.parse_args()
    logits_mb = SEQUENCES * LENGTH * 50257 * 4 / 2**20
    title = f"loss in chunks against {logits_mb:.0f} MiB of logits at once"
    table = Table("form", "time", "quartiles", "CPU", "peak, MiB", title=title, title_justify="left")
    results = {}
    for form in FORMS:
        (rounds,) = on_ranks(1, time_on_rank, options.blocks, form, options.rounds, timeout_s=3600)
        compared: Comparison = summarise([rounds], steps=1)
        chunks, whole = (on_ranks(1, memory_on_rank, options.blocks, form, side)[0] / 2**20 for side in (0, 1))
        low, high = compared.quartiles
        table.add_row(
            form,
            f"{compared.median:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{compared.cpu:.3f}",
            f"{chunks:.0f} against {whole:.0f}",
        )
        results[form] = {**compared._asdict(), "peak_mib": chunks, "whole_peak_mib": whole, "logits_mib": logits_mb}
    Console().print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
