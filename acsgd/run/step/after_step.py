"""What happens between two steps: votes, evaluation, log, save."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from acsgd.io.data.held_out import HeldOut
from acsgd.io.telemetry.metrics import Metrics
from acsgd.metrics import describe
from acsgd.run.setup.inputs import RunInputs
from acsgd.run.setup.report import StepSummary, Votes
from acsgd.run.setup.session import Session
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.loop_state import LoopState


class StepSnapshots(Protocol):
    """Snapshots of the state, which are taken between steps."""

    @property
    def is_pending(self) -> bool:
        """Whether the snapshot in progress is incomplete on this rank."""
        ...

    @property
    def interval(self) -> int:
        """Number of steps between two snapshots that this rank wants."""
        ...

    def after_step(self, state: LoopState) -> None:
        """Take a snapshot if one is due. Collective."""
        ...

    def return_to(self, step: int) -> None:
        """Drop the snapshots after a step to which the weights were returned."""
        ...


class NoSnapshots:
    """Snapshots of a run that takes none."""

    is_pending = False
    interval = 0

    def after_step(self, state: LoopState) -> None:
        pass

    def return_to(self, step: int) -> None:
        pass


def step_votes(state: LoopState, snapshots: StepSnapshots, checkpointing: Checkpointing, *, stop: bool) -> Votes:
    """Return what this rank votes for, and requests, in the next step. stop: whether it has received a stop signal."""
    return checkpointing.votes(stop=stop)._replace(
        pause=state.pause_requested and not checkpointing.is_saving,  # a save takes longer than others should wait
        skip=state.progress.step in state.skipped_steps,
        snapshot_pending=snapshots.is_pending,
        snapshot_interval=snapshots.interval,
        joins=state.transfers.is_pending,
        wanted=state.transfers.wanted,
    )


def evaluate_log_save(
    session: Session, state: LoopState, inputs: RunInputs, metrics: Metrics, checkpointing: Checkpointing
) -> None:
    """Evaluate, log and save after the last completed step, each if it is due."""
    config, summary, progress = session.job.config, state.summary, state.progress
    assert summary is not None
    state.is_stopped = summary.all_stop if state.is_elastic else summary.stop
    evaluation, is_best, steps = dict[str, float](), False, config.optim.num_steps
    if inputs.held_out is not None and _is_due(progress.step, config.eval.every, steps):
        evaluation = evaluate(session, inputs.held_out, progress.step, metrics, state.joining)
        progress = progress.evaluated(evaluation)
        is_best = progress.improves(state.progress, config.checkpoint.best)
    must_save = state.is_stopped or pause_needs_checkpoint(summary) or summary.save
    save = must_save or _is_due(progress.step, config.checkpoint.every_steps, steps)
    stall_s = checkpointing.copy_state(progress, due=save, best=is_best, idle=state.joining)
    if state.record is not None:
        state.record = state.record._replace(save_stall_s=stall_s, evaluation=evaluation)
        metrics.log(state.record)
    checkpointing.start_write()  # after the log, so that no checkpoint is ahead of metrics.jsonl
    state.progress, state.is_open = progress, False


def pause_needs_checkpoint(summary: StepSummary) -> bool:
    """Return whether the run pauses, and the ranks that leave then are the only ones with some of its weights."""
    return summary.pause and summary.loses_stage


def evaluate(
    session: Session, held_out: HeldOut, step: int, metrics: Metrics, idle: Collection[int]
) -> dict[str, float]:
    """Return the metrics of the held-out data after `step` steps, and print them. idle: as of `HeldOut.batches`."""
    scores = session.evaluate(held_out.batches(len(session.job.micro_ids), idle), step - 1)
    metrics.note(f"step {step}: {describe(scores)} ({len(held_out)} sequences{session.job.eval_form})")
    return scores


def _is_due(step: int, every: int | None, steps: int) -> bool:
    return step == steps or (every is not None and step % every == 0)
