"""What does it cost a replica to agree, besides the bytes? Three tables, with one command:

    .venv/bin/python -m benchmarks.replicas.cost [--json runs/benchmarks/replica_cost.json]

Time: replicas are processes of one thread over gloo on this machine. Each holds the weights of blocks of a GPT-2, draws
gradients and makes steps as a worker does, without a model. CPU time is that of all threads of a rank, the kernel's
copies to and from sockets included; waiting is none of it. What is left of it without the gradients and AdamW is the
mode's. All modes live in the same processes and take turns; a round is a whole period of a mode that exchanges every H
steps, or looks at second moments every 16. The yardstick is AdamW in steps of `local`; what it does besides, as with
`moment_correction`, is the mode's.

Memory: bytes that are allocated and not freed, more than those of a run with one replica: weights, gradients, moments.
glibc counts them, exactly; what is allocated and never touched counts, as a GPU would hold it. Peaks are of a whole
round, looked for every 0.2 ms. On more parameters, since messages of some modes have a fixed size.

Compressors: alone, in one thread, on what a replica encodes in one exchange; each takes turns with a copy_ of the same
tensor. Without a GPU, that half of the table is not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.second_moments import INTERVAL
from benchmarks.common.compare import on_ranks
from benchmarks.replicas.cost_ranks import Cost, Memory, Way, costs, make_weights, memories
from benchmarks.replicas.encoders import Encoded, Spread, measure

YARDSTICK = "local"
SPECS = (
    "allreduce",
    "allreduce:dtype=fp16",
    "sharded_ps",
    "central_ps",
    "powersgd:rank=4",
    "quantized:exact_steps=1",
    "cocktail_grad",
    "cocktail",
    "cocktail:moment_correction=false",
    "sparseloco",
    "diloco",
    "diloco:fragments=5,delay=2,bits=4",
)
GPU_PARAMETERS = 1 << 27
"""Enough of cocktail's tenth for launches to be a small part."""
GOAL, PUBLISHED = 200.0, 146.0
"""Ratio of sparseloco's messages: what it should be, and what its paper has."""


class Row(NamedTuple):
    """What a mode costs. Nanoseconds are of CPU time per parameter and step, by round, mean over the replicas."""

    name: str
    mode_ns: list[float]
    adamw_ns: list[float]
    dearest_ns: float
    """Of the replica that has most to do, median."""
    sent_bytes: float
    """Per parameter and step, mean over the replicas."""
    memory: Memory
    """Of the rank that takes most."""

    def ratios(self) -> Spread:
        """Return the mode's time over AdamW's."""
        return Spread.of([mode / adamw for mode, adamw in zip(self.mode_ns, self.adamw_ns, strict=True)])


def ways_of(specs: Sequence[str]) -> list[Way]:
    """Return what is to be measured of modes: a period each."""
    modes = [from_spec(spec, MODES, key="--modes") for spec in specs]
    periods = [
        math.lcm(getattr(mode, "inner", 1), INTERVAL if getattr(mode, "moment_correction", False) else 1)
        for mode in modes
    ]
    return [Way(spec, period) for spec, period in zip(specs, periods, strict=True)]


def measure_modes(options: argparse.Namespace, directory: Path) -> tuple[list[Row], Memory]:
    """Measure time, then memory; return a row for each way, and what the only replica of a run takes."""
    ways = ways_of([YARDSTICK, *(spec for spec in options.modes if spec != YARDSTICK)])
    replicas = options.replicas
    parameters = count(options.width, options.blocks)
    timed = options.width, options.blocks, options.rounds
    taken = on_ranks(replicas, costs, replicas, str(directory / "costs"), ways, *timed)
    weighed = options.width, options.memory_blocks
    held = on_ranks(replicas, memories, replicas, str(directory / "memories"), ways, *weighed)
    largest = [Memory(*map(max, zip(*ranks, strict=True))) for ranks in zip(*(more for _, more in held), strict=True)]
    seen = [per_parameter(ranks, parameters) for ranks in zip(*taken, strict=True)]
    plain = [cost.adamw_s for cost in mean_of_ranks(seen[0])]
    by_way = zip(ways, seen, largest, strict=True)
    return [row(way, ranks, plain, memory) for way, ranks, memory in by_way], held[0][0]


def per_parameter(ranks: Sequence[Sequence[Cost]], parameters: int) -> list[list[Cost]]:
    return [[Cost(*(number / parameters for number in cost)) for cost in rank] for rank in ranks]


def mean_of_ranks(ranks: Sequence[Sequence[Cost]]) -> list[Cost]:
    """Return by round."""
    return [Cost(*map(statistics.fmean, zip(*costs, strict=True))) for costs in zip(*ranks, strict=True)]


def row(way: Way, ranks: Sequence[Sequence[Cost]], plain: Sequence[float], memory: Memory) -> Row:
    """Put together what the ranks saw of a way, per parameter. plain: seconds of AdamW where it does nothing else."""
    costs = mean_of_ranks(ranks)
    dearest = max(statistics.median(cost.mode_s + cost.adamw_s for cost in rank) for rank in ranks)
    return Row(
        name=way.spec,
        mode_ns=[1e9 * (cost.mode_s + cost.adamw_s - adamw) for cost, adamw in zip(costs, plain, strict=True)],
        adamw_ns=[1e9 * adamw for adamw in plain],
        dearest_ns=1e9 * (dearest - statistics.median(plain)),
        sent_bytes=statistics.fmean(cost.sent_bytes for cost in costs),
        memory=memory,
    )


def count(width: int, blocks: int) -> int:
    """Return how many parameters these weights have."""
    return sum(weight.master.numel() for weight in make_weights(width, blocks))


def cost_table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    millions = count(options.width, options.blocks) / 1e6
    shown = Table(title=f"CPU time of one of {options.replicas} replicas per step, {millions:.1f} M parameters")
    shown.add_column("dp.mode", no_wrap=True)
    columns = "ns / parameter", "quartiles", "dearest replica", "AdamW, ns", "times AdamW", "quartiles", "bytes sent"
    for name in columns:
        shown.add_column(name, justify="right")
    for each in rows:
        ours, ratios = Spread.of(each.mode_ns), each.ratios()
        shown.add_row(
            each.name,
            f"{ours.median:.2f}",
            f"{ours.low:.2f} - {ours.high:.2f}",
            f"{each.dearest_ns:.2f}",
            f"{statistics.median(each.adamw_ns):.2f}",
            f"{ratios.median:.2f}",
            f"{ratios.low:.2f} - {ratios.high:.2f}",
            f"{each.sent_bytes:.2g}",
        )
    return shown


def memory_table(rows: Sequence[Row], alone: Memory, options: argparse.Namespace) -> Table:
    parameters = count(options.width, options.memory_blocks)
    title = f"Bytes per parameter besides the {alone.between / parameters:.1f} of weights, gradients and moments"
    shown = Table(title=f"{title}; {options.replicas} replicas, {parameters / 1e6:.1f} M parameters")
    shown.add_column("dp.mode", no_wrap=True)
    for name in ("between steps", "at the peak", "in a checkpoint"):
        shown.add_column(name, justify="right")
    for each in rows:
        shown.add_row(each.name, *(f"{nbytes / parameters:.2f}" for nbytes in each.memory))
    return shown


def encoder_table(encoded: Sequence[Encoded], device: str) -> Table:
    """Show a row per compressor and kind of data; green = the goal is met."""
    shown = Table(title=f"Compressors alone, {device}: per element encoded, and share of a copy's bandwidth")
    for name in ("of dp.mode", "data"):
        shown.add_column(name, no_wrap=True)
    names = "elements", "encode, ns", "of a copy", "decode, ns", "of a copy", "bytes", "fp32 / bytes", "of all weights"
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for each in encoded:
        color = "" if each.spec != "sparseloco" else "[green]" if each.ratio > GOAL else "[red]"
        shown.add_row(
            each.spec,
            each.data,
            f"{each.elements}",
            *_with_share(each.encode_ns, each.encode_share),
            *_with_share(each.decode_ns, each.decode_share),
            f"{each.message_bytes}",
            f"{color}{each.ratio:.1f} x",
            f"{each.parameters_ratio:.1f} x",
        )
    return shown


def _with_share(nanoseconds: Spread, share: Spread) -> tuple[str, str]:
    return f"{nanoseconds.median:.2f} ({nanoseconds.low:.2f} - {nanoseconds.high:.2f})", f"{share.median:.1%}"


def measure_encoders(options: argparse.Namespace, console: Console) -> dict[str, list[Encoded]]:
    """Measure compressors on the CPU and on a GPU, if there is one; print and return what was found, by device."""
    devices = {"CPU, one core": (torch.device("cpu"), count(options.width, options.blocks))}
    if torch.cuda.is_available():
        devices[torch.cuda.get_device_name()] = torch.device("cuda"), GPU_PARAMETERS
    found = {}
    for name, (device, parameters) in devices.items():
        found[name] = measure(options.modes, parameters, options.rounds, device)
        console.print(encoder_table(found[name], name))
    console.print(f"sparseloco: goal more than {GOAL:g} x with all headers, published {PUBLISHED:g} x", highlight=False)
    if not torch.cuda.is_available():
        console.print("On a GPU: not measured, there is none here.", highlight=False)
    return found


def main() -> None:
    """Measure, print, save."""
    options = parse_arguments()
    console = Console(width=170)
    with tempfile.TemporaryDirectory() as directory:
        rows, alone = measure_modes(options, Path(directory))
    console.print(cost_table(rows, options))
    console.print(memory_table(rows, alone, options))
    encoded = measure_encoders(options, console)
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    about |= {name: getattr(options, name) for name in ("replicas", "rounds", "width", "blocks", "memory_blocks")}
    about |= {"parameters": count(options.width, options.blocks)}
    about |= {"memory_parameters": count(options.width, options.memory_blocks), "alone_bytes": alone.between}
    modes = [each._asdict() | {"memory": each.memory._asdict()} for each in rows]
    encoders = {device: [_nested(each) for each in each_of] for device, each_of in encoded.items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "modes": modes, "encoders": encoders}, indent=1))


def _nested(encoded: Encoded) -> dict[str, object]:
    fields = encoded._asdict()
    return {name: value._asdict() if isinstance(value, Spread) else value for name, value in fields.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, default=Path("runs/benchmarks/replica_cost.json"), help="where the numbers go"
    )
    parser.add_argument("--modes", nargs="+", default=SPECS, help="values of dp.mode")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11, help="of each mode, a period of it each")
    parser.add_argument("--width", type=int, default=768, help="of the GPT-2")
    parser.add_argument("--blocks", type=int, default=1, help="of it, whose time is measured")
    parser.add_argument("--memory-blocks", type=int, default=4, help="of it, whose memory is measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
