"""Progress of a run on the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from acsgd.config.options import Config
from acsgd.io.telemetry.record import RunEvent, StepRecord
from acsgd.io.telemetry.step_time import StepTime

PLAIN_LINES = 20
"""Number of progress lines of a whole run if standard output is not a terminal."""
WINDOW = 50
"""Number of steps whose speed gives the time that is left."""
SLOW = 1.2
"""Multiple of the mean computing time of all ranks from which the slowest rank is named."""


class TerminalSink:
    """Prints a progress bar on a terminal, a few plain lines elsewhere.

    steps: optimizer steps of the run; every: interval between plain lines, None = PLAIN_LINES of a run; resumed_at:
    completed steps of the checkpoint the run resumed from; fp16: whether to print the loss scale.
    """

    def __init__(self, steps: int, *, every: int | None, resumed_at: int, fp16: bool) -> None:
        self._steps, self._first, self._fp16 = steps, resumed_at + 1, fp16
        self._every = every or max(1, steps // PLAIN_LINES)
        self._ends = deque[tuple[int, float]](maxlen=WINDOW)
        """Last steps, and when they were logged; a time.monotonic()."""
        self._console = Console()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.0f}%  {task.fields[state]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=resumed_at, state="starting")
        self._progress.start()

    @classmethod
    def open(cls, config: Config, run_dir: Path, resumed_at: int, notify: Callable[[str], None]) -> TerminalSink:
        """Open the sink of a run, as a `Tracker` does."""
        fp16 = config.model.dtype == "fp16"
        return cls(config.optim.num_steps, every=config.log.every, resumed_at=resumed_at, fp16=fp16)

    def log(self, record: StepRecord) -> None:
        self._ends.append((record.step, time.monotonic()))
        is_due = record.step % self._every == 0 or record.step in (self._first, self._steps)
        if not self._console.is_terminal and not is_due:
            return
        state = "  ".join([*describe_step(record, fp16=self._fp16), *self._left(record)])
        self._progress.update(self._task, completed=record.step, state=state)
        if not self._console.is_terminal:
            print(f"step {record.step}/{self._steps} {record.step / self._steps:.0%}  {state}", flush=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def event(self, event: RunEvent) -> None:
        self.note(event.text)

    def close(self, *, failed: bool) -> None:
        self._progress.stop()

    def _left(self, record: StepRecord) -> list[str]:
        """Return the time that is left, at the speed of the last steps with all that lies between them."""
        if record.step >= self._steps:
            return []
        (first, since), (last, until) = self._ends[0], self._ends[-1]
        step_s = (until - since) / (last - first) if last > first else record.step_s
        return [f"{timedelta(seconds=round((self._steps - record.step) * step_s))} left"]


def describe_step(record: StepRecord, *, fp16: bool = False) -> list[str]:
    """Return the numbers of a step for one line."""
    nothing = "nan" if record.targets_per_s else "none, no target tokens"
    loss = nothing if record.loss is None else f"{record.loss:.4f}"
    parts = [
        f"loss {loss}",
        f"lr {record.lr:.3g}",
        f"{record.tokens_per_s:,.0f} tokens/s",
        f"{record.step_s:.3g} s/step",
    ]
    if record.device_memory_bytes:
        used, memory = (nbytes / 1e9 for nbytes in (record.peak_memory_bytes, record.device_memory_bytes))
        parts.insert(3, f"{record.device_tokens_per_s:,.0f} per GPU")
        parts += [
            *([] if record.mfu is None else [f"MFU {record.mfu:.1%}"]),
            f"peak {used:.1f} GB (rank 0 has {memory:.0f} GB)",
        ]
    if record.skipped:
        parts.append(f"skipped {record.skipped}")
    if fp16:
        parts.append(f"scale {record.loss_scale:.10g}")
    if (time_of := StepTime.of(record.line())) is not None:
        parts.append(f"limit: {time_of.limit}")
        parts += [f"slowest: rank {time_of.rank} ({time_of.factor:.1f}x)"] if time_of.factor >= SLOW else []
    return parts
