"""Replay of a lost position: its new rank repeats the steps since a snapshot, while all others keep their state.

All other ranks have logged what they sent to it. They send these messages again, step by step, with what all ranks have
agreed on in the step. So the new rank runs forward, backward and the optimizer step on the same tensors as the old one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch

from acsgd.dp.resize import Place
from acsgd.elastic.plan import Plan
from acsgd.elastic.replay_log import Position, ReplayLog
from acsgd.elastic.replay_plan import Replay
from acsgd.elastic.snapshot_store import SnapshotStore
from acsgd.elastic.transfer import LayersInMemory, receive_layers, receive_tensors, send_tensors
from acsgd.fields import from_json
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.sampling.batches import Batch, BatchReader
from acsgd.optim.loss_scale import GradientScale
from acsgd.pp.tied.plan import Rows
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.message_log import LoggedMessages
from acsgd.run.build import build_session
from acsgd.run.control import StepSummary
from acsgd.run.job import Job
from acsgd.run.loop_state import LoopState
from acsgd.run.session import Session
from acsgd.shards.load import Constants
from acsgd.streams import available_memory_bytes
from acsgd.topology import Groups, collective_errors
from acsgd.train import apply_step

MEMORY_SHARE = 0.25
"""Share of the available host memory that the logs of all ranks of a host may take."""
SUMMARY = "summary"
"""Name of the summary of all reports among the tensors of a step; those of messages are their positions."""


def log_bytes(job: Job) -> int:
    """Return the maximum size of the log of a rank, bytes; 0 if its steps cannot be replayed.

    With several replicas, another one has the state of a lost position. Of `delta`, a message is not enough: the rank
    that has ended had the activation cache, too; and so of rows that are sent as differences.
    """
    tied = job.plugins.tied
    has_state = isinstance(job.plugins.forward, Delta) or (isinstance(tied, Rows) and tied.are_differences)
    if has_state or job.topology.replicas > 1 or job.topology.stages == 1:
        return 0
    chosen, available = int(job.config.elastic.replay_log * 2**30), available_memory_bytes()
    return chosen if available is None else min(chosen, int(MEMORY_SHARE * available) // job.local_world_size)


def describe_log(limit_bytes: int) -> str:
    """Return a sentence on the logs of a run. limit_bytes: of a rank."""
    return (
        f"logs of sent messages, to replay a lost stage, take up to {limit_bytes / 2**20:,.1f} MiB of host memory per "
        "process; elastic.replay_log=0 turns them off"
    )


def open_log(log: ReplayLog, session: Session, state: LoopState, plan: Plan, epoch: int, *, is_useful: bool) -> None:
    """Log the steps of a view on this rank, if they can be replayed. is_useful: whether the view takes snapshots."""
    limit_bytes, state.log = log_bytes(session.job) if is_useful else 0, None
    if not limit_bytes:
        log.close()
        return
    is_continued = not (plan.from_disk or plan.from_snapshot)
    log.open(epoch, state.progress.step, _position(session.job), limit_bytes, is_continued=is_continued)
    _attach(log, session, state)


class Replayed(NamedTuple):
    """What the new rank of a lost position has done."""

    session: Session
    """With the state after the last step, and not connected: `reconnect` must follow."""
    seconds: float
    received_bytes: int
    """Size of the snapshot and the messages that it has received."""


def replay_position(
    job: Job,
    groups: Groups,
    plan: Plan,
    constants: Constants,
    store: SnapshotStore,
    reader: BatchReader,
    state: LoopState,
) -> Replayed | None:
    """Bring the new rank of a lost position to step `plan.step`; return its session there, and None on other ranks.

    All ranks call it together. constants: of the model; state: that of the new rank is set to that after the last step;
    reader: must read on from the place of the snapshot on the new rank. Raises RunError if a rank fails.
    """
    replay, rank = plan.replay, job.topology.rank
    assert replay is not None
    steps = range(replay.step, plan.step)
    with collective_errors("replaying the steps of a lost stage", groups.world):
        if rank == replay.rank:
            return _replay(replay, steps, job, groups, constants, store, reader, state)
        for transfer in replay.transfers:
            if transfer.source == rank:
                store.by_step[replay.step].send(transfer.layers, groups, replay.rank)
        for step in steps:
            _send_step(store.log, step, groups, replay.rank)
    return None


def _replay(
    replay: Replay,
    steps: range,
    job: Job,
    groups: Groups,
    constants: Constants,
    store: SnapshotStore,
    reader: BatchReader,
    state: LoopState,
) -> Replayed:
    started_at, memory, messages = time.perf_counter(), LayersInMemory(constants), LoggedMessages()
    senders = [each for each in range(job.topology.world_size) if each != replay.rank]
    received_bytes = sum(receive_layers(groups, transfer.source, memory) for transfer in replay.transfers)
    incoming = {layer for transfer in replay.transfers for layer in transfer.layers}
    if kept := [layer for layer in job.layers if layer not in incoming]:
        store.by_step[replay.step].keep(kept, memory)
    session = build_session(job, memory, groups, replayed=messages)
    memory.restore(session, Place(0, 1))
    state.restart(from_json(Progress, replay.progress))
    store.log.open(replay.epoch, replay.step, _position(job), log_bytes(job))
    _attach(store.log, session, state)  # another position may be lost before the next snapshot
    try:
        for step in steps:
            summary, nbytes = _receive_step(groups, senders, messages)
            _repeat_step(session, reader.batch(step), summary, state)
            received_bytes += nbytes
    finally:  # also if the view ends
        session.pipeline.abort()
        session.peers.close()
    return Replayed(session, time.perf_counter() - started_at, received_bytes)


def _repeat_step(session: Session, batch: Batch, summary: StepSummary, state: LoopState) -> None:
    """Run this rank's part of a step, as `train_step` does, with the reports that the ranks have sent."""
    progress, job, state.started_at = state.progress, session.job, time.perf_counter()
    scale = GradientScale.of(job.max_targets, progress.loss_scale)
    session.forward_backward(batch.to(job.streams.device), progress.step, scale.loss_scale)
    result = apply_step(session, None, progress, summary)
    if result.updated:
        session.sync_after_step(progress.step)
    state.complete(result, is_synced=True)


def _position(job: Job) -> Position:
    return Position(job.topology.stage_rank, job.topology.stages)


def _attach(log: ReplayLog, session: Session, state: LoopState) -> None:
    session.pipeline.log_messages(log)
    state.log = log


def _send_step(log: ReplayLog, step: int, groups: Groups, to: int) -> None:
    """Send what a log has of a step to the new rank of a lost position, as one message."""
    messages = {str(position): message for position, message in enumerate(log.messages_to(to, step))}
    summary = torch.frombuffer(bytearray(json.dumps(asdict(log.summary(step))).encode()), dtype=torch.uint8)
    send_tensors(groups, to, [messages | {SUMMARY: summary}])


def _receive_step(groups: Groups, senders: Sequence[int], messages: LoggedMessages) -> tuple[StepSummary, int]:
    """Receive what all other ranks have of a step. Return the summary of all reports, and the number of bytes."""
    summary, nbytes = None, 0
    for sender in senders:
        (tensors,) = receive_tensors(groups, sender)
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
        summary = StepSummary(**json.loads(tensors.pop(SUMMARY).numpy().tobytes()))
        for position in sorted(tensors, key=int):
            messages.add(sender, tensors[position])
    assert summary is not None
    return summary, nbytes
