"""Streamed sources against tokenizing first: time until the first batch, speed of tokenizing, memory and disk:

    .venv/bin/python -m benchmarks.data.stream [--megabytes 50,200] [--sequence 1024] [--window 1024]

A file of JSON lines with the records of `benchmarks.data.memory`, without anything in a cache; each measurement is a
process of its own. "first batch" is the time from the opened model's config to the first 32 sequences; "at the end"
that of a run that resumes before the last windows from a cursor; "M tokens/s" is measured with a reader that takes
sequences as fast as they come, and so is the peak memory.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from transformers import AutoConfig, AutoTokenizer

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.rows.base import Rows
from acsgd.io.data.rows.streamed import StreamedRows, StreamState
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.files.fields import from_json
from acsgd.run.setup.rows import RowMaker
from acsgd.tasks import find_task
from benchmarks.data.memory import write
from benchmarks.data.tokenize import CORES, load

BATCH = 32


def open_rows(options: argparse.Namespace, scratch: Path, sources: str, run: str) -> Rows:
    """Open the rows of a source with an empty cache."""
    data = DataConfig(sources=sources, sequence=options.sequence, batch=BATCH, window=options.window)
    config = Config(ModelConfig("none"), data, OptimConfig(lr=1e-3, steps=1), log=LogConfig(dir=str(scratch / run)))
    tokenizer = AutoTokenizer.from_pretrained(scratch / "model")
    eos = tokenizer.eos_token_id
    model = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos)
    found = parse_sources(sources)
    spec, cache = RowSpec.of(config, find_task(config.model.task), model, tokenizer, found), scratch / run / "cache"
    [rows] = RowMaker(spec, model, tokenizer, "none", cache, stream_dir=scratch / run / "streams").open(found)
    return rows


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return the measurements of one process."""
    path, started = scratch / "records.jsonl", time.perf_counter()
    source = str(path) if options.measure == "mapped" else f"stream:{path}"
    rows = open_rows(options, scratch, source, options.measure)
    if options.measure == "resumed":
        assert isinstance(rows, StreamedRows)
        number, state = json.loads((scratch / "state.json").read_text())
        rows.restore(from_json(StreamState, state))
        first = number
    else:
        first = 0
    for index in range(first, first + BATCH):
        rows.read(index)
    found = {"first_s": time.perf_counter() - started}
    if options.measure == "streamed":
        assert isinstance(rows, StreamedRows)
        number = BATCH
        while rows.cache.total is None:
            rows.read(number)
            number += 1
        seconds = time.perf_counter() - started
        tokens = rows.cache.total * options.sequence
        at = max(0, (rows.cache.total // options.window - 2) * options.window)
        (scratch / "state.json").write_text(json.dumps([at, dataclasses.asdict(rows.state(at))]))
        disk = sum(each.stat().st_size for each in (scratch / "streamed" / "streams").rglob("*") if each.is_file())
        found |= {"tokens": tokens, "tokens_per_s": tokens / seconds, "disk_mb": disk / 1e6}
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    if isinstance(rows, StreamedRows):
        rows.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", default="50,200")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/data-stream.json"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options, options.scratch)))
        return
    text = "\n".join(topics[topic] for topic in sorted(topics))
    columns = ("tokenized first", "streamed", "at the end", "M tokens/s", "peak memory, MiB", "disk, MB")
    table, results = Table("MB of records", "M tokens", *columns), dict[str, Any]()
    for size in map(int, options.megabytes.split(",")):
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            load(None, text, None).save_pretrained(scratch / "model")
            write(scratch / "records.jsonl", "text", text, size * 10**6)
            found = {}
            for side in ("mapped", "streamed", "resumed"):
                command = [sys.executable, "-m", "benchmarks.data.stream", "--measure", side, "--scratch", scratch]
                command += ["--sequence", str(options.sequence), "--window", str(options.window)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found[side] = json.loads(done.stdout.splitlines()[-1])
        results[str(size)], streamed = found, found["streamed"]
        seconds = (f"{found[side]['first_s']:.1f} s" for side in ("mapped", "streamed", "resumed"))
        figures = (f"{streamed['tokens_per_s'] / 1e6:.2f}", f"{streamed['peak_mib']:.0f}", f"{streamed['disk_mb']:.0f}")
        table.add_row(str(size), f"{streamed['tokens'] / 1e6:.1f}", *seconds, *figures)
    Console().print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"cores": CORES, "results": results}, indent=2))


if __name__ == "__main__":
    main()
