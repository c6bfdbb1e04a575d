"""Which models fit on which GPUs, by `acsgd plan`; loads no weights, trains nothing, downloads nothing:

    .venv/bin/python -m benchmarks.models.fits [--models Llama-2-7B GPT-NeoX-20B] [--json runs/benchmarks/fits.json]

A cell holds the flags of the first run that fits, in the order in which `acsgd plan` proposes runs: from one stage with
whole activations to more recomputation, sharded optimizer state, more stages, and state in host memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from transformers import GPTNeoXConfig, LlamaConfig, PreTrainedConfig, Qwen2Config

from acsgd.config.options import Config
from acsgd.config.run_file import parse
from acsgd.run.plan.model import describe_run_model
from acsgd.run.plan.planner import GIB, RunPlanner

MODELS: dict[str, PreTrainedConfig] = {
    "Llama-2-7B": LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
    ),
    "Qwen2.5-14B": Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
    "GPT-NeoX-20B": GPTNeoXConfig(
        vocab_size=50432,
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=44,
        num_attention_heads=64,
        max_position_embeddings=2048,
    ),
    "Llama-3-70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    ),
}
"""Sizes in config.json of meta-llama/Llama-2-7b-hf, Qwen/Qwen2.5-14B, EleutherAI/gpt-neox-20b and
meta-llama/Meta-Llama-3-70B on Hugging Face. Embeddings and head are not tied in any of them."""
WAYS: dict[str, tuple[str, ...]] = {
    "full": (),
    "LoRA": ("--adapter.spec", "lora:r=16"),
    "QLoRA": ("--adapter.spec", "lora:r=16", "--model.quantize", "nf4"),
}
"""Flags of each kind of fine-tuning."""
GPUS = {"1 x 24 GB": (1, 24), "2 x 24 GB": (2, 24), "8 x 16 GB": (8, 16), "8 x 80 GB": (8, 80)}
"""Number of GPUs, all of one host, and the memory of one, GiB."""
RUN = (
    *("--model.dtype", "bf16", "--data.sources", "demo", "--data.sequence", "2048", "--data.batch", "8"),
    *("--pp.micro", "1", "--optim.lr", "1e-4", "--optim.steps", "1000"),
)


class Cell(NamedTuple):
    """The first run that fits on some GPUs."""

    model: str
    tuning: str
    gpus: str
    flags: tuple[str, ...] | None
    """Flags besides those of the kind of fine-tuning; None = no run fits."""
    gib: float = 0.0
    """Memory of the GPU that needs most."""
    host_gib: float = 0.0
    """Memory of the host for all processes, with optim.offload=cpu or model.offload=cpu."""

    def __str__(self) -> str:
        if self.flags is None:
            return "no"
        host = f", host {self.host_gib:.0f}" if self.host_gib else ""
        return f"{self.gib:.1f}{host}{': ' * bool(self.flags)}{' '.join(self.flags)}"


def run_of(directory: Path, config: PreTrainedConfig, way: str) -> Config:
    """Return a run with one stage and whole activations. directory: the config of the model is written there."""
    if not (model := directory / "model").exists():
        architecture = f"{type(config).__name__.removesuffix('Config')}ForCausalLM"
        config.update({"tie_word_embeddings": False, "architectures": [architecture]})
        config.save_pretrained(model)
    places = ("--model.name", str(model), "--log.dir", str(directory / "run"))
    return parse([*places, *RUN, *WAYS[way]], prog="fits", is_main=False)


def first_fitting(planner: RunPlanner, config: Config, gib: int) -> tuple[tuple[str, ...], float, float] | None:
    """Return the flags of the first run that fits, and the memory of a GPU and of the host, GiB."""
    if (flags := planner.first_that_fits(gib * GIB)) is None:
        return None
    fitting = next(changed for other, changed in planner.smaller() if other == flags)
    ranks = planner.memory(fitting)
    replicas = planner.world // len(ranks)
    offloads = any("offload" in flag for flag in flags)
    host = sum(map(planner.needed_on_host, ranks)) * replicas if offloads else 0
    return flags, max(map(planner.needed, ranks)) / GIB, host / GIB


def cells_of(name: str, way: str) -> Iterator[Cell]:
    """Yield the cells of a model. Its layers are traced once for all numbers of GPUs."""
    with tempfile.TemporaryDirectory() as directory:
        config = run_of(Path(directory), MODELS[name], way)
        planner = RunPlanner(config, 1, describe_run_model(config), on_gpu=True)
        for gpus, (world, gib) in GPUS.items():
            planner = planner.on(world, per_host=world)
            found = first_fitting(planner, config, gib)
            yield Cell(name, way, gpus, *found) if found else Cell(name, way, gpus, None)


def main() -> None:
    """Plan, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="models to plan")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/fits.json"), help="path of the results")
    options = parser.parse_args()
    table = Table("model", "fine-tuning", *GPUS, title="GiB of the GPU that needs most, and flags")
    results: list[Cell] = []
    for name in options.models:
        for way in WAYS:
            start = time.process_time()
            cells = [*cells_of(name, way)]
            results += cells
            seconds = f"({time.process_time() - start:.0f} s of CPU)"
            print(" | ".join([name, way, *map(str, cells)]), seconds, flush=True)
            table.add_row(name, way, *map(str, cells))
    Console().print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([cell._asdict() for cell in results], indent=1))


if __name__ == "__main__":
    main()
