"""Seconds until the first batch of a large source whose tokens, and packed rows, are in the cache:

    .venv/bin/python -m benchmarks.data.first_batch [--gigabytes 10] [--directory DIR]

The tokens are random, of 2 bytes each, in documents of 200 to 1800; they are written at the beginning, in a temporary
directory, with the checksums of a real entry. Each measurement is a process of its own, without files of the entry in
the page cache: from the opened model to the first batch of 32 sequences of 1024 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig
from acsgd.io.data.tokens import tokens as tokens_module
from acsgd.io.data.tokens.corpus import OFFSETS, TOKENS
from acsgd.io.data.tokens.tokens import TokenStats
from acsgd.io.files.arrays import ArrayWriter
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.data import open_data
from benchmarks.common.small_model import save_blank

GOAL_S = 5.0
VOCABULARY = 257
CHUNK = 2**24
"""Tokens that are drawn at a time."""
ROWS = ("concat", "pack")


def config_of(scratch: Path, rows: str) -> Config:
    return Config(
        model=ModelConfig(str(scratch / "model"), init="scratch"),
        data=DataConfig(sources=str(scratch / "large.jsonl"), sequence=1024, batch=32, rows=rows),
        optim=OptimConfig(lr=1e-3, steps=1, warmup=0),
        pp=PipelineConfig(stages=1, micro=4),
        log=LogConfig(dir=str(scratch / "run")),
    )


def write_tokens(directory: Path, number: int) -> TokenStats:
    """Write the arrays of an entry with random tokens."""
    draw = np.random.default_rng(0)
    with (
        ArrayWriter(directory / TOKENS, np.dtype("<u2")) as tokens,
        ArrayWriter(directory / OFFSETS, np.dtype("<i8")) as offsets,
    ):
        offsets.append(np.zeros(1))
        last = 0
        while tokens.length < number:
            ends = last + np.cumsum(draw.integers(200, 1801, CHUNK // 1000))
            tokens.append(draw.integers(0, VOCABULARY, ends[-1] - last, dtype=np.uint16))
            offsets.append(ends)
            last = int(ends[-1])
    return TokenStats(VOCABULARY - 1, last, overlap=0, skipped=None, format="text", long=None)


def evict(directory: Path) -> None:
    """Remove the files of a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(scratch: Path, rows: str) -> None:
    """Print the seconds until the data are open, and until the first batch."""
    job = prepare(config_of(scratch, rows), Launch())
    evict(scratch / "cache")
    started = time.perf_counter()
    data = open_data(job)
    opened = time.perf_counter() - started
    batch = data.reader.batch(0)
    assert batch.inputs is not None
    print(json.dumps([opened, time.perf_counter() - started]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10, help="size of the tokens on disk")
    parser.add_argument("--directory", type=Path, help="where the temporary directory is made; default: the system's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/first-batch.json"))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(Path(options.measure[0]), options.measure[1])
        return
    table = Table("data.rows", "GB", "round", "data open, s", "first batch, s", "goal, s")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        scratch = Path(name)
        free = shutil.disk_usage(scratch).free / 1e9
        if free < 1.5 * options.gigabytes:
            sys.exit(f"error: {scratch} has {free:.1f} GB left; give --directory, or fewer --gigabytes")
        (scratch / "large.jsonl").write_text('{"text": "in the cache"}\n')
        save_blank(scratch / "model", "text", vocabulary=VOCABULARY, sequence=1024, hidden=16, blocks=1, heads=2)
        tokens_module.tokenize = lambda *args, **_: write_tokens(args[3], int(options.gigabytes * 5e8))
        for rows in ROWS:
            open_data(prepare(config_of(scratch, rows), Launch()))
            results[rows] = []
            for number in range(options.rounds):
                command = [sys.executable, "-m", "benchmarks.data.first_batch", "--measure", scratch, rows]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                opened, first = json.loads(done.stdout.splitlines()[-1])
                times = (f"{opened:.2f}", f"{first:.2f}", f"{GOAL_S:g}")
                table.add_row(rows, f"{options.gigabytes:g}", str(number + 1), *times)
                results[rows].append([opened, first])
    Console().print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"gigabytes": options.gigabytes, "results": results}, indent=2))


if __name__ == "__main__":
    main()
