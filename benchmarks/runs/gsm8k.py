"""Instruction tuning on GSM8K with LoRA on 2 stages x 2 replicas: exact match before and after, by acsgd's own
commands:

    .venv/bin/python -m benchmarks.runs.gsm8k DIRECTORY [--dir runs/benchmarks/gsm8k]

DIRECTORY has train/*.jsonl and val/*.jsonl, whose records have an "input", the problem, and an "output", its solution.

base     a GPT-2 of 1.6 M parameters with new weights, trained on the problems and solutions of all files of train but
         the first as separate texts; so it has seen no problem with its solution
tuned    LoRA on the first PROBLEMS problems of the first file, for EPOCHS epochs: torchrun with 4 processes, then
         `acsgd convert merge`
scores   `acsgd eval --generate` of base and of the merged model: exact match of whole solutions, greedily decoded, and
         ROUGE, on the problems that LoRA was trained on, and on as many of val

A model of this size learns solutions by heart and does not calculate, so exact match rises on the first set only.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.small_model import save_blank

PROBLEMS = 16
EPOCHS = 400
SEQUENCE, BATCH = 384, 16
PRETRAIN_STEPS = 300
SIZES = {"vocabulary": 2048, "sequence": SEQUENCE, "hidden": 160, "blocks": 4, "heads": 4}
METRICS = ("exact_match", "rouge1", "rougeL")
BASE = f"""
[model]
name = "{{dir}}/blank"
init = "scratch"
[data]
sources = "{{dir}}/texts.jsonl"
sequence = {SEQUENCE}
batch = {BATCH}
[pp]
micro = 4
[optim]
lr = 2e-3
schedule = "cosine"
steps = {PRETRAIN_STEPS}
warmup = {PRETRAIN_STEPS // 10}
[log]
dir = "{{dir}}/base-run"
"""
TUNED = f"""
[model]
name = "{{dir}}/base"
[adapter]
spec = "lora:r=64,alpha=128"
[data]
sources = "{{dir}}/trained.jsonl"
input_format = "__input__\\n"
eval_sources = "{{dir}}/held-out.jsonl"
rows = "single"
sequence = {SEQUENCE}
batch = {BATCH}
[pp]
stages = 2
micro = 4
[optim]
lr = 5e-3
schedule = "cosine"
steps = {EPOCHS * PROBLEMS // BATCH}
warmup = 20
[log]
dir = "{{dir}}/tuned-run"
"""


class Scores(NamedTuple):
    """Scores of a model on a set of problems, by METRICS."""

    model: str
    problems: str
    values: dict[str, float]


def write_data(source: Path, directory: Path) -> None:
    """Write the texts of pretraining, and the problems to train on and to hold out. Raises ValueError without data."""
    train, val = (sorted((source / name).glob("*.jsonl")) for name in ("train", "val"))
    if len(train) < 2 or not val:
        raise ValueError(f"{source} has no GSM8K: it needs two files train/*.jsonl or more, and val/*.jsonl")
    others = [record for path in train[1:] for record in _records(path)]
    texts = [{"text": record[name]} for name in ("input", "output") for record in others]
    for name, records in (
        ("texts", texts),
        ("trained", _records(train[0])[:PROBLEMS]),
        ("held-out", _records(val[0])[:PROBLEMS]),
    ):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    save_blank(directory / "blank", "\n".join(text["text"] for text in texts), **SIZES)


def _records(path: Path) -> list[dict[str, str]]:
    with path.open() as file:  # str.splitlines also splits at U+2028, which JSON strings may contain
        return [json.loads(line) for line in file]


def train(directory: Path, run_file: str, processes: int) -> Path:
    """Train a run in `directory` under torchrun to its end; return its last checkpoint."""
    path = directory / "run.toml"
    path.write_text(run_file.format(dir=directory))
    run("torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m", "acsgd", path)
    name = "tuned" if run_file is TUNED else "base"
    return max((directory / f"{name}-run" / "checkpoints").glob("step-*"))


def run(module: str, *arguments: object) -> str:
    """Run a module of Python; return its standard output. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    print(shlex.join(["python", *command[1:]]), file=sys.stderr, flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def scores(directory: Path, model: str) -> list[Scores]:
    """Generate the solutions of both sets of problems with a model in `directory`; return its scores."""
    found = []
    for problems in ("trained", "held-out"):
        data = "--data", directory / f"{problems}.jsonl", "--input-format", "__input__\n"
        decoding = "--generate", "--max-new-tokens", 256, "--batch", 16
        printed = json.loads(run("acsgd", "eval", directory / model, *data, *decoding, "--json"))
        found.append(Scores(model, problems, {name: printed["metrics"][name] for name in METRICS}))
    return found


def table(rows: Sequence[Scores]) -> Table:
    """Return a table of the scores."""
    shown = Table("model", "problems", *METRICS, title=f"{PROBLEMS} problems each, LoRA for {EPOCHS} epochs")
    for row in rows:
        shown.add_row(row.model, row.problems, *(f"{row.values[name]:.3f}" for name in METRICS))
    return shown


def main() -> None:
    """Train, score, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="DIRECTORY", help="GSM8K")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks/gsm8k"), help="new directory of all files")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/gsm8k.json"), help="the scores")
    options = parser.parse_args()
    try:
        options.dir.mkdir(parents=True)
        write_data(options.source, options.dir)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    run("acsgd.cli", "convert", "to-hf", train(options.dir, BASE, processes=2), options.dir / "base")
    before = scores(options.dir, "base")
    run("acsgd.cli", "convert", "merge", train(options.dir, TUNED, processes=4), options.dir / "merged")
    rows = [*before, *scores(options.dir, "merged")]
    Console(width=100).print(table(rows))
    about = {"torch": torch.__version__, "problems": PROBLEMS, "epochs": EPOCHS}
    options.json.write_text(json.dumps({"about": about, "scores": [row._asdict() for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
