"""How far the training loop of a rank is."""

from __future__ import annotations

import time
from dataclasses import dataclass

from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.record import Record
from acsgd.run.control import StepSummary
from acsgd.run.session import StepResult


@dataclass
class LoopState:
    """State of the training loop besides the session; valid also after an exception has ended the loop."""

    progress: Progress
    is_elastic: bool = False
    """Whether a stop signal concerns one host alone, so that the run stops only if all ranks vote for it."""
    pause_requested: bool = False
    """Whether this rank was asked to pause at the end of a step; set by another thread."""
    has_reported: bool = False
    """Whether the gradients of the next step are complete, and their report may have reached other ranks."""
    summary: StepSummary | None = None
    """Summary of the reports of the last completed step."""
    record: Record | None = None
    """Metrics of that step; None if another process has completed it."""
    is_synced: bool = True
    """Whether the exchange between replicas after that step is complete; True if there is none."""
    is_open: bool = False
    """Whether evaluation, log and save after that step are incomplete."""
    is_stopped: bool = False
    """Whether stop signals have ended the run."""

    started_at: float = 0.0
    """Start of the step in progress, or of the last one; a time.perf_counter()."""

    def restart(self, progress: Progress) -> None:
        """Start from a state that was loaded, not trained, here."""
        self.progress, self.summary, self.record = progress, None, None
        self.is_synced, self.has_reported, self.is_open, self.is_stopped = True, False, False, False

    def complete(self, result: StepResult, *, is_synced: bool) -> None:
        """Note that a step is complete: weights and progress are those after it.

        is_synced: whether the exchange that follows it is, too. If not, call this again after it.
        """
        record = result.record(time.perf_counter() - self.started_at)
        self.progress, self.summary, self.record = result.progress, result.summary, record
        self.is_synced, self.has_reported, self.is_open = is_synced, False, True
