"""Share of rows that best-fit packing fills, and its time, against TRL's on the same lengths of documents:

    python -m venv runs/trl && runs/trl/bin/pip install trl        # apart: it may need other versions than acsgd
    .venv/bin/python -m benchmarks.data.packing [--trl runs/trl/bin/python] [--documents 200000]

TRL's strategy "bfd" packs tables of tokens, ours lengths; its time is that of the function that packs, without loading.
The same arrays are packed by both, in processes of their own, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from acsgd.io.data.rows.layout import best_fit
from acsgd.io.data.sampler import Ints

THEIRS = """
import sys, time
import numpy as np, pyarrow as pa
from datasets import Dataset
from trl.data_utils import pack_dataset
lengths = np.load(sys.argv[1])
offsets = np.concatenate([[0], np.cumsum(lengths)])
tokens = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
dataset = Dataset(pa.table({"input_ids": tokens})).with_format("arrow")
started = time.perf_counter()
packed = pack_dataset(dataset, int(sys.argv[2]), "bfd", {"batch_size": len(lengths), "load_from_cache_file": False})
print(len(packed), time.perf_counter() - started)
"""


def lengths_of(name: str, documents: int, sequence: int) -> Ints:
    """Return lengths of documents in tokens, at most `sequence`."""
    draw = np.random.default_rng(0)
    drawn = {
        "lognormal": lambda: draw.lognormal(5.5, 1.2, documents).astype(np.int64),
        "uniform": lambda: draw.integers(1, sequence + 1, documents),
        "half": lambda: draw.normal(sequence * 0.45, sequence * 0.1, documents).astype(np.int64),
    }[name]()
    return np.clip(drawn, 1, sequence)


def ours(lengths: Ints, sequence: int) -> tuple[int, float]:
    """Return the number of rows, and seconds."""
    started = time.perf_counter()
    rows = best_fit(lengths, sequence)
    return int(rows.max()) + 1, time.perf_counter() - started


def theirs(python: str, lengths: Path, sequence: int) -> tuple[int, float]:
    command = [python, "-c", THEIRS, lengths, str(sequence)]
    rows, seconds = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]
    return int(rows), float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="runs/trl/bin/python", help="python of an environment with TRL")
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/packing.json"))
    options = parser.parse_args()
    table = Table("lengths", "row", "ours, rows", "TRL, rows", "ours, filled", "TRL, filled", "ours, s", "TRL, s")
    results: dict[str, Any] = {}
    for name in ("lognormal", "uniform", "half"):
        for sequence in (512, 2048, 8192):
            lengths = lengths_of(name, options.documents, sequence)
            with tempfile.NamedTemporaryFile(suffix=".npy") as file:
                np.save(file.name, lengths)
                pairs = [
                    (ours(lengths, sequence), theirs(options.trl, Path(file.name), sequence))
                    for _ in range(options.rounds)
                ]
            rows = [side[0] for side in pairs[0]]
            filled = [f"{lengths.sum() / (count * sequence):.4%}" for count in rows]
            seconds = [statistics.median(pair[side][1] for pair in pairs) for side in (0, 1)]
            table.add_row(name, str(sequence), *(f"{n:,}" for n in rows), *filled, *(f"{s:.2f}" for s in seconds))
            results[f"{name} {sequence}"] = {"rows": rows, "seconds": seconds}
    Console().print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"documents": options.documents, "results": results}, indent=2))


if __name__ == "__main__":
    main()
