"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from acsgd.errors import NonFiniteError, RunError
from acsgd.failures.signals import StopSignals
from acsgd.failures.stdio import enter_training
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.batches import Batch, Dataset
from acsgd.io.telemetry.metrics import Metrics
from acsgd.optim.base import PLAIN_STEP
from acsgd.optim.loss_scale import GradientScale
from acsgd.optim.schedule import learning_rate
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import Job
from acsgd.run.setup.inputs import RunInputs
from acsgd.run.setup.report import NO_VOTES, StepExchange, StepSummary, Votes
from acsgd.run.setup.resume import start
from acsgd.run.setup.session import Session, StepResult
from acsgd.run.step.after_step import NoSnapshots, StepSnapshots, evaluate_log_save, pause_needs_checkpoint, step_votes
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.loop_state import LoopState
from acsgd.run.step.nan_diagnosis import explain_non_finite
from acsgd.run.step.pace import Pace
from acsgd.run.step.spikes import SpikeGuard
from acsgd.run.step.text_log import text_log_of
from acsgd.topology import Groups

log = logging.getLogger(__name__)


def train(
    job: Job,
    inputs: RunInputs,
    groups: Groups,
    lock: RunLock,
    *,
    on_start: Callable[[], None] = lambda: None,
    end: Callable[[int], None] | None = None,
) -> None:
    """Build or resume the session of this rank, and run all remaining steps.

    on_start: called before the first one. end: ends the process with an exit code, from a thread, at a second Ctrl-C;
    None = interrupt the groups instead, so that an exception is raised here.
    """
    end = end or (lambda _: groups.interrupt("interrupted twice"))
    job = replace(job, config=job.config.with_steps(inputs.steps))
    config, is_main = job.config, job.topology.rank == 0
    if not groups.all_equal(job.fingerprint() + inputs.fingerprint()):
        raise RunError("ranks differ in their inputs: compare run files, flags, model configs and texts of all hosts")
    with contextlib.ExitStack() as stack:
        stack.enter_context(text_log_of(job))
        enter_training()
        stack.callback(inputs.reader.close)
        begin = start(job, inputs, groups)
        lock.verify()
        stack.callback(begin.session.close)
        resumed_at = begin.progress.step
        run_dir = Path(config.log.dir)
        metrics = stack.enter_context(Metrics.open(config, run_dir, resumed_at=resumed_at, is_main=is_main))
        for note in [job.describe(), *inputs.notes, *begin.notes]:
            metrics.note(note)
        checkpointing = stack.enter_context(Checkpointing.open(begin, inputs, groups, lock, note=metrics.note))
        signals = stack.enter_context(StopSignals(end))
        groups.wait_for_all("setting up", timeout_s=job.disk_timeout_s)
        on_start()
        run_steps(begin.session, begin.progress, inputs, metrics, checkpointing, signals)


def run_steps(
    session: Session,
    progress: Progress,
    inputs: RunInputs,
    metrics: Metrics,
    checkpointing: Checkpointing,
    signals: StopSignals,
    state: LoopState | None = None,
    snapshots: StepSnapshots | None = None,
) -> None:
    """Train until the last step, or until a rank receives a stop signal; evaluate, log and save when due.

    state: updated while training; its progress is `progress`. If it was asked to pause, this returns after a step.
    """
    steps = session.job.config.optim.num_steps
    state, snapshots = state or LoopState(progress), snapshots or NoSnapshots()
    spike_guard = SpikeGuard(session, state, snapshots, checkpointing, metrics.note)
    if state.is_open and not spike_guard.restore_after_spike():
        evaluate_log_save(session, state, inputs, metrics, checkpointing)
    pace, waits = Pace(session, metrics.event, state.joining), session.groups.waits
    waits.on_interrupt(partial(inputs.reader.close, wait=False))  # else the thread that reads ahead waits on
    read_ahead = partial(Dataset, inputs.reader, micros=pace.micros, waits=waits)
    batches = read_ahead(range(state.progress.step, steps))
    while (before := state.progress).step < steps and not state.is_stopped:
        state.started_at = time.perf_counter()  # the wait for the batch is part of the step
        votes = step_votes(state, snapshots, checkpointing, stop=signals.received is not None)
        result = train_step(session, next(batches), before, votes, state=state)
        checkpointing.finish_save(wait=result.summary.failed_save)
        if spike_guard.restore_after_spike():
            batches = read_ahead(range(state.progress.step, steps))
            continue
        evaluate_log_save(session, state, inputs, metrics, checkpointing)
        state.transfers.after_step(result.summary)
        pace.record(result.summary, state.progress.step)
        if result.summary.pause and state.progress.step < steps and not state.is_stopped:
            checkpointing.finish_save(wait=pause_needs_checkpoint(result.summary))
            break
        snapshots.after_step(state)
    else:
        state.is_open = True  # until it is saved: if that fails, the ranks of the next view save it
        checkpointing.finish_save(wait=True, last=True)
        state.is_open = False
        metrics.note(checkpointing.describe_end(state.progress.step, signals.received))
    session.settle()
    inputs.reader.close(wait=False)


def train_step(
    session: Session,
    batch: Batch,
    progress: Progress,
    votes: Votes = NO_VOTES,
    *,
    state: LoopState | None = None,
) -> StepResult:
    """Run one optimizer step on all ranks together. state: updated.

    Raises RunError, the same on all ranks, if loss or gradients are not finite and optim.on_nan is "stop".
    """
    state = state or LoopState(progress, started_at=time.perf_counter())
    scale = GradientScale.of(session.job.max_targets, progress.loss_scale)
    batch = batch.to(session.job.streams.device)

    # Forward, backward and data-parallel reduce; then every rank reports its losses, norms and votes to all others.
    exchange = StepExchange(session.groups, session.job.topology)  # posts receives: reports need no round trip
    loss_part, compute_s = session.forward_backward(batch, progress.step, scale.loss_scale)
    report = session.report(loss_part, batch, votes, compute_s=compute_s)
    state.has_reported = True
    summary = exchange.exchange(report)

    result = apply_step(session, batch, progress, summary)
    if result.updated:
        state.complete(result, is_synced=False)
        session.sync_after_step(progress.step)
    state.complete(result, is_synced=True)
    session.send_ahead()
    return result


def apply_step(session: Session, batch: Batch | None, progress: Progress, summary: StepSummary) -> StepResult:
    """Update the weights of this rank with the gradients of a step that all ranks have reported.

    Whether they are updated depends on the reports alone, so ranks that apply a step at different times decide alike.

    `Session.sync_after_step` completes the step, if the result says `updated`. Communicates only to find the origin of
    a NaN. batch: of the step; needed for a NaN.
    """
    job, config, step = session.job, session.job.config, progress.step
    scale = GradientScale.of(job.max_targets, progress.loss_scale)

    # Loss and gradient norm of the mean over target tokens, whose number is known only now.
    local_step = session.local_step(step)
    loss = scale.mean_loss(summary.loss, summary.targets)
    factors = scale.factors(summary.targets, summary.replica_targets, local=local_step is not None)
    norms = [square**0.5 * factor for square, factor in zip(summary.replica_squared_norms, factors, strict=True)]
    grad_norm = max(norms, key=lambda norm: math.inf if math.isnan(norm) else norm)

    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    overflowed = progress.loss_scale.dynamic and math.isfinite(loss) and not finite
    if not (finite or overflowed) and config.optim.on_nan == "stop":
        assert batch is not None
        raise NonFiniteError(explain_non_finite(session, batch, step, scale.loss_scale, loss=loss, grad_norm=grad_norm))

    # Commit, clip, step. Nothing has changed weights or residuals before all ranks reported.
    session.commit()
    updated = finite and not summary.skip
    if updated:
        replica = job.topology.replica
        session.scale_and_clip(factors[replica], norms[replica])
        session.optimizer.step(step, local_step or PLAIN_STEP)
    log.info("step %d: loss %.6g, gradient norm %.6g%s", step + 1, loss, grad_norm, "" if updated else ", skipped")
    next_scale = progress.loss_scale.after(overflowed=overflowed)
    after = progress.after(loss if updated else None, int(summary.targets), next_scale, spike=config.optim.spike)
    return StepResult(loss, grad_norm, learning_rate(step, config.optim), updated, after, summary)
