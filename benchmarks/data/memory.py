"""Peak memory of tokenizing files of JSON lines of several sizes, each in a process of its own:

    .venv/bin/python -m benchmarks.data.memory [--megabytes 50,200,800]

The records are those of `benchmarks.data.tokenize`; the tokens go to disk. The first row, without records, is what the
imports take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.data.tokenize import CORES, KINDS, load, pieces, tokens_of


def write(path: Path, kind: str, text: str, nbytes: int) -> None:
    """Write records of about `nbytes` in all."""
    with path.open("w") as file:
        for each in pieces(text):
            if file.tell() >= nbytes:
                return
            file.write(json.dumps(KINDS[kind].record(each)) + "\n")


def measure(path: Path, model: Path) -> None:
    """Tokenize a file in this process; print tokens, seconds and peak memory in MiB."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    started, tokens = time.perf_counter(), 0
    if path.stat().st_size:
        with tempfile.TemporaryDirectory() as scratch:
            tokens = len(tokens_of(path, tokenizer, Path(scratch)).tokens)
    seconds = time.perf_counter() - started
    print(json.dumps([tokens, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", default="50,200,800")
    parser.add_argument("--kind", default="text", choices=sorted(KINDS))
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/data-memory.json"))
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    text = "\n".join(topics[topic] for topic in sorted(topics))
    table = Table("MB of records", "M tokens", "M tokens/s", "peak memory, MiB")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, path = Path(scratch) / "model", Path(scratch) / "records.jsonl"
        load(None, text, KINDS[options.kind].template).save_pretrained(model)
        for size in [0, *map(int, options.megabytes.split(","))]:
            write(path, options.kind, text, size * 10**6)
            command = [sys.executable, "-m", "benchmarks.data.memory", "--measure", path, model]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            tokens, seconds, peak = json.loads(done.stdout.splitlines()[-1])
            table.add_row(str(size), f"{tokens / 1e6:.1f}", f"{tokens / seconds / 1e6:.2f}", f"{peak:.0f}")
            results[str(size)] = {"tokens": tokens, "seconds": seconds, "peak_mib": peak}
    Console().print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"cores": CORES, "kind": options.kind, "results": results}, indent=2))


if __name__ == "__main__":
    main()
