"""Put the results of `python -m benchmarks.gpu` into docs/measurements/gpu.md:

    .venv/bin/python -m benchmarks.gpu.tables [runs/benchmarks/gpu]

A part without results keeps its text. The text between <!-- NAME: begin --> and <!-- NAME: end --> is replaced.
Move the first results of a part out of the section "Not measured yet" by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path("docs/measurements/gpu.md")
Results = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def of_step(results: Results) -> str:
    """Return the table of benchmarks.gpu.step."""
    low, high = results["quartiles"]
    rows = [["seconds per step", f"{results['ours_s']:.4f}", f"{results['theirs_s']:.4f}"]]
    for name, rates in results["rates"].items():
        digits = ",.0f" if max(rates) > 100 else ".1%"
        rows.append([name, *(f"{rate:{digits}}".replace("%", " %") for rate in rates)])
    rows.append(["ratio, median (quartiles)", f"{results['median']:.3f} ({low:.3f} - {high:.3f})", ""])
    return table(["", "acsgd", "plain loop"], rows)


def of_kernels(results: Results) -> str:
    """Return the table of benchmarks.gpu.kernels."""
    medians: dict[tuple[str, str], list[float]] = {}
    for case, (_, median, _) in results["quartiles"].items():
        kernel, dtype, _ = case.rsplit(", ", 2)
        medians.setdefault((kernel, dtype), []).append(median)
    kernels, dtypes = ([*dict.fromkeys(key[axis] for key in medians)] for axis in (0, 1))

    def cell(kernel: str, dtype: str) -> str:
        of_bits = medians[kernel, dtype]
        return f"{100 * min(of_bits):.0f} to {100 * max(of_bits):.0f} %"

    rows = [[kernel, *(cell(kernel, dtype) for dtype in dtypes)] for kernel in kernels]
    bandwidth = results["copy_gb_per_s"] / 1e3
    return f"`copy_` moved {bandwidth:.2f} TB/s.\n\n" + table(["kernel", *dtypes], rows)


def of_overlap(results: Results) -> str:
    """Return the table of benchmarks.gpu.overlap."""
    rows = []
    for spec, row in results["codecs"].items():
        low, median, high = (100 * each for each in row["hidden"])
        times = (f"{1e3 * row[key]:.2f}" for key in ("compute_s", "message_s", "both_s"))
        rows.append([f"`{spec}`", f"{row['bytes'] / 1e6:.1f}", *times, f"{median:.0f} % ({low:.0f} - {high:.0f})"])
    return table(["codec", "MB", "compute, ms", "message, ms", "both, ms", "hidden (quartiles)"], rows)


def of_ranks(cases: Sequence[Results]) -> str:
    """Return the table of the cases of benchmarks.gpu.ranks."""
    rows = []
    for case in cases:
        low, high = case["quartiles"]
        times = f"{case['ours_s']:.3f}", f"{case['theirs_s']:.3f}"
        rows.append([case["case"], case["baseline"], *times, f"{case['median']:.3f} ({low:.3f} - {high:.3f})"])
    return table(["acsgd", "compared with", "acsgd, s", "other, s", "ratio (quartiles)"], rows)


def of_messages(messages: Results) -> str:
    """Return the table of the messages of benchmarks.gpu.ranks."""
    rows = [[name, *(f"{1e6 * seconds:.0f}" for seconds in each)] for name, each in messages.items()]
    return table(["message", "gloo, us", "NCCL, us"], rows)


def of_recovery(results: Results) -> str:
    """Return the table of benchmarks.runs.recovery."""
    rows = []
    for row in results["rows"]:
        seconds = row["seconds"]
        rows.append([row["name"], str(len(seconds)), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"])
    return table(["event", "rounds", "median, s", "longest, s"], rows)


def read(directory: Path, name: str) -> Results | None:
    """Return the results of a part, None if it has none."""
    path = directory / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def texts(directory: Path) -> dict[str, str]:
    """Return the text of each part that has results."""
    found = {}

    def add(name: str, results: Results, text: str) -> None:
        where = f"{results['device']}, torch {results['torch']}, {results['date']}"
        found[name] = f"{where}; {text}" if text.startswith("`") else f"{where}.\n\n{text}"

    for name, of in {"step": of_step, "kernels": of_kernels, "overlap": of_overlap}.items():
        if results := read(directory, name):
            add(name, results, of(results))
    if results := read(directory, "ranks"):
        add(
            "ranks",
            results | {"device": f"{results['device']}, acsgd over {results['transport']}"},
            of_ranks(results["cases"]),
        )
        add("messages", results, of_messages(results["messages"]))
    if recovery := read(directory, "recovery"):
        add("recovery", recovery["about"], of_recovery(recovery))
    return found


def main() -> None:
    """Replace the texts of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/benchmarks/gpu"))
    options = parser.parse_args()
    page = PAGE.read_text()
    for name, text in texts(options.directory).items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        page, count = re.subn(
            rf"{begin}\n.*?{end}", lambda _, t=text, b=begin, e=end: f"{b}\n{t}\n{e}", page, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"{PAGE} has {count} places for {name}")
        print(f"{PAGE}: {name}")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
