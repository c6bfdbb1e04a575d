"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from acsgd.errors import NonFiniteError, RunError
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.sampling.batches import Batch, Dataset
from acsgd.io.sampling.held_out import HeldOut
from acsgd.io.telemetry.metrics import Metrics
from acsgd.io.telemetry.text_log import open_text_log
from acsgd.metrics import describe
from acsgd.optim.base import PLAIN_STEP
from acsgd.optim.loss_scale import GradientScale
from acsgd.optim.schedule import learning_rate
from acsgd.run.checkpointing import Checkpointing
from acsgd.run.control import NO_VOTES, StepExchange, Votes
from acsgd.run.inputs import Inputs
from acsgd.run.job import Job
from acsgd.run.lock import RunLock
from acsgd.run.nan_diagnosis import explain_non_finite
from acsgd.run.session import Session, StepResult
from acsgd.run.signals import StopSignals
from acsgd.run.spike_guard import SpikeGuard
from acsgd.run.state import start
from acsgd.run.stdio import enter_training
from acsgd.topology import Groups

log = logging.getLogger(__name__)


def train(
    job: Job, inputs: Inputs, groups: Groups, lock: RunLock, *, on_start: Callable[[], None] = lambda: None
) -> None:
    """Build or resume the session of this rank, and run all remaining steps. on_start: called before the first one."""
    job = replace(job, config=job.config.with_steps(inputs.steps))
    config, topology = job.config, job.topology
    run_dir, is_main = Path(config.log.dir), topology.rank == 0
    if not groups.all_equal(job.fingerprint() + inputs.fingerprint()):
        raise RunError("ranks differ in their inputs: compare run files, flags, model configs and texts of all hosts")
    with contextlib.ExitStack() as stack:
        if "text" in config.log.to.split(","):
            text_log = open_text_log(run_dir, rank=topology.rank, stages=job.stages, replica=topology.replica)
            stack.enter_context(text_log)
        enter_training()
        begin = start(job, inputs, groups)
        lock.verify()
        stack.callback(begin.session.close)
        resumed_at = begin.progress.step
        metrics = stack.enter_context(Metrics.open(config, run_dir, resumed_at=resumed_at, is_main=is_main))
        for note in [job.describe(), *inputs.notes, *begin.notes]:
            metrics.note(note)
        checkpointing = stack.enter_context(Checkpointing.open(begin, inputs.identity, groups, lock, note=metrics.note))
        signals = stack.enter_context(StopSignals())
        groups.wait_for_all("setting up", timeout_s=job.disk_timeout_s)
        on_start()
        run_steps(begin.session, begin.progress, inputs, metrics, checkpointing, signals)


def run_steps(
    session: Session,
    progress: Progress,
    inputs: Inputs,
    metrics: Metrics,
    checkpointing: Checkpointing,
    signals: StopSignals,
) -> None:
    """Train until the last step, or until a rank receives a stop signal; evaluate, log and save when due."""
    config = session.job.config
    steps, stopped = config.optim.num_steps, False
    spike_guard = SpikeGuard(session, checkpointing, metrics.note)
    batches = iter(Dataset(inputs.reader, range(progress.step, steps)))
    while progress.step < steps and not stopped:
        started = time.perf_counter()
        votes = checkpointing.votes(stop=signals.received is not None)
        update = progress.step not in spike_guard.skipped_steps
        result = train_step(session, next(batches), progress, votes, update=update)
        step_s = time.perf_counter() - started
        checkpointing.finish_save(wait=result.summary.failed_save)
        if result.updated and (restored := spike_guard.restore_before_spike(progress, result.loss)):
            progress = restored
            batches = iter(Dataset(inputs.reader, range(progress.step, steps)))
            continue
        progress, stopped = result.progress, result.summary.stop
        evaluation, is_best = dict[str, float](), False
        if inputs.held_out is not None and _is_due(progress.step, config.eval.every, steps):
            evaluation = evaluate(session, inputs.held_out, progress.step, metrics)
            before, progress = progress, progress.evaluated(evaluation)
            is_best = progress.improves(before, config.checkpoint.best)
        save = stopped or result.summary.save or _is_due(progress.step, config.checkpoint.every_steps, steps)
        stall_s = checkpointing.copy_state(progress, due=save, best=is_best)
        metrics.log(result.record(step_s, stall_s, evaluation))
        checkpointing.start_write()  # after the log, so that no checkpoint is ahead of metrics.jsonl
    checkpointing.finish_save(wait=True, last=True)
    metrics.note(_end_note(progress.step, steps, signals, checkpointing))


def train_step(
    session: Session, batch: Batch, progress: Progress, votes: Votes = NO_VOTES, *, update: bool = True
) -> StepResult:
    """Run one optimizer step on all ranks together. update: whether the weights may change.

    Raises RunError, the same on all ranks, if loss or gradients are not finite and optim.on_nan is "stop".
    """
    job, config, step = session.job, session.job.config, progress.step
    scale = GradientScale.of(job.max_targets, progress.loss_scale)
    batch = batch.to(job.streams.device)

    # Forward, backward and data-parallel reduce; then every rank reports its losses, norms and votes to all others.
    exchange = StepExchange(session.groups.world, job.topology)  # posts receives, so that reports need no round trip
    loss_part = session.forward_backward(batch, step, scale.loss_scale)
    summary = exchange.exchange(session.report(loss_part, batch, votes))

    # Loss and gradient norm of the mean over target tokens, whose number is known only now.
    local_step = session.local_step(step)
    loss = scale.mean_loss(summary.loss, summary.targets)
    factors = scale.factors(summary.targets, summary.replica_targets, local=local_step is not None)
    norms = [square**0.5 * factor for square, factor in zip(summary.replica_squared_norms, factors, strict=True)]
    grad_norm = max(norms, key=lambda norm: math.inf if math.isnan(norm) else norm)

    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    overflowed = progress.loss_scale.dynamic and math.isfinite(loss) and not finite
    if not (finite or overflowed) and config.optim.on_nan == "stop":
        raise NonFiniteError(explain_non_finite(session, batch, step, scale.loss_scale, loss=loss, grad_norm=grad_norm))

    # Commit, clip, step, synchronize. Nothing has changed weights or residuals before all ranks reported.
    session.commit()
    updated = update and finite
    if updated:
        replica = job.topology.replica
        session.scale_and_clip(factors[replica], norms[replica])
        session.optimizer.step(step, local_step or PLAIN_STEP)
        session.sync_after_step(step)
    log.info("step %d: loss %.6g, gradient norm %.6g%s", step + 1, loss, grad_norm, "" if updated else ", skipped")
    next_scale = progress.loss_scale.after(overflowed=overflowed)
    after = progress.after(loss if updated else None, int(summary.targets), next_scale)
    return StepResult(loss, grad_norm, learning_rate(step, config.optim), updated, after, summary)


def evaluate(session: Session, held_out: HeldOut, step: int, metrics: Metrics) -> dict[str, float]:
    """Return the metrics of the held-out data after `step` steps, and print them."""
    scores = session.evaluate(held_out.batches(len(session.job.micro_ids)), step - 1)
    metrics.note(f"step {step}: {describe(scores)} ({len(held_out)} sequences{session.job.eval_form})")
    return scores


def _end_note(step: int, steps: int, signals: StopSignals, checkpointing: Checkpointing) -> str:
    if step == steps:
        return f"done: step {step} of {steps}, {checkpointing.newest}"
    return (
        f"stopped after step {step} of {steps} on {signals.received or 'a signal to another rank'}; "
        f"the same command, with any number of processes, resumes from {checkpointing.newest}"
    )


def _is_due(step: int, every: int | None, steps: int) -> bool:
    return step == steps or (every is not None and step % every == 0)
