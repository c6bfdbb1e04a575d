"""Time from torchrun to the first step of a resumed run, part by part:

    .venv/bin/python -m benchmarks.runs.start [--json runs/benchmarks/start.json]

The run is that of examples/demo.py, on 2 stages x 2 replicas, started with torchrun. Every rank records the time at
which it completes each part; a part ends when the slowest rank completes it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from examples.demo import write_inputs

ROOT = Path(__file__).parents[2]
RANKS = 4
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]


def launch(directory: Path, *, steps: int) -> float:
    """Run the demo under torchrun up to step `steps`; return the time.time() of the launch."""
    script = [ROOT / "benchmarks/runs/start_timed.py", directory / "times", ROOT / "examples/demo.toml"]
    flags = {
        "model.name": directory / "model",
        "data.sources": directory / "stories.jsonl",
        "log.dir": directory / "run",
        "log.to": "jsonl",
    }
    flags |= {"optim.warmup": 0, "optim.steps": steps}
    command = [*TORCHRUN, *map(str, script), *(f"--{key}={value}" for key, value in flags.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    launched = time.time()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return launched


def parts_of(directory: Path, launched: float) -> dict[str, float]:
    """Return the seconds of each part of a start: from the slowest rank's previous part to that of this one."""
    ranks = [json.loads(path.read_text()) for path in sorted(directory.glob("times-*"))]
    assert len(ranks) == RANKS
    seconds, previous = {}, launched
    for times in zip(*ranks, strict=True):
        latest = max(time_s for _, time_s in times)
        seconds[times[0][0]] = latest - previous
        previous = latest
    return seconds


def measure(number: int) -> list[dict[str, float]]:
    """Return the seconds of each part, by start."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_inputs(directory)
        launch(directory, steps=1)  # writes the first checkpoint and fills the caches
        return [parts_of(directory, launch(directory, steps=2 + index)) for index in range(number)]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/start.json"), help="path of the results")
    parser.add_argument("--starts", type=int, default=7, help="number of timed starts, 2 or more")
    options = parser.parse_args()
    starts = measure(options.starts)
    total_s = statistics.median(sum(start.values()) for start in starts)
    title = f"{options.starts} starts, {total_s:.1f} s each"
    table = Table("part", "fraction of the time, median", "quartiles", title=title, title_justify="left")
    summary = {}
    for part in starts[0]:
        fractions = [start[part] / sum(start.values()) for start in starts]
        low, median, high = statistics.quantiles(fractions, n=4, method="inclusive")
        table.add_row(part, f"{median:.3f}", f"{low:.3f} - {high:.3f}")
        summary[part] = {"median": median, "quartiles": [low, high]}
    Console().print(table)
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor(),
    }
    about |= {"starts": options.starts, "median_s": total_s}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "fractions": summary}, indent=1))


if __name__ == "__main__":
    main()
