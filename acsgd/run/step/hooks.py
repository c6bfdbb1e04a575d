"""The step boundary: participants that report numbers with each step, and act between two steps by those of all ranks.

A participant is a `StepHook`. It declares the fields that it reports, and acts after the step, before the next one, at
a return to an earlier step, and at the end of the run. All ranks have the same participants in the same order, and
decide alike, since all have equal numbers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.metrics import Metrics
from acsgd.io.telemetry.record import StepRecord
from acsgd.run.report import STEP_FIELDS, Report, StepField, StepSummary
from acsgd.run.session import StepResult
from acsgd.topology import Topology


@dataclass
class LoopState:
    """State of the training loop besides the session; valid also after an exception has ended the loop."""

    progress: Progress
    summary: StepSummary | None = None
    """Reports of all ranks for the last completed step; None if the run has just started or returned from a file."""
    record: StepRecord | None = None
    """Metrics of that step; None if another process has completed it."""
    has_reported: bool = False
    """Whether the gradients of the next step are complete, and their report may have reached other ranks."""
    is_synced: bool = True
    """Whether the exchange between replicas after the last step is complete; True if there is none."""
    is_open: bool = False
    """Whether evaluation, log and save after the last step are incomplete."""
    is_stopped: bool = False
    """Whether the run ends after the last step, as stop signals request, or a participant."""
    ended_because: str | None = None
    """Why a participant has ended it, on all ranks; None otherwise."""
    is_paused: bool = False
    """Whether the loop ends after the last step, and the run does not."""
    save_is_due: bool = False
    """Whether a participant needs a checkpoint of the last step."""
    evaluated: Progress | None = None
    """Progress with the evaluation after the last step, until the step is closed; None without one."""
    unevaluated: StepRecord | None = None
    """Metrics of the last step if its evaluation is due and was left on a stop signal."""
    idle: Collection[int] = ()
    """Replicas that have no micro-batches, and save no weights."""
    skipped_steps: set[int] = field(default_factory=set)
    """Steps, counted from 0, whose update this rank votes to skip: their loss was a spike."""
    started_at: float = 0.0
    """Start of the step in progress, or of the last one; a time.perf_counter()."""

    def restart(self, progress: Progress) -> None:
        """Start from a state that was loaded, not trained, here."""
        self.progress, self.summary, self.record, self.idle = progress, None, None, ()
        self.is_synced, self.has_reported, self.is_open, self.is_stopped = True, False, False, False
        self.ended_because = None

    def end(self, reason: str) -> None:
        """End the run after the last step; all ranks must. reason: continues "ended after step 5 of 9: "."""
        self.is_stopped, self.ended_because = True, reason

    def reopen(self, record: StepRecord, topology: Topology) -> None:
        """Open the last step again, whose evaluation was left by the run that has saved it. record: its metrics."""
        self.record, self.summary, self.is_open = record, StepSummary.zeros(topology), True

    def complete(self, result: StepResult, *, is_synced: bool) -> None:
        """Note that a step is complete: weights and progress are those after it.

        is_synced: whether the exchange that follows it is, too. If not, call this again after it.
        """
        record = result.record(time.perf_counter() - self.started_at)
        self.progress, self.summary, self.record = result.progress, result.summary, record
        self.is_synced, self.has_reported, self.is_open = is_synced, False, True

    def is_due(self, every: int | None, num_steps: int) -> bool:
        """Return whether something is due after the last step. every: interval in steps; None = only at the end."""
        step = self.progress.step
        return step == num_steps or (every is not None and step % every == 0)


class StepHook:
    """A participant of the step boundary. Each method does nothing unless it is overridden.

    All ranks call the methods together, so any of them may be a collective.
    """

    fields: Sequence[StepField[Any]] = ()
    """Fields that this participant reports, by other names than those of all others."""

    def report(self, state: LoopState) -> Report:
        """Return this rank's numbers for the step that begins. Fields that are left out are reported as 0."""
        return {}

    def before_step(self, state: LoopState) -> None:
        """Act before a step, also the first one of a loop, or end the loop by `state.is_stopped`."""

    def after_step(self, state: LoopState) -> Progress | None:
        """Act after a step, before its metrics are logged. Nothing that is written may be ahead of them.

        Returns the progress of an earlier step, if this has loaded the weights of that step; then the participants
        that follow are not called.
        """
        return None

    def after_log(self, state: LoopState) -> None:
        """Act once the metrics of the step are logged."""

    def before_next(self, state: LoopState) -> None:
        """Act before the next step of the same loop, or end the loop by `state.is_paused`."""

    def at_return(self, state: LoopState) -> None:
        """Drop what is known of later steps: the weights of an earlier step were loaded."""

    def at_end(self, state: LoopState) -> None:
        """Act at the end of the run, after the participants that follow this one."""


class StepHooks:
    """All participants of a run, in their order. Raises ValueError if two of them report fields of one name."""

    def __init__(self, hooks: Sequence[StepHook], metrics: Metrics) -> None:
        counts = Counter(each.name for fields in (STEP_FIELDS, *(hook.fields for hook in hooks)) for each in fields)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"fields of a step's report that are declared more than once: {', '.join(repeated)}")
        self._hooks = hooks
        self._metrics = metrics

    def report(self, state: LoopState) -> Report:
        """Return what this rank reports with the step that begins, besides the numbers of the step itself."""
        numbers: dict[StepField[Any], float] = {}
        for hook in self._hooks:
            reported = hook.report(state)
            if undeclared := [field.name for field in reported if field not in hook.fields]:
                raise ValueError(f"{type(hook).__name__} reports fields that it does not declare: {undeclared}")
            numbers |= {field: reported.get(field, 0.0) for field in hook.fields}
        return numbers

    def before_step(self, state: LoopState) -> bool:
        """Act before a step; return whether it is to be run."""
        for hook in self._hooks:
            hook.before_step(state)
        return not state.is_stopped

    def after_step(self, state: LoopState) -> bool:
        """Close the last step: act, log its metrics, act; return False if the run has returned to an earlier step."""
        state.save_is_due, state.evaluated, state.unevaluated = False, None, None
        for hook in self._hooks:
            if (earlier := hook.after_step(state)) is not None:
                state.progress, state.is_open = earlier, False
                for each in self._hooks:
                    each.at_return(state)
                return False
        if state.record is not None:
            self._metrics.log(state.record)
        for hook in self._hooks:
            hook.after_log(state)
        state.progress, state.is_open = state.evaluated or state.progress, False
        return True

    def before_next(self, state: LoopState) -> None:
        """Act before the next step."""
        for hook in self._hooks:
            hook.before_next(state)

    def at_end(self, state: LoopState) -> None:
        """Act at the end of the run, the last participant first."""
        for hook in reversed(self._hooks):
            hook.at_end(state)
