"""Step time on rate-limited links between replicas; needs root:

    .venv/bin/python -m benchmarks.replicas.network [--replicas 2 4] [--json runs/benchmarks/replica_network.json]

Replicas of a GPT-2 of 3 M parameters train in fp32, with one process of one thread per host. The hosts are network
namespaces (netlab.py), without delay and with 20 ms between any two. All modes run in turn in the same processes over
the same connections: in each round every mode runs a step on every network. The baseline is torch's
DistributedDataParallel on the same model and tokens, with the same clipping and AdamW, and gradients in fp32 or, with
torch's hook, in fp16. The losses of all modes in their first step must agree.

compute     a step of `local`, which exchanges no weights and no gradients, without delay. One is measured before and
            one after each step of a mode, which is compared with their mean. All cores are busy in it
traffic     the bytes of all messages between replicas that a host sends in a step, divided by the rate, which is the
            same up and down. DistributedDataParallel sends 2 (R - 1) / R of its gradients (ring all-reduce)
bound       max(compute, traffic). A step cannot be faster. It is slower by the headers of packets (6 % of the traffic),
            by the work of compression, and, with delay, by the control message that ends a step
no limit    no rate limit: the cost of a mode apart from its traffic

For modes that exchange every k-th step, a step is the mean over one period. Timed steps follow step 1200 of a run. A
step whose traffic takes longer than 4 s is measured in the first round only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from benchmarks.common import netlab, pictures
from benchmarks.common.compare import OnLink
from benchmarks.pipeline.network_ranks import save_model
from benchmarks.replicas.network_ranks import DDP, DDP_FP16, LOCAL, VOCABULARY, Replicas, Setting, is_ddp, period

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODES = (
    "allreduce",
    "allreduce:dtype=fp16",
    "powersgd:rank=4",
    "quantized:exact_steps=1",
    "cocktail_grad",
    "cocktail",
    "sparseloco:inner=5",
    "diloco:inner=50,fragments=10,delay=2,bits=4",
)
MIN_SHARE, MAX_SLOWDOWN = 0.9, 1.2
"""Goals of modes that compress: fraction of the bound, step time relative to compute."""
LOSS_TOLERANCE = 1e-4
ONCE_S = 4.0
"""Traffic, seconds, above which a step is measured in the first round only."""
INK, GRID = "#1f2933", "#e4e8ec"
COLORS = ("#5b6672", "#9aa5b1", "#b4530a", "#e0a458", "#1f5fbf", "#0b7a6b", "#7a3fb0", "#c2255c", "#5c940d", "#0c8599")
MARKERS = "os^vD<>PX*"


@dataclass
class Cell(OnLink):
    """One mode on one network. Lists have one entry per round."""

    replicas: int
    delay_s: float
    mbit: float
    """inf = no limit."""
    mode: str
    sent_bytes: float
    """Bytes per step and host."""
    steps: int
    """Number of steps in a block, one period of the mode."""
    compute_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @property
    def is_judged(self) -> bool:
        """Whether the goals apply: the mode compresses."""
        is_exact = is_ddp(self.mode) or self.mode.startswith("allreduce") or self.mode == LOCAL
        return not is_exact

    @property
    def is_slow(self) -> bool:
        """Whether it is measured in the first round only."""
        return self.traffic_s > ONCE_S

    @property
    def traffic_s(self) -> float:
        return self.sent_bytes * 8 / 1e6 / self.mbit


def measure(setting: Setting, options: argparse.Namespace, console: Console) -> list[Cell]:
    """Measure all modes on all networks, round by round; all delays in turn."""
    by_delay: dict[float, Replicas] = {}
    with contextlib.ExitStack() as running:
        for delay_s in (delay_ms / 1e3 for delay_ms in options.delays):
            network = running.enter_context(netlab.lab(hosts=setting.replicas, delay_s=delay_s))
            by_delay[delay_s] = running.enter_context(Replicas(setting, network).running())
            sent = warm_up(by_delay[delay_s], setting.modes)
        cells = make_cells(setting, options, sent)
        for number in range(options.rounds):
            for mbit in dict.fromkeys(cell.mbit for cell in cells):
                wanted = [cell for cell in cells if cell.mbit == mbit and not (number and cell.is_slow)]
                one_round(by_delay, wanted[:: -1 if number % 2 else 1])
            console.print(f"{setting.replicas} replicas: {number + 1} of {options.rounds} rounds", highlight=False)
    return cells


def warm_up(replicas: Replicas, modes: Sequence[str]) -> dict[str, float]:
    """Run the first steps of every mode; return the bytes of a step by mode. Raises RuntimeError if losses differ."""
    blocks = {mode: replicas.block(mode, period(mode)) for mode in modes}
    for mode, block in blocks.items():
        if abs(block.loss / blocks[LOCAL].loss - 1) > LOSS_TOLERANCE:
            raise RuntimeError(f"first step: loss {block.loss:.6f} with {mode}, {blocks[LOCAL].loss:.6f} with {LOCAL}")
    return {mode: block.sent_bytes for mode, block in blocks.items()}


def make_cells(setting: Setting, options: argparse.Namespace, sent: dict[str, float]) -> list[Cell]:
    """Return empty cells: without a rate limit for the first delay, then each rate with every delay."""
    cells = []
    networks = [(options.delays[0], math.inf), *((delay, mbit) for mbit in options.rates for delay in options.delays)]
    for delay_ms, mbit in networks:
        where = setting.replicas, delay_ms / 1e3, mbit
        cells += [Cell(*where, mode, sent[mode], steps=period(mode)) for mode in setting.modes]
    return cells


def one_round(by_delay: dict[float, Replicas], cells: Sequence[Cell]) -> None:
    """Measure every cell in order, all at the same rate, and compute before and after each."""
    for replicas in by_delay.values():
        replicas.limit(None if math.isinf(cells[0].mbit) else cells[0].mbit)
    fastest = by_delay[min(by_delay)]
    before_s = fastest.block(LOCAL, 1).seconds
    for cell in cells:
        block = by_delay[cell.delay_s].block(cell.mode, cell.steps)
        after_s = fastest.block(LOCAL, 1).seconds
        cell.sent_bytes = block.sent_bytes
        cell.step_s.append(block.seconds)
        cell.compute_s.append((before_s + after_s) / 2)
        before_s = after_s


def table(cells: Sequence[Cell], options: argparse.Namespace) -> Table:
    """Return a table of step times, one mode per row; green = goal met."""
    shown = Table(title=f"Optimizer steps on slow links between replicas: {options.micros} micro-batches per replica")
    shown.add_column("replicas, delay, rate", no_wrap=True)
    shown.add_column("mode", no_wrap=True)
    for name in ("kB per host", "step, s", "bound, s", "of the bound", "times compute", "range"):
        shown.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        limit = "no limit" if math.isinf(cell.mbit) else f"{cell.mbit:g} Mbit/s"
        where = f"{cell.replicas}, {cell.delay_s * 1e3:g} ms, {limit}" if cell.mode == LOCAL else ""
        shown.add_row(where, *row(cell), end_section=cell.mode == cells[-1].mode)
    return shown


def row(cell: Cell) -> list[str]:
    """Return a cell's table row."""
    judged = [f"{cell.share:.0%}", f"{cell.slowdown:.2f}"]
    if cell.is_judged:
        met = cell.share >= MIN_SHARE, cell.slowdown <= MAX_SLOWDOWN
        judged = [f"[{'green' if is_met else 'red'}]{text}[/]" for is_met, text in zip(met, judged, strict=True)]
    spread = f"{min(cell.slowdowns):.2f}-{max(cell.slowdowns):.2f}"
    return [cell.mode, f"{cell.sent_bytes / 1e3:.1f}", f"{cell.seconds:.2f}", f"{cell.bound_s:.2f}", *judged, spread]


def draw(cells: Sequence[Cell]) -> Figure:
    """Draw step time against rate, a panel per delay. cells: all with the same number of replicas."""
    from matplotlib.figure import Figure

    cells = [cell for cell in cells if cell.mode != LOCAL and math.isfinite(cell.mbit)]
    delays_s = list(dict.fromkeys(cell.delay_s for cell in cells))
    figure = Figure(figsize=(10.4, 5.2), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(delays_s), sharey=True, squeeze=False)[0]
    compute_s = statistics.median(seconds for cell in cells for seconds in cell.compute_s)
    for axes, delay_s in zip(panels, delays_s, strict=True):
        axes.set_title(f"{delay_s * 1e3:g} ms of delay", color=INK, fontsize=11)
        draw_panel(axes, [cell for cell in cells if cell.delay_s == delay_s], compute_s)
    panels[0].set_ylabel(f"seconds per step, {cells[0].replicas} replicas (dashed: bound)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def draw_panel(axes: Axes, cells: Sequence[Cell], compute_s: float) -> None:
    """Draw a line per mode, and its bound. cells: in the order of their rates."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(xscale="log", yscale="log", xlabel="Mbit/s of every host, up and down")
    modes = dict.fromkeys(cell.mode for cell in cells)
    for mode, color, marker in zip(modes, cycle(COLORS), cycle(MARKERS), strict=False):
        drawn = [cell for cell in cells if cell.mode == mode]
        rates = [cell.mbit for cell in drawn]
        between = [rates[0] * (rates[-1] / rates[0]) ** (i / 100) for i in range(101)]
        bounds = [max(compute_s, drawn[0].sent_bytes * 8 / 1e6 / mbit) for mbit in between]
        axes.plot(between, bounds, "--", color=color, linewidth=1)
        axes.plot(rates, [cell.seconds for cell in drawn], f"{marker}-", color=color, label=mode, markersize=6)
    axes.axhline(compute_s, color=INK, linewidth=0.8, label="compute")
    rates = sorted({cell.mbit for cell in cells})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.8)


def write_json(path: Path, options: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Write every sample."""
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    about |= {"micros": options.micros, "rounds": options.rounds}
    samples = [asdict(cell) | {"mbit": None if math.isinf(cell.mbit) else cell.mbit} for cell in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "cells": samples}, indent=1))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, default=Path("runs/benchmarks/replica_network.json"), help="path of the results"
    )
    parser.add_argument("--svg", type=Path, default=Path("docs/replicas.svg"), help="path of the picture")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2], help="numbers of replicas; the first is drawn")
    parser.add_argument("--modes", nargs="+", default=MODES, help="values of dp.mode")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 100.0, 500.0], help="Mbit/s")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 20.0], help="one-way delays, ms")
    parser.add_argument("--micros", type=int, default=6, help="micro-batches per step and replica")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each mode on each network")
    parser.add_argument("--no-picture", action="store_true", help="skip the picture")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save, draw."""
    options = parse_arguments()
    try:
        netlab.check(needs_tun=max(options.delays) > 0)
    except RuntimeError as error:
        sys.exit(f"benchmarks/replicas/network.py: {error}")
    if not options.no_picture and find_spec("matplotlib") is None:
        sys.exit(
            "benchmarks/replicas/network.py: the picture needs matplotlib: pip install '.[bench]', or give --no-picture"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that namespaces are removed
    transformers_logging.disable_progress_bar()
    console, cells = Console(width=160), []
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", vocabulary=VOCABULARY, tied=False)
        for replicas in options.replicas:
            setting = Setting(model, replicas, options.micros, (LOCAL, DDP, DDP_FP16, *options.modes))
            cells += measure(setting, options, console)
    console.print(table(cells, options))
    write_json(options.json, options, cells)
    if not options.no_picture:
        pictures.save(draw([cell for cell in cells if cell.replicas == options.replicas[0]]), options.svg)


if __name__ == "__main__":
    main()
