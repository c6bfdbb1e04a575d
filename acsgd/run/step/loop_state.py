"""How far the training loop of a rank is."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.record import StepRecord
from acsgd.run.setup.report import StepSummary
from acsgd.run.setup.session import StepResult


class StateTransfers(Protocol):
    """Transfers of state to ranks that join, beside training, in which this rank takes part."""

    @property
    def is_pending(self) -> bool:
        """Whether some of the state of this rank is missing."""
        ...

    @property
    def wanted(self) -> int | None:
        """Layer whose state after the next step this rank requests, by its index in the model; None if no one."""
        ...

    def after_step(self, summary: StepSummary) -> None:
        """Send or load state after a step. Raises RunError if a connection fails."""
        ...

    def restart(self) -> None:
        """Transfer all state again, since the run has returned to an earlier step."""
        ...

    def close(self) -> None:
        """End the transfers."""
        ...


class NoTransfers:
    """Transfers of a rank that takes part in none."""

    is_pending = False
    wanted = None

    def after_step(self, summary: StepSummary) -> None:
        pass

    def restart(self) -> None:
        pass

    def close(self) -> None:
        pass


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
    record: StepRecord | None = None
    """Metrics of that step; None if another process has completed it."""
    is_synced: bool = True
    """Whether the exchange between replicas after that step is complete; True if there is none."""
    is_open: bool = False
    """Whether evaluation, log and save after that step are incomplete."""
    is_stopped: bool = False
    """Whether stop signals have ended the run."""
    skipped_steps: set[int] = field(default_factory=set)
    """Steps, counted from 0, whose update this rank votes to skip: their loss was a spike."""

    joining: Collection[int] = ()
    """Replicas with ranks whose state is incomplete: they have no micro-batches, and save no weights."""
    transfers: StateTransfers = field(default_factory=NoTransfers)

    started_at: float = 0.0
    """Start of the step in progress, or of the last one; a time.perf_counter()."""

    def restart(self, progress: Progress) -> None:
        """Start from a state that was loaded, not trained, here."""
        self.progress, self.summary, self.record = progress, None, None
        self.is_synced, self.has_reported, self.is_open, self.is_stopped = True, False, False, False
        self.joining = ()

    def return_to(self, progress: Progress) -> None:
        """Note that the weights of an earlier step were loaded."""
        self.progress, self.is_open = progress, False
        self.transfers.restart()

    def complete(self, result: StepResult, *, is_synced: bool) -> None:
        """Note that a step is complete: weights and progress are those after it.

        is_synced: whether the exchange that follows it is, too. If not, call this again after it.
        """
        record = result.record(time.perf_counter() - self.started_at)
        self.progress, self.summary, self.record = result.progress, result.summary, record
        self.is_synced, self.has_reported, self.is_open = is_synced, False, True
        self.joining = result.summary.joining
