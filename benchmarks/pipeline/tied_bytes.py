"""Bytes per step of ways to share the embedding of a tied model between the first and the last stage, without training:

    .venv/bin/python -m benchmarks.pipeline.tied_bytes --tokenizer gpt2/tokenizer.json --text wikitext-2/train.txt

dense   the fp32 gradient of the whole table from each of both ranks to the other
rows    `pp.tied=rows`: the rows of the different tokens of a step and their gradients, in fp32, and the request
ring    embedding and head on one rank: one more hop of the activations of every token, forward and backward. Its bytes
        are those of the codecs of the links; shown in fp32, and with 4 bits forward and 8 bits backward

Bytes are of both directions, of one replica, in MB; headers are left out. One step trains on consecutive text. The
number of different tokens is the mean over steps; it depends on tokenizer and text, so that of GPT-2 stands for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

TOKENS = (1024, 4096, 16384, 65536)


class Model(NamedTuple):
    """Size of a table."""

    name: str
    vocabulary: int
    hidden: int


MODELS = (
    Model("GPT-2", 50257, 768),
    Model("Llama-3.2-1B", 128256, 2048),
    Model("Gemma-2-2B", 256000, 2304),
    Model("Qwen2.5-0.5B", 151936, 896),
)


def megabytes(model: Model, tokens: int, different: float) -> dict[str, float]:
    """Return the bytes of both directions of a step, MB, by the way to share the table."""
    rows = different * model.hidden
    activations = tokens * model.hidden
    sent = {
        "dense": 2 * 4 * model.vocabulary * model.hidden,
        "rows": 2 * 4 * rows + 8 * different,
        "rows:bits=8": 2 * (rows + 2 * different) + 8 * different,
        "ring, fp32": 2 * 4 * activations,
        "ring, 4 / 8 bits": 1.5 * activations,
    }
    return {name: size / 1e6 for name, size in sent.items()}


def count_different(ids: torch.Tensor, tokens: int) -> float:
    """Return the mean number of different tokens in pieces of `tokens` tokens."""
    pieces = ids[: len(ids) // tokens * tokens].view(-1, tokens)[:64]
    return statistics.mean(len(piece.unique()) for piece in pieces)


def main() -> None:
    """Count, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--json", type=Path, default=Path("runs/benchmarks/tied_bytes.json"), help="path of the results"
    )
    options = parser.parse_args()
    ids = torch.tensor(Tokenizer.from_file(str(options.tokenizer)).encode(options.text.read_text()).ids)
    different = {tokens: count_different(ids, tokens) for tokens in TOKENS if tokens <= len(ids)}
    table = Table("model", "tokens per step", "different", title="MB per step, both directions")
    results = []
    for model in MODELS:
        for tokens, count in different.items():
            sent = megabytes(model, tokens, count)
            if not results:
                for name in sent:
                    table.add_column(name, justify="right")
            table.add_row(model.name, f"{tokens:,}", f"{count:,.0f}", *(f"{size:,.1f}" for size in sent.values()))
            results.append({"model": model.name, "tokens": tokens, "different": count, **sent})
    Console(width=140).print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
