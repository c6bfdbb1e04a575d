"""Does a run survive being ended at any moment? End one again and again, resume it, and compare, bit for bit:

    .venv/bin/python -m benchmarks.runs.crash [--kills 500] [--processes 1|2|4] [--signal KILL|TERM] [--seed 0]

tests/lib/crashes.py states what is checked.
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

from tests.lib.crashes import Campaign, summary


def table(result: dict[str, Any]) -> Table:
    """Show what happened."""
    phases, steps = result["phases"], result["resumed_from"]
    shown = Table(title=f"{result['signal']}, processes: {result['processes']}", show_header=False)
    rows = {
        "starts that were ended": result["kills"],
        "... while starting": phases["starting"],
        "... between saves": phases["training"],
        "... while saving": phases["saving"],
        "... while removing an old checkpoint": phases["removing"],
        "starts that went on from a checkpoint": result["resumed"],
        "... of so many different steps": f"{len(steps)}, {min(steps, default=0)} to {max(steps, default=0)}",
        "half-written directories found, told and removed": result["leftovers"],
        "runs that came to their end, all bit for bit the undisturbed one": result["runs_finished_and_equal"],
        "seconds": result["seconds"],
    }
    for name, value in rows.items():
        shown.add_row(name, str(value))
    return shown


def main() -> None:
    """Run a campaign, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--signal", default="KILL", choices=("KILL", "TERM"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/crash.json"), help="where the numbers go")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        number = signal.Signals[f"SIG{options.signal}"]
        campaign = Campaign(Path(directory), options.processes, number, options.seed)
        campaign.run(options.kills)
    result = summary(campaign, time.monotonic() - begun)
    Console(width=120).print(table(result))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
