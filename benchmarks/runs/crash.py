"""Runs that are killed at random moments and resumed, compared bit for bit with an undisturbed run:

    .venv/bin/python -m benchmarks.runs.crash [--kills 500] [--processes 1|2|4] [--signal KILL|TERM] [--seed 0]

What is checked: see tests/lib/crashes.py. A failed check is an AssertionError.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from tests.lib.crashes import Campaign, summary


def table(result: dict[str, Any]) -> Table:
    """Return a table of the number of starts by outcome."""
    phases, steps = result["phases"], result["resumed_from"]
    shown = Table(title=f"{result['signal']}, processes per run: {result['processes']}", show_header=False)
    rows = {
        "starts that were killed": result["kills"],
        "... while starting": phases["starting"],
        "... between saves": phases["training"],
        "... while saving": phases["saving"],
        "... while removing an old checkpoint": phases["removing"],
        "starts that resumed from a checkpoint": result["resumed"],
        "... number of different steps, range": f"{len(steps)}, {min(steps, default=0)} to {max(steps, default=0)}",
        "incomplete checkpoints that a start reported and removed": result["leftovers"],
        "runs that reached their last step, all equal to the undisturbed run": result["runs_finished_and_equal"],
        "seconds": result["seconds"],
    }
    for name, value in rows.items():
        shown.add_row(name, str(value))
    return shown


def main() -> None:
    """Run the campaign, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="number of starts to kill")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4), help="processes per run")
    parser.add_argument("--signal", default="KILL", choices=("KILL", "TERM"), help="signal that ends a run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/crash.json"), help="path of the results")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        number = signal.Signals[f"SIG{options.signal}"]
        campaign = Campaign(Path(directory), options.processes, number, options.seed)
        campaign.run(options.kills)
    result = summary(campaign, time.monotonic() - started)
    Console(width=120).print(table(result))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
