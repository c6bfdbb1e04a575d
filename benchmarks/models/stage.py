"""One stage that runs a model layer by layer, against the model's own forward and backward, for six types:

    .venv/bin/python -m benchmarks.models.stage [--types gpt2 t5] [--json runs/benchmarks/stage.json]

Both sides run the same weights and batch in one process, alternately (common/compare.py). Also measured: the fraction
of a step in which the arguments of the blocks are computed (the context), the time to derive the layers of a model
of 671 billion parameters, and the fraction of the bandwidth of copy_ that the work of optim.offload=cpu on the host and
fetches of model.offload reach, in CPU time. Parameters are fetched as those of equal blocks, files from the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from acsgd.comm.waits import Meter
from acsgd.config.options import OptimConfig
from acsgd.layers.composed import ComposedModel, State
from acsgd.layers.description import LOGITS, LayerSpec
from acsgd.layers.verify import fill_with_random
from acsgd.model_classes import MODEL_CLASSES
from acsgd.optim.adamw import AdamW
from acsgd.optim.fetch import FileParams, HostParams, LayerFetch
from acsgd.optim.offload import GradientOffload
from acsgd.optim.ownership import OwnedWeights, Ownership
from acsgd.optim.per_weight import CopyingOptimizer
from acsgd.shards.weights import Weight
from acsgd.shards.writer import open_stored
from acsgd.streams import Streams
from benchmarks.common.compare import Comparison, alternate, summarise

SHAPE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
TYPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 512, "n_layer": 4, "n_head": 8},
    "llama": SHAPE | {"intermediate_size": 1536},
    "gpt_neox": SHAPE | {"intermediate_size": 2048},
    "mixtral": SHAPE | {"intermediate_size": 1024, "num_key_value_heads": 4, "num_local_experts": 4},
    "deberta-v2": SHAPE
    | {
        "num_hidden_layers": 12,
        "intermediate_size": 2048,
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "conv_kernel_size": 3,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "pooler_hidden_size": 512,
    },
    "t5": {"d_model": 512, "d_ff": 2048, "num_layers": 3, "num_heads": 8},
}
"""Options by type, with widths of 512 and few blocks, so that the cost besides the blocks counts more than in use.
DeBERTa has as many as its smallest model but one: its convolution after the first block runs once more per stage."""
VOCABULARY = 4096
OFFLOADED = 2**24
"""Elements of a weight in host memory."""
FETCHED = 4
"""Number of equal parameters, of as many elements together, that are fetched one after another."""
TASK_OF = {"deberta-v2": MODEL_CLASSES["classification"], "t5": MODEL_CLASSES["seq2seq"]}


class Sides(NamedTuple):
    """What is timed."""

    ours: Callable[[int], float]
    theirs: Callable[[int], float]
    context: Callable[[], object]


def sides_of(model_type: str, *, rows: int, length: int) -> Sides:
    """Return a training step of both sides, without an optimizer."""
    config = AutoConfig.for_model(model_type, **TYPES[model_type], vocab_size=VOCABULARY, pad_token_id=0)
    config.bos_token_id = config.eos_token_id = None
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    task = TASK_OF.get(model_type, MODEL_CLASSES["lm"])
    model = fill_with_random(task.build(config))
    composed = ComposedModel(model, task.layers(config))
    layers = range(len(composed.layers))
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(1, VOCABULARY, (rows, length), generator=generator) for name in task.inputs}
    batch |= {name: torch.ones_like(ids) for name, ids in batch.items() if name.endswith("mask")}
    labels = torch.randint(2, (rows,), generator=generator) if task.name == "classification" else batch["input_ids"]

    def finish(logits: Tensor) -> float:
        model.zero_grad()
        loss = task.loss(logits, labels, 0.0) / labels.numel()
        loss.backward()
        return loss.item()

    def ours(step: int) -> float:
        context = composed.context(batch, layers)
        state: State = {}
        for index in layers:
            state = composed.call(index, state, batch, context)
        return finish(state[LOGITS])

    def theirs(step: int) -> float:
        return finish(model(**batch, use_cache=False).logits)

    return Sides(ours, theirs, lambda: composed.context(batch, layers))


def median_s(work: Callable[[], object], times: int) -> float:
    """Return the median time of `work`."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def derive_s() -> float:
    """Return the time to derive the layers of DeepSeek-V3, whose default config has 671 billion parameters."""
    config = AutoConfig.for_model("deepseek_v3")
    return median_s(lambda: MODEL_CLASSES["lm"].layers(config), 3)


def fetches_from(path: Path, streams: Streams) -> list[Callable[[], None]]:
    """Return fetches of all parameters of a safetensors file one by one, from host memory and from the file."""
    stored = open_stored(path)
    layers = [LayerSpec(key, i, None, (key,), (), False, (), {}, {}, {}) for i, key in enumerate(stored)]
    keys, owned = frozenset(stored), OwnedWeights((), Ownership(0, 1))

    def fetch_from(source: HostParams | FileParams) -> Callable[[], None]:
        model = nn.Module()
        for key, layer in zip(stored, layers, strict=True):
            model.register_parameter(key, nn.Parameter(torch.empty(stored[key].header.shape), False))
            stored[key].read_into(model.get_parameter(key).detach())
            source.add(layer, (), model)
        fetch = LayerFetch([[layer] for layer in layers], source, Meter())

        def run() -> None:
            for group in range(len(layers)):
                with fetch.whole(group):
                    pass

        return run

    return [
        fetch_from(HostParams(owned, keys, streams)),
        fetch_from(FileParams(owned, keys, stored.__getitem__, streams)),
    ]


def offload_shares(rounds: int, directory: Path) -> dict[str, tuple[float, ...]]:
    """Return the quartiles of the bytes per CPU time of offloading, relative to copy_. directory: gets a file."""
    streams, config = Streams(torch.device("cpu")), OptimConfig(lr=1e-3, steps=1, offload="cpu")
    param, master = nn.Parameter(torch.randn(OFFLOADED).bfloat16()), nn.Parameter(torch.randn(OFFLOADED))
    weight, gradient = Weight("weight", param, master), torch.randn(OFFLOADED).bfloat16()
    gradients, optimizer = GradientOffload(streams), CopyingOptimizer(AdamW(), [weight], config, streams)
    source, target = torch.randn(2, 2 * OFFLOADED)

    def add() -> None:
        param.grad = gradient
        gradients.start(weight, lambda: None)
        gradients.finish()

    def cpu_s(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    master.grad = torch.zeros(OFFLOADED)
    optimizer.step(0)
    parts = {f"weight{i}": part.clone() for i, part in enumerate(master.detach().chunk(FETCHED))}
    save_file(parts, path := directory / "weights.safetensors")
    fetch, read = fetches_from(path, streams)
    # bytes read and written: of a gradient its copy and its sum; of a step 4 fp32 ones, of which 3 change, and bf16
    works: dict[str, tuple[Callable[[], None], int]] = {
        "add gradients": (add, 14),
        "step of AdamW": (lambda: optimizer.step(1), 30),
        "new tensors": (lambda: source.clone(), 16),
        "fetch from host memory": (fetch, 8),
        "fetch from a file": (read, 8),
    }
    shares: dict[str, list[float]] = {name: [] for name in works}
    for name, (work, nbytes) in [*works.items()] * (rounds + 1):
        shares[name].append(nbytes / cpu_s(work) * cpu_s(lambda: target.copy_(source)) / 16)
    return {name: tuple(statistics.quantiles(each[1:], n=4)) for name, each in shares.items()}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/stage.json"), help="path of the results")
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=list(TYPES), help="types to measure")
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds, each with a block of every side")
    parser.add_argument("--rows", type=int, default=2, help="sequences per batch")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds} gives no quartiles; give at least 2")
    torch.set_num_threads(1)
    title = f"forward and backward, {options.rows} x {options.length} tokens"
    table = Table("type", "stage / model", "quartiles", "CPU", "context / step", title=title, title_justify="left")
    results: dict[str, Any] = {}
    for name in options.types:
        sides = sides_of(name, rows=options.rows, length=options.length)
        rounds = alternate(sides.ours, sides.theirs, warmup=2, rounds=options.rounds, steps=1, barrier=lambda: None)
        found: Comparison = summarise([rounds], steps=1)
        share = median_s(sides.context, 20) / found.theirs_s
        low, high = found.quartiles
        table.add_row(name, f"{found.median:.3f}", f"{low:.3f} - {high:.3f}", f"{found.cpu:.3f}", f"{share:.2%}")
        results[name] = found._asdict() | {"context": share}
    deriving_s = derive_s()
    console = Console()
    console.print(table)
    console.print(f"deriving the layers of a model of 671 billion parameters: {deriving_s:.1f} s")
    with tempfile.TemporaryDirectory() as directory:
        offloaded = offload_shares(options.rounds, Path(directory))
    for name, (low, middle, high) in offloaded.items():
        console.print(f"{name}: {middle:.2f} of the bandwidth of copy_, quartiles {low:.2f} - {high:.2f}")
    about = {"torch": torch.__version__, "rows": options.rows, "length": options.length, "derive_s": deriving_s}
    about |= {"offload": offloaded}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "types": results}, indent=1))


if __name__ == "__main__":
    main()
