"""From torchrun to the first step of a run that goes on from a checkpoint: which part takes how long.

    .venv/bin/python -m benchmarks.runs.start            about 2 minutes

The model is that of `make demo`, on 2 stages x 2 replicas. Each start is a real one, under torchrun; every rank notes
the time when it has come to the end of a part. Of each part the slowest rank counts.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
RANKS, STARTS = 4, 7
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]


def launch(directory: Path, *flags: str) -> float:
    """Start the demo's run under torchrun, to its end; return the time.time() at which it was launched."""
    run = [str(ROOT / "benchmarks/runs/start_timed.py"), str(directory / "notes"), str(ROOT / "examples/demo.toml")]
    options = [
        "--model.name",
        str(directory / "model"),
        "--log.dir",
        str(directory / "run"),
        "--log.to",
        "jsonl",
        "--optim.warmup",
        "0",
    ]
    launched = time.time()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*TORCHRUN, *run, *options, *flags], env=environment, check=True, stdout=subprocess.DEVNULL)
    return launched


def parts(directory: Path, launched: float) -> dict[str, float]:
    """Return the seconds of each part of a start: from the slowest rank of the part before to the slowest of this."""
    ranks = [json.loads(path.read_text()) for path in sorted(directory.glob("notes-*"))]
    assert len(ranks) == RANKS
    seconds, before = {}, launched
    for notes in zip(*ranks, strict=True):
        latest = max(at for _, at in notes)
        seconds[notes[0][0]] = latest - before
        before = latest
    return seconds


def main() -> None:
    """Measure, print a table and a line of JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        runpy.run_path(str(ROOT / "examples/demo.py"))["make_model"](directory / "model")
        launch(directory, "--optim.steps", "1")  # makes the checkpoint and fills the caches
        starts = [parts(directory, launch(directory, "--optim.steps", str(2 + number))) for number in range(STARTS)]
    whole = statistics.median(sum(start.values()) for start in starts)
    table = Table("part", "share of the time, median", "quartiles", title=f"{STARTS} starts", title_justify="left")
    summary = {}
    for part in starts[0]:
        shares = [start[part] / sum(start.values()) for start in starts]
        low, median, high = statistics.quantiles(shares, n=4, method="inclusive")
        table.add_row(part, f"{median:.3f}", f"{low:.3f} - {high:.3f}")
        summary[part] = {"median": median, "quartiles": [low, high]}
    Console().print(table)
    print(json.dumps({"starts": STARTS, "median_s": whole, "shares": summary}))


if __name__ == "__main__":
    main()
