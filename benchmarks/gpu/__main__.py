"""All benchmarks of one or two GPUs, each in a process of its own with a time limit:

    .venv/bin/pip install -c constraints.txt -e '.[cuda,bench]'      # as make bench-gpu does
    .venv/bin/python -m benchmarks.gpu [--quick] [--only ranks,step] [--rehearse] [--out runs/benchmarks/gpu]

--rehearse runs the parts small, on CPUs: it shows that they end, and their times mean nothing. The part "kernels" needs
CuPy, and is left out then.

Writes a JSON file and the printed tables (*.txt) of each part into --out, and a profile of a step (profile.txt).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """A benchmark with its arguments."""

    module: str
    quick_s: int
    """Time limit with --quick, seconds."""
    full_s: int
    """Time limit without."""
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    """Further arguments with --quick."""
    rehearse: tuple[str, ...] | None = ("--rehearse",)
    """Further arguments with --rehearse; None = it needs a GPU."""


RECOVERY = ("--rounds", "3", "--torchrun-rounds", "0", "--cost-starts", "0", "--svg", os.devnull)
PARTS = {
    "ranks": Part("gpu.ranks", 120, 300),
    "step": Part("gpu.step", 90, 240, rehearse=("--size", "tiny")),
    "overlap": Part("gpu.overlap", 45, 90),
    "recovery": Part("runs.recovery", 120, 300, RECOVERY, ("--rounds", "1"), ("--rounds", "1")),
    "kernels": Part("gpu.kernels", 60, 180, rehearse=None),
}
"""In an order in which those that were measured least come first."""


def run(part: str, out: Path, *, quick: bool, rehearses: bool) -> str:
    """Run a part; return why it failed, empty if it did not."""
    module, quick_s, full_s, arguments, of_quick, of_rehearsal = PARTS[part]
    limit_s, results = 600 if rehearses else quick_s if quick else full_s, out / f"{part}.json"
    arguments += (of_rehearsal or ()) if rehearses else ()
    results.unlink(missing_ok=True)  # else those of another day would be taken for this part's
    command = [sys.executable, "-m", f"benchmarks.{module}", "--json", str(results), *arguments]
    command += [*(of_quick if quick else ()), *(("--profile", str(out / "profile.txt")) if part == "step" else ())]
    with (out / f"{part}.txt").open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it has started, too
            process.wait()
            return f"exceeded its limit of {limit_s} s"
    if code:
        return f"ended with {code}"
    return "" if results.exists() else "ended without results"


def main() -> None:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: about 5 minutes instead of 15")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, comma-separated")
    parser.add_argument("--out", type=Path, help="directory of the results; default: runs/benchmarks/gpu, or rehearsal")
    parser.add_argument("--rehearse", action="store_true", help="run the parts small, on CPUs")
    options = parser.parse_args()
    out: Path = options.out or Path("runs/benchmarks", "rehearsal" if options.rehearse else "gpu")
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in options.only.split(","):
        if options.rehearse and PARTS[part].rehearse is None:
            continue
        started = time.perf_counter()
        print(f"{part}: started", flush=True)
        problem = run(part, out, quick=options.quick, rehearses=options.rehearse)
        print((out / f"{part}.txt").read_text())
        print(f"{part}: {problem or 'done'}, after {time.perf_counter() - started:.0f} s", flush=True)
        failed += [f"{part} ({problem})"] * bool(problem)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
