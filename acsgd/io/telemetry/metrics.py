"""Metrics of a run, sent to the sinks of log.to."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

from acsgd.config.options import Config
from acsgd.config.run_file import to_toml
from acsgd.io.telemetry.json_lines import METRICS, JsonLinesSink
from acsgd.io.telemetry.record import RunEvent, Sink, StepRecord
from acsgd.io.telemetry.terminal import TerminalSink

log = logging.getLogger(__name__)


class Metrics:
    """Sends records and notes to all sinks. Only the main rank has sinks."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(cls, config: Config, run_dir: Path, *, resumed_at: int, is_main: bool) -> Metrics:
        """Write config.toml into `run_dir` and open the sinks of log.to.

        resumed_at: completed steps of the checkpoint the run resumed from; 0 = a new run. is_main: whether this rank
        has sinks.
        """
        names = set(config.log.to.split(",")) if is_main else set()
        metrics = cls([])
        if is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "config.toml").write_text(to_toml(config.as_given))
        if "jsonl" in names:
            path = run_dir / METRICS
            metrics._sinks.append(JsonLinesSink(path, resumed_at=resumed_at, notify=metrics.note))
        if "print" in names:
            fp16 = config.model.dtype == "fp16"
            metrics._sinks.append(TerminalSink(config.optim.num_steps, resumed_at=resumed_at, fp16=fp16))
        if "wandb" in names:
            from acsgd.io.telemetry.wandb_log import WandbSink

            metrics._sinks.append(WandbSink(config, run_dir, resumed_at=resumed_at, notify=metrics.note))
        return metrics

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close(failed=kind is not None)

    def log(self, record: StepRecord) -> None:
        """Send the record of a step to all sinks."""
        for sink in self._sinks:
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
