"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from acsgd.errors import NonFiniteError, RunError
from acsgd.failures.signals import StopSignals
from acsgd.failures.stdio import enter_training
from acsgd.groups import Groups
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.metrics import Metrics
from acsgd.layers.batch import Batch
from acsgd.optim.base import PLAIN_STEP
from acsgd.optim.gradient_scale import GradientScale
from acsgd.optim.schedule import learning_rate
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import Job
from acsgd.run.report import (
    LOSS,
    REPLICA_SQUARED_NORMS,
    REPLICA_TARGETS,
    STEP_FIELDS,
    TARGETS,
    Report,
    StepExchange,
    StepSummary,
)
from acsgd.run.session import Session, StepResult
from acsgd.run.setup.auto import Chosen
from acsgd.run.setup.directories import share_metrics
from acsgd.run.setup.inputs import RunInputs, describe_difference
from acsgd.run.setup.resume import start
from acsgd.run.step.hooks import LoopState
from acsgd.run.step.run import TrainingRun, open_run, text_log_of
from acsgd.run.step.spikes import SKIP

NO_VOTES: Report = {}

log = logging.getLogger(__name__)


def train(
    job: Job,
    inputs: RunInputs,
    groups: Groups,
    lock: RunLock,
    *,
    on_start: Callable[[], None] = lambda: None,
    signals: StopSignals | None = None,
    chosen: Sequence[Chosen] = (),
) -> None:
    """Build or resume the session of this rank, and run all remaining steps.

    on_start: called before the first one. signals: those of this process, heeded from then on; None = record them here,
    and raise an exception at a second Ctrl-C. chosen: options that were chosen before, to be logged.
    """
    job = job.with_steps(inputs.steps, inputs.reader.sampler)
    config, is_main = job.config, job.topology.rank == 0
    if not groups.all_equal(job.fingerprint() + inputs.fingerprint()):
        raise RunError(f"ranks differ in their inputs: {describe_difference(job, groups)}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(text_log_of(job))
        enter_training()
        stack.callback(inputs.reader.close)
        begin = start(job, inputs, groups)
        lock.verify()
        stack.callback(begin.session.close)
        state, run_dir = LoopState(begin.progress), Path(config.log.dir)
        if begin.unevaluated is not None:
            state.reopen(begin.unevaluated, job.topology)
        resumed_at, log_disks = begin.progress.step, inputs.disks.log
        keeps_files = log_disks.is_leader(job.topology.rank)
        opening = Metrics.open(config, run_dir, resumed_at=resumed_at, is_main=is_main, keeps_files=keeps_files)
        metrics = stack.enter_context(opening)
        of_metrics = share_metrics(job, groups, log_disks, metrics.file, resumed_at=resumed_at)
        described = job.describe(), begin.session.describe(), *inputs.describe(begin.session, resumed_at)
        for note in [*described, *begin.notes, *of_metrics]:
            metrics.note(note)
        for choice in chosen:
            metrics.event(choice.event(resumed_at))
        if signals is None:
            signals = stack.enter_context(StopSignals(lambda _: groups.interrupt("interrupted twice")))
        run = stack.enter_context(open_run(begin, inputs, lock, signals, metrics, state))
        groups.wait_for_all("setting up", timeout_s=job.disk_timeout_s)
        on_start()
        signals.on_signal(groups.expect_stop)
        run_steps(run)


def run_steps(run: TrainingRun) -> None:
    """Train until the last step, or until a participant of the step boundary stops or pauses the run.

    The loop knows no participant. `run.state` is valid also after an exception: a loop that begins with an open step
    closes it first.
    """
    state, hooks = run.state, run.hooks
    if state.is_open:
        hooks.after_step(state)
    batches = run.read_ahead()
    while state.progress.step < run.num_steps and not (state.is_stopped or state.is_paused):
        state.started_at = time.perf_counter()  # the wait for the batch is part of the step
        if not hooks.before_step(state):
            break
        train_step(run.session, next(batches), state.progress, hooks.report(state), state=state)
        if hooks.after_step(state):
            hooks.before_next(state)
        else:
            batches = run.read_ahead()  # again from the earlier step to which the run has returned
    if not state.is_paused:
        hooks.at_end(state)
    run.session.settle()
    run.inputs.reader.close(wait=False)


def train_step(
    session: Session,
    batch: Batch,
    progress: Progress,
    votes: Report = NO_VOTES,
    *,
    state: LoopState | None = None,
) -> StepResult:
    """Run one optimizer step on all ranks together. state: updated.

    votes: what this rank reports besides the numbers of the step: the same fields on all ranks.
    Raises RunError, the same on all ranks, if loss or gradients are not finite and optim.on_nan is "stop".
    """
    state = state or LoopState(progress, started_at=time.perf_counter())
    scale = GradientScale.of(session.job.shapes.max_targets, progress.loss_scale)

    # Forward, backward and data-parallel reduce; then every rank reports its losses, norms and votes to all others.
    fields = [*STEP_FIELDS, *votes]
    exchange = StepExchange(session.groups, session.job.topology, fields)  # posts receives: no round trip follows
    with session.phase("forward, backward and reduce"):
        computed = session.forward_backward(batch, progress.step, scale.loss_scale)
    report = session.report(computed, batch)
    state.has_reported = True
    with session.phase("exchange reports"):
        summary = exchange.exchange({**report, **votes})

    with session.phase("update"):
        result = apply_step(session, batch, progress, summary)
    if result.updated or session.exchanges_without_update(progress.step):
        state.complete(result, is_synced=False)
        with session.phase("exchange between replicas"):
            session.sync_after_step(progress.step)
    state.complete(result, is_synced=True)  # each part is: an interrupt below repeats the sharing, not the exchange
    session.share_parts()  # what was received before may have changed them, also without an update
    state.complete(result, is_synced=True)  # again, since the time of the step ends here
    session.send_ahead()
    return result


def apply_step(session: Session, batch: Batch | None, progress: Progress, summary: StepSummary) -> StepResult:
    """Update the weights of this rank with the gradients of a step that all ranks have reported.

    Whether they are updated depends on the reports alone, so ranks that apply a step at different times decide alike.

    `Session.sync_after_step` completes the step, if the result says `updated`. Communicates only to find the origin of
    a NaN. batch: of the step; needed for a NaN.
    """
    job, config, step = session.job, session.job.config, progress.step
    scale = GradientScale.of(job.shapes.max_targets, progress.loss_scale)

    # Loss and gradient norm of the mean over target tokens, whose number is known only now.
    local_step = session.local_step(step)
    loss = scale.mean_loss(summary[LOSS], summary[TARGETS])
    of_domains = session.peers.over_domains(summary[REPLICA_TARGETS])
    factors = scale.factors(summary[TARGETS], of_domains, local=local_step is not None)
    squares = session.owned.ownership.squared_norms(summary[REPLICA_SQUARED_NORMS])
    norms = [square**0.5 * factor for square, factor in zip(squares, factors, strict=True)]
    grad_norm = max(norms, key=lambda norm: math.inf if math.isnan(norm) else norm)

    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    overflowed = progress.loss_scale.dynamic and math.isfinite(loss) and not finite
    if not (finite or overflowed) and summary[TARGETS] and config.optim.on_nan == "stop":
        assert batch is not None
        explanation = session.explain_non_finite(batch, step, scale.loss_scale, loss=loss, grad_norm=grad_norm)
        raise NonFiniteError(explanation)

    # Commit, clip, step. Nothing has changed weights or residuals before all ranks reported. A step without target
    # tokens has no loss, and changes no weights.
    session.commit()
    updated = finite and not summary[SKIP]
    if updated:
        session.scale_and_clip(factors[job.topology.replica], norms[job.topology.replica])
        session.optimizer.step(step, local_step or PLAIN_STEP)
    log.info("step %d: loss %.6g, gradient norm %.6g%s", step + 1, loss, grad_norm, "" if updated else ", skipped")
    copies, next_scale = session.copies(summary), progress.loss_scale.after(overflowed=overflowed)
    targets = int(summary[TARGETS]) // copies
    after = progress.after(loss if updated else None, targets, next_scale, spike=config.optim.spike)
    rate, bubble, memory = learning_rate(step, config.optim), session.schedule_bubble(copies), job.gpu_memory_bytes
    return StepResult(loss, grad_norm, rate, updated, after, summary, bubble, job.model.token_flops, memory, copies)
