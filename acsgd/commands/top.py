"""`acsgd top RUN_DIR`: the last steps, ranks, links and events of a run, live in the terminal."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from acsgd.config.ranges import Range, out_of_range

if TYPE_CHECKING:
    from rich.console import Group

    from acsgd.io.telemetry.history import RunHistory

STEPS, EVENTS, RANKS = 8, 6, 16
"""Largest number of rows of each table."""
LAST_BYTES = 1 << 20
"""How much of the end of the files is read each time."""


@dataclass(frozen=True)
class TopCommand:
    """Show the last steps, ranks, links and events of a run, live in the terminal; Ctrl-C ends it."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Run directory (log.dir)."""
    every: Annotated[float, Range(0.1, 3600)] = 1.0
    """Interval between two readings of the files, seconds."""
    once: bool = False
    """Print the tables once and exit."""

    def run(self) -> None:
        """Show the tables until a signal ends the command."""
        from rich.console import Console
        from rich.live import Live

        from acsgd.io.telemetry.history import read_run

        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        console = Console()

        def read() -> Group:
            return tables_of(read_run(self.directory, last_bytes=LAST_BYTES))

        if self.once or not console.is_terminal:
            console.print(read())
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)  # so that the terminal is restored
        with contextlib.suppress(KeyboardInterrupt), Live(read(), console=console, screen=True) as live:
            while True:
                time.sleep(self.every)
                live.update(read())


def tables_of(run: RunHistory) -> Group:
    """Return the tables of a run."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str, rows: list[list[object]]) -> Table:
        made = Table(title=title, title_justify="left", expand=True)
        for index, column in enumerate(columns):
            made.add_column(column, justify="left" if index == len(columns) - 1 else "right")
        for row in rows:
            made.add_row(*(Text(str(cell)) for cell in row))  # as it is, without markup
        return made

    of = "" if run.num_steps is None else f" of {run.num_steps}"
    parts: list[Table | Text] = [Text(f"{run.directory}: step {run.last_step}{of}", style="bold")]
    parts += [Text(problem, style="red") for problem in run.problems]
    steps = [_step_row(line) for line in run.steps[-STEPS:]]
    if steps:
        parts.append(table("Steps", "step", "loss", "lr", "tokens/s", "s/step", "limit", rows=steps))
    by_rank: Mapping[str, Any] = next((line for line in reversed(run.steps) if line.get("ranks")), {})
    if ranks := _rank_rows(by_rank):
        names = (
            "rank",
            "compute, s",
            "waits, s",
            "memory, MB",
            "sends to next, MB",
            "to previous, MB",
            "to replicas, MB",
        )
        parts.append(table(f"Ranks and their links in step {by_rank['step']}", *names, rows=ranks[:RANKS]))
    if len(ranks) > RANKS:
        parts.append(Text(f"and {len(ranks) - RANKS} more ranks"))
    if events := [[event.step, event.kind, event.text] for event in run.events[-EVENTS:]]:
        parts.append(table("Events", "step", "kind", "event", rows=events))
    return Group(*parts)


def _step_row(line: Mapping[str, Any]) -> list[object]:
    from acsgd.io.telemetry.history import finite
    from acsgd.io.telemetry.step_time import StepTime

    numbers = [finite(line.get(name)) for name in ("loss", "lr", "tokens_per_s", "step_s")]
    time_of = StepTime.of(line)
    cells = ["-" if number is None else f"{number:,.4g}" for number in numbers]
    return [line["step"], *cells, time_of.limit if time_of else "-"]


def _rank_rows(line: Mapping[str, Any]) -> list[list[object]]:
    """Return the numbers of each rank, the slowest first."""
    from acsgd.io.telemetry.history import numbers_by_rank

    def of(name: str) -> dict[int, float]:
        return {each.rank: each.value for each in numbers_by_rank(line, name)}

    compute_s = of("compute_s")
    waits = [of(f"{kind}_wait_s") for kind in ("pp_forward", "pp_backward", "tied", "dp")]
    sizes = [of(f"{kind}_bytes") for kind in ("peak_memory", "pp_forward", "pp_backward", "dp")]
    rows: list[list[object]] = []
    for rank in sorted(compute_s, key=lambda rank: -compute_s[rank]):
        waited_s = sum(each.get(rank, 0.0) for each in waits)
        megabytes = (each.get(rank, 0.0) / 1e6 for each in sizes)
        rows.append([rank, *(f"{number:.3f}" for number in (compute_s[rank], waited_s, *megabytes))])
    return rows
