"""All benchmarks of one or two GPUs, each in a process of its own with a time limit:

    .venv/bin/python -m benchmarks.gpu [--quick] [--only step,kernels] [--out runs/benchmarks/gpu]

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

PARTS = {"step": (90, 240), "kernels": (60, 180), "overlap": (45, 90), "ranks": (180, 600)}
"""Time limit of each part with and without --quick, seconds."""


def run(part: str, out: Path, *, quick: bool) -> int:
    """Run a part; return its exit code, -9 if it took too long."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{part}", "--json", str(out / f"{part}.json")]
    command += ["--quick"] * quick + (["--profile", str(out / "profile.txt")] if part == "step" else [])
    limit_s = PARTS[part][0 if quick else 1]
    with (out / f"{part}.txt").open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it has started, too
            return process.wait()


def main() -> None:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: about 5 minutes instead of 20")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/gpu"), help="directory of the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in options.only.split(","):
        started = time.perf_counter()
        print(f"{part}: at most {PARTS[part][0 if options.quick else 1]} s", flush=True)
        code = run(part, options.out, quick=options.quick)
        print((options.out / f"{part}.txt").read_text())
        print(f"{part}: ended with {code} after {time.perf_counter() - started:.0f} s", flush=True)
        failed += [part] * (code != 0)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
