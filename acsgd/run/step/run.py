"""What one rank trains with and the participants of its step boundary: for a whole run, or a view of an elastic one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from acsgd.failures.signals import StopSignals
from acsgd.io.data.batches import BatchReader, Dataset
from acsgd.io.data.held_out import HeldOut
from acsgd.io.data.sources.streamed import Streamed
from acsgd.io.telemetry.metrics import TEXT, Metrics
from acsgd.io.telemetry.text_log import open_text_log
from acsgd.layers.batch import Batch
from acsgd.metrics import describe
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import Job
from acsgd.run.report import Report, StepField, Vote, on_all, on_any
from acsgd.run.session import Session
from acsgd.run.setup.inputs import RunInputs
from acsgd.run.setup.resume import Start
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.hooks import LoopState, StepHook, StepHooks
from acsgd.run.step.link_codecs import LinkCodecs
from acsgd.run.step.pace import Pace
from acsgd.run.step.replica_mode import ReplicaMode
from acsgd.run.step.spikes import SpikeGuard
from acsgd.run.step.tracing import StepTrace
from acsgd.run.step.upload import open_upload

STOP = StepField("stop", on_any)
"""Whether this rank has received a stop signal."""
READY = StepField("ready", on_all)
"""Whether this rank has the next batch already."""
POLL_S = 0.2
"""Seconds between two votes of ranks that wait for streamed data."""


class StopOnSignal(StepHook):
    """Ends the run after a step by the stop signals of all ranks. stops: STOP, reduced to whether the run ends."""

    def __init__(self, signals: StopSignals, stops: StepField[bool] = STOP) -> None:
        self.fields = (stops,)
        self._stops = stops
        self._signals = signals

    def report(self, state: LoopState) -> Report:
        return {self._stops: self._signals.received is not None}

    def after_step(self, state: LoopState) -> None:
        assert state.summary is not None
        state.is_stopped |= state.summary[self._stops]


class Evaluations(StepHook):
    """Evaluates the held-out data every eval.every steps. note: prints a sentence for the user.

    stops: see `StopOnSignal`. All ranks leave an evaluation together if the run ends; the resumed run repeats it.
    """

    def __init__(
        self,
        session: Session,
        held_out: HeldOut,
        note: Callable[[str], None],
        signals: StopSignals,
        stops: StepField[bool],
    ) -> None:
        self._session = session
        self._held_out = held_out
        self._scores = ""
        self._note = note
        self._signals = signals
        self._stops = stops

    def after_step(self, state: LoopState) -> None:
        job, held_out, step = self._session.job, self._held_out, state.progress.step
        if not state.is_due(job.config.eval.every, job.config.optim.num_steps):
            return
        try:
            scores = self._session.evaluate(self._batches(state), step - 1)
        except _LeftError:
            self._note(f"step {step}: a stop signal has ended the evaluation; the resumed run begins with it")
            state.is_stopped, state.unevaluated = True, state.record
            return
        self._scores = f"step {step}: {describe(scores)} ({len(held_out)} sequences{job.eval_form})"
        state.evaluated = state.progress.evaluated(scores)
        if state.record is not None:
            state.record = state.record._replace(evaluation=scores)

    def after_log(self, state: LoopState) -> None:
        """Print the metrics, after those of the step that they follow."""
        if self._scores:
            self._note(self._scores)
        self._scores = ""

    def _batches(self, state: LoopState) -> Iterator[Batch]:
        """Yield the batches of this replica. Raises _LeftError, after the same batch on all ranks, if the run ends."""
        job, vote = self._session.job, Vote(self._session.groups)
        even = job.config.dp.shard == "weights"  # each replica sends its parts of the weights as often
        batches = self._held_out.batches(len(job.micro_ids), state.idle, even=even)
        fewest = job.shapes.num_micros // job.topology.replicas  # micro-batches in a batch of any replica
        is_over = state.is_stopped
        for _ in range(self._held_out.most_batches(fewest, state.idle)):
            if is_over:
                vote.settle()
                raise _LeftError
            stops = self._signals.received is not None
            before = vote.cast(stops, not stops)
            if (batch := next(batches, None)) is not None:
                yield batch
            is_over = bool(before) and self._stops.reduce([[before[0], not before[1]]])
        vote.settle()


class NextBatch(StepHook):
    """Opens the batches of a run. If a source is streamed, all ranks wait for the next one together, if one has to.

    So a stop signal to any of them ends the wait. stops: see `StopOnSignal`; note: prints a sentence for the user.
    """

    def __init__(
        self,
        session: Session,
        reader: BatchReader,
        micros: Callable[[int], range],
        signals: StopSignals,
        stops: StepField[bool],
        note: Callable[[str], None],
    ) -> None:
        self._session = session
        self._reader = reader
        self._micros = micros
        self._signals = signals
        self._stops = stops
        self._note = note
        self._is_streamed = any(isinstance(source, Streamed) for source, _ in session.job.sources)
        self.fields = (READY,) if self._is_streamed else ()
        self._batches: Dataset | None = None
        self._is_ready = False
        """Whether all ranks have the next batch, as they have reported with the last step."""

    def open(self, steps: range) -> Dataset:
        """Return the batches of some steps, in place of those that were opened before."""
        if self._batches is not None:
            self._batches.close()
        self._batches = Dataset(self._reader, steps, micros=self._micros, waits=self._session.groups.waits)
        self._is_ready = False
        return self._batches

    def report(self, state: LoopState) -> Report:
        return {READY: self._batches is not None and self._batches.is_ready()} if self._is_streamed else {}

    def after_step(self, state: LoopState) -> None:
        assert state.summary is not None
        self._is_ready = state.summary[READY]

    def before_step(self, state: LoopState) -> None:
        if not self._is_streamed or self._is_ready:
            return
        assert self._batches is not None
        groups, timeout_s = self._session.groups, self._session.job.config.run.timeout
        vote, before, me, number = Vote(groups), list[bool](), groups.world.rank(), groups.world.size()
        failed, noted_at = False, time.monotonic() + timeout_s
        while not (before and not any(before[:number])):
            is_ready, stops = self._batches.is_ready(POLL_S), self._signals.received is not None
            waiting = [rank == me and not is_ready for rank in range(number)]
            before = vote.cast(*waiting, self._batches.has_failed, stops, not stops)
            if not before:
                continue
            *waiting, failed, any_stops, any_trains = before
            if self._stops.reduce([[any_stops, not any_trains]]):
                state.is_stopped = True
                self._note(f"step {state.progress.step}: a stop signal has ended the wait for streamed data")
                break
            if failed:
                break
            if any(waiting) and time.monotonic() >= noted_at:
                noted_at = math.inf
                ranks = ", ".join(str(rank) for rank, waits in enumerate(waiting) if waits)
                self._note(f"step {state.progress.step}: after {timeout_s:g} s, ranks {ranks} wait for streamed data")
        vote.settle()
        if failed and not (state.is_stopped or self._batches.has_failed):
            groups.wait_for_all("reading streamed data", timeout_s=timeout_s)  # until the rank raises its error


class _LeftError(Exception):
    """All ranks leave an evaluation."""


@dataclass(frozen=True)
class TrainingRun:
    """What one rank trains with."""

    session: Session
    inputs: RunInputs
    state: LoopState
    hooks: StepHooks
    checkpointing: Checkpointing
    batches: NextBatch

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the run."""
        return self.session.job.config.optim.num_steps

    def read_ahead(self) -> Iterator[Batch]:
        """Return the batches of the steps that are left."""
        return self.batches.open(range(self.state.progress.step, self.num_steps))


@contextlib.contextmanager
def open_run(
    begin: Start,
    inputs: RunInputs,
    lock: RunLock,
    signals: StopSignals,
    metrics: Metrics,
    state: LoopState,
    *,
    stops: StepField[bool] = STOP,
    extra: Callable[[Checkpointing], Sequence[StepHook]] = lambda _: (),
) -> Iterator[TrainingRun]:
    """Open the participants of the step boundary of a session.

    Their order matters: a spike is restored before it is evaluated or saved, and an evaluation decides whether a
    checkpoint is the best. extra: returns participants before these. stops: see `StopOnSignal`.
    """
    session = begin.session
    with (
        contextlib.ExitStack() as stack,
        Checkpointing.open(begin, inputs, lock, signals, note=metrics.note) as checkpointing,
        open_upload(session, inputs.disks, checkpointing, signals, metrics.note) as uploads,
    ):
        pace = Pace(session, metrics.event, state.idle)
        # the end of uploads comes last: it raises an error if one has failed
        hooks: list[StepHook] = [*extra(checkpointing), *uploads, StepTrace(session, metrics.note)]
        hooks.append(SpikeGuard(session, checkpointing, metrics.note))
        hooks.append(StopOnSignal(signals, stops))
        if inputs.held_out is not None:
            hooks.append(Evaluations(session, inputs.held_out, metrics.note, signals, stops))
        batches = NextBatch(session, inputs.reader, pace.micros, signals, stops, metrics.note)
        hooks += [checkpointing, pace, batches]
        if session.job.plugins.ladder is not None and session.job.topology.stages > 1:
            hooks.append(stack.enter_context(contextlib.closing(LinkCodecs(session, metrics.event, state))))
        if session.job.modes is not None:
            hooks.append(ReplicaMode(session, session.job.modes, metrics.event))
        yield TrainingRun(session, inputs, state, StepHooks(hooks, metrics), checkpointing, batches)


def text_log_of(job: Job) -> contextlib.AbstractContextManager[None]:
    """Return the text log of this rank, open while the context is; without effect unless log.to has "text"."""
    config, topology = job.config.log, job.topology
    if TEXT not in config.to.split(","):
        return contextlib.nullcontext()
    return open_text_log(Path(config.dir), rank=topology.rank, stages=job.layout.stages, replica=topology.replica)
