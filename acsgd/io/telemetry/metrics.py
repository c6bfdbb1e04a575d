"""Metrics of a run, sent to the sinks of log.to."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from acsgd.config.options import Config
from acsgd.config.run_file import to_toml
from acsgd.io.files.atomic import replace_text
from acsgd.io.telemetry.json_lines import JsonLinesSink
from acsgd.io.telemetry.record import RunEvent, Sink, StepRecord
from acsgd.io.telemetry.terminal import TerminalSink
from acsgd.io.telemetry.trackers import Mlflow, TensorBoard, TrackerSink, Trackio
from acsgd.io.telemetry.wandb_log import Wandb

log = logging.getLogger(__name__)


TEXT = "text"
"""Name in log.to of the text log that each rank has; all others are trackers, of the main rank alone."""
FILE = "jsonl"
"""Name in log.to of the tracker whose file each run directory has."""


class Tracker(NamedTuple):
    """A kind of sink, as named in log.to."""

    open: Callable[[Config, Path, int, Callable[[str], None]], Sink]
    """Opens it for a configuration, a run directory, the completed steps of the checkpoint that the run resumed from (0
    = a new run), and a function that prints a sentence for the user."""
    package: str | None = None
    """Package that it needs, an extra of acsgd."""


TRACKERS: Mapping[str, Tracker] = {
    "print": Tracker(TerminalSink.open),
    FILE: Tracker(JsonLinesSink.open),
    "tensorboard": Tracker(partial(TrackerSink, "tensorboard", TensorBoard), "tensorboard"),
    "mlflow": Tracker(partial(TrackerSink, "mlflow", Mlflow), "mlflow"),
    "trackio": Tracker(partial(TrackerSink, "trackio", Trackio), "trackio"),
    "wandb": Tracker(partial(TrackerSink, "wandb", Wandb), "wandb"),
}
"""Trackers by name. To add one, write its `Sink` and one line here."""


def check_trackers(to: str) -> None:
    """Raise ValueError if log.to names an unknown sink, or one whose package is not installed."""
    names = [name for name in to.split(",") if name]
    if unknown := sorted({*names} - {*TRACKERS, TEXT}):
        known = ", ".join(f'"{name}"' for name in (*TRACKERS, TEXT))
        raise ValueError(f'log.to="{to}": unknown {", ".join(unknown)}; use {known}, comma-separated')
    for package in (TRACKERS[name].package for name in names if name != TEXT):
        spec = importlib.util.find_spec(package) if package else None
        if package and (
            spec is None or spec.origin is None
        ):  # a directory ./wandb is a namespace package without origin
            raise ValueError(f'log.to="{to}" needs {package}: pip install "acsgd[{package}]"')


class Metrics:
    """Sends records and notes to all sinks. Only the main rank has sinks; others may have that of metrics.jsonl."""

    def __init__(self, sinks: list[Sink], *, every: int = 1, ends: Collection[int] = ()) -> None:
        """every: interval between the steps that sinks get; ends: first and last step, which they get, too."""
        self._sinks = sinks
        self._every, self._ends = every, ends

    @classmethod
    def open(
        cls, config: Config, run_dir: Path, *, resumed_at: int, is_main: bool, keeps_files: bool = False
    ) -> Metrics:
        """Write config.toml into `run_dir` and open the sinks of log.to.

        resumed_at: completed steps of the checkpoint the run resumed from; 0 = a new run. is_main: whether this rank
        has all sinks; keeps_files: whether it writes the files in the run directory, though another rank is the main
        one, on a host with another disk.
        """
        metrics = cls([], every=config.log.every or 1, ends=(resumed_at + 1, config.optim.num_steps))
        if is_main or keeps_files:
            run_dir.mkdir(parents=True, exist_ok=True)
            replace_text(run_dir / "config.toml", to_toml(config.as_given))
            names = [name for name in config.log.to.split(",") if is_main or name == FILE]
            for tracker in (tracker for name, tracker in TRACKERS.items() if name in names):
                metrics._sinks.append(tracker.open(config, run_dir, resumed_at, metrics.note))  # may print a sentence
        return metrics

    @property
    def file(self) -> JsonLinesSink | None:
        """Sink of metrics.jsonl; None if this rank writes none."""
        return next((sink for sink in self._sinks if isinstance(sink, JsonLinesSink)), None)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close(failed=kind is not None)

    def log(self, record: StepRecord) -> None:
        """Send the record of a step to all sinks that are due; metrics.jsonl has all."""
        is_due = record.step % self._every == 0 or record.step in self._ends or bool(record.evaluation)
        for sink in self._sinks:
            if is_due or isinstance(sink, JsonLinesSink):
                sink.log(record)

    def event(self, event: RunEvent) -> None:
        """Send an event to all sinks and to the text log of this rank."""
        log.info(event.text)
        for sink in self._sinks:
            sink.event(event)

    def note(self, text: str) -> None:
        """Send a sentence for the user to all sinks and to the text log of this rank."""
        log.info(text)
        for sink in self._sinks:
            sink.note(text)
