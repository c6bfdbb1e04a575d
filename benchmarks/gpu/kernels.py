"""Fraction of a GPU's memory bandwidth that the fused codec kernels reach; needs a GPU and CuPy:

    .venv/bin/python -m benchmarks.gpu.kernels [--quick] [--json runs/benchmarks/gpu/kernels.json]

A kernel must read each input once and write each output once; scales are not counted. The result is these bytes per
second, relative to torch's copy_ of the same number of fp32 elements, which alternates with the kernel. The kernels run
in CUDA graphs and are timed by CUDA events, so Python's overhead is excluded. The goal is 90 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from acsgd.codecs.kernels import Kernels, UniformQuantization, kernels_for
from acsgd.codecs.layout import ScaleLayout, layout_of
from benchmarks.common.compare import setting

GOAL = 0.9
LAUNCHES = 10
"""Kernel launches per CUDA graph."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Case(NamedTuple):
    """One kernel with its arguments."""

    name: str
    nbytes: int
    """Bytes of the inputs and outputs."""
    work: Callable[[], object]


def main() -> None:
    """Measure, print, save."""
    arguments = parse_arguments()
    console, rounds = Console(width=120), 5 if arguments.quick else 15
    if not torch.cuda.is_available():
        console.print("No CUDA device: nothing is measured.")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    layout = layout_of((arguments.rows, arguments.width), "channel", 0)
    kernels = kernels_for(layout, device, *DTYPES.values())
    if kernels is None:
        console.print("CuPy is missing: pip install 'acsgd[cuda]'")
        return
    copy = copy_case(arguments.rows * arguments.width, device)
    bandwidth = statistics.median(copy.nbytes / seconds(graph_of(copy.work)) for _ in range(rounds))
    name, shares = torch.cuda.get_device_name(device), dict[str, list[float]]()
    result = {**setting(name), "copy_gb_per_s": bandwidth / 1e9, "quartiles": shares}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    for case in cases(kernels, layout, device):
        shares[case.name] = shares_of(case, copy, rounds)
        arguments.json.write_text(json.dumps(result | {"tensor": [arguments.rows, arguments.width]}, indent=1) + "\n")
    console.print(table_of(shares, f"{name}; copy_: {bandwidth / 1e9:.0f} GB/s"))


def copy_case(numel: int, device: torch.device) -> Case:
    """Return torch's copy_ of a tensor fp32 [numel]."""
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    return Case("copy", 2 * source.nbytes, lambda: target.copy_(source))


def cases(kernels: Kernels, layout: ScaleLayout, device: torch.device) -> Iterator[Case]:
    """Yield all kernels in every dtype and number of bits; cache entries are fp16."""
    entry = torch.randn(layout.numel, device=device).half()
    # As of data: with powers of two, many quotients of bf16 values would lie exactly between two codes.
    steps = torch.empty(layout.scales, device=device).uniform_(0.25, 0.3)
    for (name, dtype), bits in product(DTYPES.items(), range(1, 9)):
        x = torch.randn(layout.numel, device=device).to(dtype)
        quantization = UniformQuantization(bits, layout, steps * 2 ** (4 - bits))
        stream = kernels.encode(x, quantization)
        nbytes = x.nbytes + stream.nbytes
        works = {
            "encode": partial(kernels.encode, x, quantization),
            "decode": partial(kernels.decode, stream, quantization, dtype),
            "encode, update": partial(kernels.encode, x, quantization, entry),
            "decode, update": partial(kernels.decode, stream, quantization, dtype, entry),
        }
        for kernel, work in works.items():
            yield Case(f"{kernel}, {name}, {bits} bits", nbytes + ("update" in kernel) * 2 * entry.nbytes, work)


def shares_of(case: Case, copy: Case, rounds: int) -> list[float]:
    """Return the quartiles of a kernel's fraction of the copy's bandwidth: lower, median, upper."""
    graphs, shares = (graph_of(copy.work), graph_of(case.work)), []
    for _ in range(rounds + 1):  # the first round is the warm-up
        copied, ours = map(seconds, graphs)
        shares.append(case.nbytes / ours / (copy.nbytes / copied))
    return statistics.quantiles(shares[1:], n=4)


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of LAUNCHES calls, captured after one call that compiles the kernel."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    return graph


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the duration of one call in a graph, seconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / LAUNCHES


def table_of(shares: dict[str, list[float]], title: str) -> Table:
    """Return a table of fractions of the copy's bandwidth, one kernel per row."""
    table = Table("kernel", "fraction of the copy's bandwidth", "quartiles", f"at least {GOAL:.0%}", title=title)
    for name, (low, median, high) in shares.items():
        table.add_row(name, f"{median:.1%}", f"{low:.1%} - {high:.1%}", "yes" if median >= GOAL else "no")
    return table


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds per kernel instead of 15")
    parser.add_argument("--rows", type=int, default=1 << 14, help="number of tokens of the tensor")
    parser.add_argument("--width", type=int, default=1 << 12, help="number of channels of the tensor")
    parser.add_argument(
        "--json", type=Path, default=Path("runs/benchmarks/gpu/kernels.json"), help="path of the results"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
