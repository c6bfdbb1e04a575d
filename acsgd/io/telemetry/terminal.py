"""Progress of a run on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from acsgd.config.options import Config
from acsgd.io.telemetry.record import RunEvent, StepRecord

PLAIN_LINES = 20
"""Number of progress lines of a whole run if standard output is not a terminal."""


class TerminalSink:
    """Prints a progress bar on a terminal, a few plain lines elsewhere.

    steps: optimizer steps of the run; resumed_at: completed steps of the checkpoint the run resumed from; fp16: whether
    to print the loss scale.
    """

    def __init__(self, steps: int, *, resumed_at: int, fp16: bool) -> None:
        self._steps, self._first, self._fp16 = steps, resumed_at + 1, fp16
        self._console = Console()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}  ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=resumed_at, state="starting")
        self._progress.start()

    @classmethod
    def open(cls, config: Config, run_dir: Path, resumed_at: int, notify: Callable[[str], None]) -> TerminalSink:
        """Open the sink of a run, as a `Tracker` does."""
        return cls(config.optim.num_steps, resumed_at=resumed_at, fp16=config.model.dtype == "fp16")

    def log(self, record: StepRecord) -> None:
        state = _state(record, fp16=self._fp16)
        self._progress.update(self._task, completed=record.step, state=state)
        every = max(1, self._steps // PLAIN_LINES)
        if not self._console.is_terminal and (record.step % every == 0 or record.step in (self._first, self._steps)):
            print(f"step {record.step}/{self._steps}  {state}", flush=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def event(self, event: RunEvent) -> None:
        self.note(event.text)

    def close(self, *, failed: bool) -> None:
        self._progress.stop()


def _state(record: StepRecord, *, fp16: bool) -> str:
    nothing = "nan" if record.targets_per_s else "none, no target tokens"
    loss = nothing if record.loss is None else f"{record.loss:.4f}"
    state = f"loss {loss}  {record.tokens_per_s:,.0f} tokens/s"
    if record.skipped:
        state += f"  skipped {record.skipped}"
    if fp16:
        state += f"  scale {record.loss_scale:.10g}"
    return state
