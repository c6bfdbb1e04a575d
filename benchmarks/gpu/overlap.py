"""Overlap of compute with codecs and copies to the host, as between stages on a GPU:

    .venv/bin/python -m benchmarks.gpu.overlap [--quick] [--rehearse] [--json runs/benchmarks/gpu/overlap.json]

compute    matrix products of bf16, on the current stream
message    an activation is encoded and copied to pinned memory on the side stream of acsgd.streams, as a link does

The two are timed alone and together, in turns, by the host's clock between synchronizations. Hidden is the fraction of
the shorter one's time by which both together are shorter than their sum; 100 % = the message costs nothing.

--rehearse runs it on the CPU with small tensors: it shows that the program ends, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from acsgd.codecs import parse
from acsgd.codecs.base import pack, wire_bytes
from acsgd.streams import Streams, open_streams
from benchmarks.common.compare import setting
from benchmarks.gpu.step import synchronize

SPECS = ("none", "none:dtype=bf16", "fixpoint:bits=8", "fixpoint:bits=4", "lloyd:bits=4", "hadamard")
SHAPE = (4, 2048, 4096)
"""Sequences, tokens, channels of the activation, bf16."""
WIDTH, PRODUCTS = 8192, 8
"""Of the matrix products of one round of compute."""

Work = Callable[[], None]


def message(spec: str, streams: Streams, shape: Sequence[int]) -> tuple[Work, int]:
    """Return what encodes an activation and copies it to the host, and the bytes of the message."""
    codec, x = parse(spec), torch.randn(*shape, device=streams.device).bfloat16().flatten(0, 1)
    nbytes = wire_bytes(codec.wire(tuple(x.shape), x.dtype))
    host = streams.host_buffer(nbytes)

    def work() -> None:
        with streams.side_stream(x):
            pack(codec.encode(x), host)

    return work, nbytes


def compute(streams: Streams, width: int) -> Work:
    """Return the matrix products."""
    a, b = (torch.randn(width, width, device=streams.device).bfloat16() for _ in range(2))

    def work() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, b)

    return work


def seconds(device: torch.device, *works: Work) -> float:
    """Return the time until the device has done all works, which are issued one after the other."""
    synchronize(device)
    started = time.perf_counter()
    for work in works:
        work()
    synchronize(device)
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = Path("runs/benchmarks/gpu/overlap.json")
    parser.add_argument("--json", type=Path, default=path, help="path of the results")
    parser.add_argument("--quick", action="store_true", help="7 rounds per codec instead of 31")
    parser.add_argument("--rehearse", action="store_true", help="run everything small, on the CPU")
    options = parser.parse_args()
    console = Console(width=120)
    if not (options.rehearse or torch.cuda.is_available()):
        console.print("No CUDA device: nothing is measured.")
        return
    streams = open_streams("cpu" if options.rehearse else "cuda", 0)
    on = "CPU, a rehearsal" if options.rehearse else torch.cuda.get_device_name()
    products, rows = compute(streams, 64 if options.rehearse else WIDTH), {}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for spec in SPECS:
        send, nbytes = message(spec, streams, (2, 16, 64) if options.rehearse else SHAPE)
        works = {"compute": (products,), "message": (send,), "both": (send, products)}
        times: dict[str, list[float]] = {name: [] for name in works}
        for number in range((7 if options.quick else 31) + 2):
            for name, each in works.items():
                took = seconds(streams.device, *each)
                if number >= 2:  # the first rounds are the warm-up
                    times[name].append(took)
        alone, both = zip(times["compute"], times["message"], strict=True), times["both"]
        hidden = [(a + b - c) / min(a, b) for (a, b), c in zip(alone, both, strict=True)]
        medians = {f"{name}_s": statistics.median(each) for name, each in times.items()}
        rows[spec] = medians | {"bytes": nbytes, "hidden": statistics.quantiles(hidden, n=4)}
        options.json.write_text(json.dumps({**setting(on), "codecs": rows}, indent=1) + "\n")
    table = Table("codec", "MB", "compute, ms", "message, ms", "both, ms", "hidden", "quartiles", title=on)
    for spec, row in rows.items():
        low, median, high = row["hidden"]
        numbers = (f"{row[key] * 1e3:.2f}" for key in ("compute_s", "message_s", "both_s"))
        table.add_row(spec, f"{row['bytes'] / 1e6:.1f}", *numbers, f"{median:.0%}", f"{low:.0%} - {high:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
