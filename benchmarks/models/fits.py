"""Which models fit on which GPUs, by the number of parameters of each stage; loads no weights and trains nothing:

    .venv/bin/python -m benchmarks.models.fits [--json runs/benchmarks/fits.json]

A pipeline has one stage per GPU, balanced as a run without pp.layers balances it. Counted are weights and gradients, as
by `ParameterCount.needed_bytes` with bf16 parameters, in QLoRA with nf4, and AdamW's two moments in fp32, for the stage
that needs most. Not counted are activations and their gradients, messages, temporary tensors, and what the GPU's
libraries reserve: what is left must hold them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from acsgd.adapters.inject import build_adapted, with_adapter
from acsgd.config.adapters import parse_adapter
from acsgd.layers.description import LayerSpec
from acsgd.layers.quantize import QuantizedFormat
from acsgd.model_classes import MODEL_CLASSES
from acsgd.run.plan.limits import ParameterCount
from acsgd.shards.plan import layer_costs, plan, training_costs

MODELS: dict[str, PreTrainedConfig] = {
    "Llama-2-7B": LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "GPT-NeoX-20B": GPTNeoXConfig(
        vocab_size=50432,
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=44,
        num_attention_heads=64,
        tie_word_embeddings=False,
    ),
}
"""Sizes as published."""
WAYS: dict[str, tuple[str | None, QuantizedFormat | None]] = {
    "full": (None, None),
    "LoRA": ("lora:r=16", None),
    "QLoRA": ("lora:r=16", "nf4"),
}
"""Spec of the adapter, and how frozen linear layers are quantized."""
GPUS = {"1 x 24 GB": (1, 24), "2 x 24 GB": (2, 24), "8 x 16 GB": (8, 16)}
"""Number of GPUs, and the memory of one, GiB."""
DTYPE = torch.bfloat16
MOMENTS_BYTES = 8
"""AdamW's moments of a trained parameter."""
SIZES = {"batch": 1, "sequence": 512, "target": 512}
"""Of the micro-batch for which stages are balanced."""


class Need(NamedTuple):
    """Memory of the stage that needs most."""

    trained: int
    """Trained parameters of the stage."""
    frozen: int
    nbytes: int


def need(config: PreTrainedConfig, spec: str | None, quantization: QuantizedFormat | None, stages: int) -> Need:
    """Return the memory that a model needs on some stages. spec: of the adapter; None = full fine-tuning."""
    task, adapter = MODEL_CLASSES["lm"], parse_adapter(spec)
    derived = description = task.layers(config)
    model = build_adapted(task, config, adapter, blocks=derived.blocks, quantization=quantization)
    if adapter is not None:
        description = with_adapter(derived, model, adapter, task.name)
    costs = layer_costs(task, config, derived, SIZES, device="cuda")
    cuts = plan(training_costs(costs, description), stages)

    def count(layers: tuple[LayerSpec, ...]) -> ParameterCount:
        return ParameterCount.of(model, {key for layer in layers for key in layer.parameters}, description.frozen)

    def nbytes(count: ParameterCount) -> int:
        return count.needed_bytes(DTYPE) + MOMENTS_BYTES * count.trained

    largest = max((count(description.layers[slice(*cut)]) for cut in cuts), key=nbytes)
    return Need(largest.trained, largest.frozen, nbytes(largest))


def main() -> None:
    """Count, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/fits.json"), help="path of the results")
    options = parser.parse_args()
    table = Table("model", "fine-tuning", *GPUS, title="GiB of the stage that needs most; left for activations")
    results = []
    for name, config in MODELS.items():
        for way, (spec, quantization) in WAYS.items():
            cells = []
            for gpus, (stages, gib) in GPUS.items():
                found = need(config, spec, quantization, stages)
                left = gib * 2**30 - found.nbytes
                verdict = f"[green]{left / 2**30:.1f} left[/]" if left >= 0 else "[red]no[/]"
                cells.append(f"{found.nbytes / 2**30:.1f}, {verdict}")
                results.append({"model": name, "tuning": way, "gpus": gpus, "left": left, **found._asdict()})
            table.add_row(name, way, *cells)
    Console(width=120).print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
