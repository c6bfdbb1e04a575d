"""What a run says of itself: metrics.jsonl, one object per optimizer step, one line on the terminal, and wandb."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from acsgd.config.options import Config
from acsgd.io.telemetry.record import Record, Sink

log = logging.getLogger(__name__)

PLAIN_LINES = 20
"""Lines that a run prints where there is no terminal to redraw one on."""


class Metrics:
    """Tells every record to all sinks; one rank of a run has sinks, the others have none."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(cls, config: Config, run_dir: Path, *, resumed_at: int, speaks: bool) -> Metrics:
        """Open the sinks that log.to names, in a run directory that exists.

        resumed_at: optimizer steps done in the checkpoint that the run goes on from; 0 = a fresh start, whose
        metrics.jsonl starts anew. speaks: whether this rank is the one that has sinks.
        """
        kinds = set(config.log.to.split(",")) if speaks else set()
        sinks: list[Sink] = []
        metrics = cls(sinks)
        if "jsonl" in kinds:
            sinks.append(JsonLines(run_dir / "metrics.jsonl", resumed_at=resumed_at, tell=metrics.note))
        if "print" in kinds:
            sinks.append(Terminal(config.optim.steps, resumed_at=resumed_at, fp16=config.model.dtype == "fp16"))
        if "wandb" in kinds:
            from acsgd.io.telemetry.wandb_log import WandbSink

            sinks.append(WandbSink(config, run_dir, resumed_at=resumed_at, tell=metrics.note))
        return metrics

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close(failed=kind is not None)

    def log(self, record: Record) -> None:
        """Tell one step's record to all sinks."""
        for sink in self._sinks:
            sink.log(record)

    def note(self, text: str) -> None:
        """Say something that is no number, here and in this rank's text log."""
        log.info(text)
        for sink in self._sinks:
            sink.note(text)


class JsonLines:
    """metrics.jsonl: every step once, in order, on disk when `log` returns, as far as this process is concerned.

    A run that goes back to an earlier step drops the lines after it. A disk that is full ends no run: what is not
    written yet follows when there is room again.
    """

    def __init__(self, path: Path, *, resumed_at: int, tell: Callable[[str], None]) -> None:
        if path.exists():
            _drop_after(path, resumed_at)
        # unbuffered, so that `write` tells how much of a line has found room
        self._file = path.open("a+b", buffering=0)
        self._owed, self._last = b"", resumed_at
        self._path, self._tell, self._is_told = path, tell, False

    def log(self, record: Record) -> None:
        if record.step <= self._last:
            self._rewind(record.step - 1)
        self._last = record.step
        self._owed += json.dumps(record.numbers(), allow_nan=False).encode() + b"\n"
        self._write()

    def note(self, text: str) -> None:
        pass

    def close(self, *, failed: bool) -> None:
        self._write()
        self._file.close()

    def _rewind(self, step: int) -> None:
        """Leave the lines up to that of `step`, written and owed; in one operation, which needs no room."""
        self._file.seek(0)
        written = self._file.read()
        kept = b"".join(_lines_until((written + self._owed).splitlines(), step))
        self._file.truncate(min(len(kept), len(written)))
        self._owed = kept[len(written) :]

    def _write(self) -> None:
        try:
            while self._owed:
                self._owed = self._owed[self._file.write(self._owed) :]
        except OSError as error:
            if not self._is_told:
                self._tell(f"{self._path} cannot be written ({error.strerror}); its lines follow when they can")
            self._is_told = True


class Terminal:
    """A progress bar on one line of a terminal; a few plain lines where the output goes elsewhere."""

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

    def log(self, record: Record) -> None:
        state = _state(record, fp16=self._fp16)
        self._progress.update(self._task, completed=record.step, state=state)
        every = max(1, self._steps // PLAIN_LINES)
        if not self._console.is_terminal and (record.step % every == 0 or record.step in (self._first, self._steps)):
            print(f"step {record.step}/{self._steps}  {state}", flush=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self, *, failed: bool) -> None:
        self._progress.stop()


def _drop_after(path: Path, step: int) -> None:
    """Leave of metrics.jsonl what a run that was killed had whole and that the checkpoint of `step` knows."""
    partial = path.with_name(f".{path.name}.partial")
    with path.open("rb") as lines, partial.open("wb") as file:
        file.writelines(_lines_until(lines, step))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _lines_until(lines: Iterable[bytes], step: int) -> Iterator[bytes]:
    for line in lines:
        try:
            is_kept = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):  # torn
            continue
        if is_kept:
            yield line.rstrip() + b"\n"


def _state(record: Record, *, fp16: bool) -> str:
    loss = "nan" if record.loss is None else f"{record.loss:.4f}"
    state = f"loss {loss}  {record.tokens_per_s:,.0f} tokens/s"
    if record.skipped:
        state += f"  skipped {record.skipped}"
    if fp16:
        state += f"  scale {record.loss_scale:.10g}"
    return state
