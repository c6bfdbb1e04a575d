"""What a run says of itself: metrics.jsonl, one object per optimizer step, and one line on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from acsgd.meter import Meter

PLAIN_LINES = 20
"""Lines that a run prints where there is no terminal to redraw one on."""


class Totals(NamedTuple):
    """One rank's share of a step, summed over all ranks afterwards."""

    loss: float
    targets: float
    pp_forward_bytes: float
    pp_backward_bytes: float
    dp_bytes: float
    in_flight_s: float
    waited_s: float

    def tensor(self) -> Tensor:
        """Return the numbers as fp64, to be summed."""
        return torch.tensor(self, dtype=torch.float64)

    @property
    def hidden_share(self) -> float:
        """Share of the time between posting transfers and having them that was spent computing; 1 without any.

        Waiting for a peer that is still computing (the pipeline's bubble) counts as waiting.
        """
        return 1.0 - self.waited_s / self.in_flight_s if self.in_flight_s else 1.0


def totals(loss: Tensor, labels: Tensor | None, *, forward: Meter, backward: Meter, dp: list[Meter]) -> Totals:
    """Collect this rank's share of a step and reset its meters."""
    meters = [forward, backward, *dp]
    share = Totals(
        loss=float(loss),
        targets=0.0 if labels is None else float((labels != -100).sum()),
        pp_forward_bytes=forward.sent_bytes,
        pp_backward_bytes=backward.sent_bytes,
        dp_bytes=sum(meter.sent_bytes for meter in dp),
        in_flight_s=sum(meter.in_flight_s for meter in meters),
        waited_s=sum(meter.waited_s for meter in meters),
    )
    for meter in meters:
        meter.reset()
    return share


class Record(NamedTuple):
    """One line of metrics.jsonl. Bytes are sums over all ranks, headers included."""

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean over the target tokens of the global batch, before the step."""
    tokens: int
    """Target tokens trained on since the start of the run."""
    tokens_per_s: float
    step_s: float
    lr: float
    grad_norm: float
    """Before clipping."""
    pp_forward_bytes: int
    pp_backward_bytes: int
    """With the gradients of tied weights, where the two copies lie on different ranks."""
    dp_bytes: int
    hidden_share: float
    peak_memory_bytes: int
    """Of the rank that has held most so far, among those of the first replica."""


class Sink(Protocol):
    """Something that records are told to."""

    def log(self, record: Record) -> None:
        """Take one step's record."""
        ...

    def note(self, text: str) -> None:
        """Say something that is no number."""
        ...

    def close(self) -> None:
        """Write out what is left."""
        ...


class Metrics:
    """Tells every record to all sinks; one rank of a run has sinks, the others have none."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(cls, to: str, run_dir: Path, *, steps: int, speaks: bool) -> Metrics:
        """Open the sinks named in `to`, "print,jsonl"; speaks: whether this rank is the one that has them."""
        kinds = set(filter(None, to.split(","))) if speaks else set()
        sinks: list[Sink] = []
        if "jsonl" in kinds:
            sinks.append(JsonLines(run_dir / "metrics.jsonl"))
        if "print" in kinds:
            sinks.append(Terminal(steps))
        return cls(sinks)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks:
            sink.close()

    def log(self, record: Record) -> None:
        """Tell one step's record to all sinks."""
        for sink in self._sinks:
            sink.log(record)

    def note(self, text: str) -> None:
        """Say something that is no number."""
        for sink in self._sinks:
            sink.note(text)


class JsonLines:
    """metrics.jsonl; each line is on disk when `log` returns, as far as this process is concerned."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", buffering=1)

    def log(self, record: Record) -> None:
        self._file.write(json.dumps(record._asdict()) + "\n")

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        self._file.close()


class Terminal:
    """A progress bar on one line of a terminal; a few plain lines where the output goes elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
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
        self._task = self._progress.add_task("train", total=steps, state="starting")
        self._progress.start()

    def log(self, record: Record) -> None:
        state = f"loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._task, completed=record.step, state=state)
        every = max(1, self._steps // PLAIN_LINES)
        if not self._console.is_terminal and (record.step % every == 0 or record.step in (1, self._steps)):
            print(f"step {record.step}/{self._steps}  {state}", flush=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
