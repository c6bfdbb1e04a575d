"""Which share of a GPU's memory bandwidth do the fused kernels reach? A table, with one command:

    .venv/bin/python -m benchmarks.codecs.gpu [--json runs/benchmarks/codec_gpu.json]

The bytes that must move are each input, read once, and each output, written once, without the scales. The share is how
many of them a kernel moves per second, relative to torch's copy_ of as many elements of fp32, which is measured in turn
with it. Times are those of CUDA graphs, between two events, so that Python does not count. The goal is 80 %.
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

from acsgd.codecs.kernels import Kernels, Quantization, kernels_for
from acsgd.codecs.layout import Layout, layout_of

GOAL = 0.8
LAUNCHES = 10
"""In a graph."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Case(NamedTuple):
    """One kernel at work."""

    name: str
    nbytes: int
    """That must move."""
    work: Callable[[], object]


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=120)
    if not torch.cuda.is_available():
        console.print("There is no CUDA device here: nothing is measured.")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    layout = layout_of((arguments.rows, arguments.width), "channel", 0)
    kernels = kernels_for(layout, device, *DTYPES.values())
    if kernels is None:
        console.print("There is no CuPy here, so no kernels: pip install 'acsgd[cuda]'.")
        return
    copy = copying(arguments.rows * arguments.width, device)
    shares = {case.name: shares_of(case, copy, arguments.rounds) for case in cases(kernels, layout, device)}
    bandwidth = statistics.median(copy.nbytes / seconds(graph_of(copy.work)) for _ in range(arguments.rounds))
    name = torch.cuda.get_device_name(device)
    console.print(table_of(shares, f"{name}; a copy moves {bandwidth / 1e9:.0f} GB/s"))
    result = {"device": name, "torch": torch.__version__, "copy_gb_per_s": bandwidth / 1e9, "quartiles": shares}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result | {"tensor": [arguments.rows, arguments.width]}, indent=1) + "\n")


def copying(numel: int, device: torch.device) -> Case:
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    return Case("copy", 2 * source.nbytes, lambda: target.copy_(source))


def cases(kernels: Kernels, layout: Layout, device: torch.device) -> Iterator[Case]:
    """Yield what is measured; memories are of fp16."""
    m = torch.randn(layout.numel, device=device).half()
    steps = torch.full((layout.scales,), 0.25, device=device)
    for (name, dtype), bits in product(DTYPES.items(), range(1, 9)):
        x = torch.randn(layout.numel, device=device).to(dtype)
        levels = Quantization(bits, layout, steps * 2 ** (4 - bits))
        stream = kernels.encode(x, levels)
        once = x.nbytes + stream.nbytes
        works = {
            "encode": partial(kernels.encode, x, levels),
            "decode": partial(kernels.decode, stream, levels, dtype),
            "encode, update": partial(kernels.encode, x, levels, m),
            "decode, update": partial(kernels.decode, stream, levels, dtype, m),
        }
        for way, work in works.items():
            yield Case(f"{way}, {name}, {bits} bits", once + ("update" in way) * 2 * m.nbytes, work)


def shares_of(case: Case, copy: Case, rounds: int) -> list[float]:
    """Return lower quartile, median and upper quartile of a kernel's share."""
    graphs, shares = (graph_of(copy.work), graph_of(case.work)), []
    for _ in range(rounds + 1):  # the first warms up
        copied, ours = map(seconds, graphs)
        shares.append(case.nbytes / ours / (copy.nbytes / copied))
    return statistics.quantiles(shares[1:], n=4)


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph that does the work several times; once it is done before, to compile what it needs."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    return graph


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return how long one piece of work of a graph takes."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / LAUNCHES


def table_of(shares: dict[str, list[float]], title: str) -> Table:
    table = Table("kernel", "share of the copy's bandwidth", "quartiles", f"at least {GOAL:.0%}", title=title)
    for name, (low, median, high) in shares.items():
        table.add_row(name, f"{median:.1%}", f"{low:.1%} - {high:.1%}", "yes" if median >= GOAL else "no")
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1 << 14, help="tokens of the tensor")
    parser.add_argument("--width", type=int, default=1 << 12, help="channels of it")
    parser.add_argument(
        "--json", type=Path, default=Path("runs/benchmarks/codec_gpu.json"), help="where the numbers go"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
