"""The metrics of a run whose rank 0 changes."""

from __future__ import annotations

from pathlib import Path

from acsgd.config.options import Config
from acsgd.io.telemetry.metrics import Metrics
from acsgd.run.job import Job
from acsgd.run.loop_state import LoopState


class ViewMetrics:
    """The metrics of one worker, which keeps the sinks from view to view as long as it is rank 0."""

    def __init__(self) -> None:
        self._metrics: Metrics | None = None

    def of(self, job: Job, state: LoopState) -> Metrics:
        """Return the metrics for a view: those of rank 0, or without sinks on other ranks."""
        is_main = job.topology.rank == 0
        if not is_main:
            self.close()
        elif self._metrics is None:
            self._metrics = open_metrics(job.config, state)
        return self._metrics or Metrics([])

    def close(self) -> None:
        """Close the sinks."""
        if self._metrics is not None:
            self._metrics.__exit__(None, None, None)
            self._metrics = None


def open_metrics(config: Config, state: LoopState) -> Metrics:
    """Open the sinks on a new rank 0, and log the last step again if this rank has its metrics.

    The rank 0 before may have ended after that step and before it had logged it.
    """
    record = state.record if state.record and state.record.step == state.progress.step else None
    logged = state.progress.step - (record is not None or state.is_open)
    metrics = Metrics.open(config, Path(config.log.dir), resumed_at=logged, is_main=True)
    if record is not None and not state.is_open:
        metrics.log(record)
    return metrics
