"""Copies of layers in the memory of two hosts, for the case that all holders of a layer end.

Every few steps each rank copies the state of its share of layers to host memory, and sends it to a rank on the next
host in the background. If a layer is lost, all ranks return to the newest step of which the workers that are left have
copies of all layers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from acsgd.elastic.membership.messages import View
from acsgd.elastic.state.snapshot_store import PackedLayers, Snapshot, SnapshotCost, SnapshotStore, fields_of, header_of
from acsgd.elastic.state.transfer import layer_tensors_of
from acsgd.errors import RunError, WaitInterruptedError, reason
from acsgd.groups import Groups
from acsgd.host_memory import host_memory
from acsgd.io.data.batches import BatchReader
from acsgd.run.report import Report, StepField, highest, on_any
from acsgd.run.session import Session
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.shards.load import LoadedLayer
from acsgd.shards.weights import WeightState

log = logging.getLogger(__name__)

BUDGET, REPLICATED_BUDGET = 0.03, 0.005
"""Share of the step time that snapshots may take with "auto"; and if each layer is on several hosts, which seldom end
together, so that snapshots are seldom needed."""
END_S = 5.0
"""Maximum time that the end of a view waits for the thread of a snapshot, seconds."""
CHUNK_BYTES = 1 << 24
"""Maximum length of a message. Each has the time limit of the group."""
NEVER = 1 << 50
"""Interval of a rank without memory for snapshots, steps."""
KEPT = 2
"""Snapshots in memory: the newest complete one, and the one that is being copied."""


def next_hosts(ranks: Sequence[str]) -> dict[int, int]:
    """Return by rank the rank on the next host to which it sends snapshots; empty if all are on one host.

    ranks: the worker of each rank, "host/number".
    """
    by_host: dict[str, list[int]] = {}
    for rank, worker in enumerate(ranks):
        by_host.setdefault(worker.partition("/")[0], []).append(rank)
    hosts = list(by_host.values())
    if len(hosts) == 1:
        return {}
    return {
        rank: (following := hosts[(number + 1) % len(hosts)])[place % len(following)]
        for number, own in enumerate(hosts)
        for place, rank in enumerate(own)
    }


def budget_of(ranks: Sequence[str], stages: int) -> float:
    """Return the share of the step time that snapshots may take with "auto". ranks: see `next_hosts`."""
    hosts = [rank.partition("/")[0] for rank in ranks]
    is_replicated = all(len(set(hosts[position::stages])) > 1 for position in range(stages))
    return REPLICATED_BUDGET if is_replicated else BUDGET


def describe_snapshots(interval: str, budget: float, memory_bytes: int, *, have_room: bool) -> str:
    """Return a sentence on the snapshots of a run.

    memory_bytes: of the rank that needs most; have_room: whether all ranks have the memory.
    """
    if not have_room:
        return (
            f"no snapshots are taken: a host lacks the {memory_bytes / 2**20:,.1f} MiB of memory per process that they "
            "need; if the only holder of a stage ends, all hosts return to the newest checkpoint"
        )
    often = f"every {interval} steps" if interval != "auto" else f"as often as costs {budget:.1%} of the step time"
    return (
        f"snapshots on the next host, {often}, take up to {memory_bytes / 2**20:,.1f} MiB of host memory per process; "
        "elastic.snapshot=0 turns them off"
    )


SNAPSHOT_PENDING = StepField("snapshot_pending", on_any)
"""Whether the snapshot in progress is incomplete on this rank."""
SNAPSHOT_INTERVAL = StepField("snapshot_interval", highest)
"""Number of steps between two snapshots that this rank wants; all use the largest."""


class Snapshots(StepHook):
    """Takes the snapshots of one rank in one view.

    ranks, epoch: the worker of each rank, and the number, of the view. interval: elastic.snapshot in steps; None =
    "auto".
    """

    fields = (SNAPSHOT_PENDING, SNAPSHOT_INTERVAL)

    def __init__(
        self,
        store: SnapshotStore,
        session: Session,
        reader: BatchReader,
        groups: Groups,
        ranks: Sequence[str],
        *,
        epoch: int,
        interval: int | None,
    ) -> None:
        rank, partners = session.job.topology.rank, next_hosts(ranks)
        self._job = session.job
        self._epoch = epoch
        self._store = store
        self._session = session
        self._reader = reader
        self._groups = groups
        self._interval = interval
        self.budget = budget_of(ranks, session.job.topology.stages)
        self._target = partners.get(rank)
        self._sources = [source for source, target in partners.items() if target == rank]
        self._thread: threading.Thread | None = None
        self._failed = False
        self._newest: int | None = None
        """Step of the newest snapshot of this view, until all ranks have it."""
        self._last: int | None = None
        self._cost = SnapshotCost(self.budget)
        self.has_room = interval is not None or self._fits()
        """Whether this rank has the memory for snapshots, or must take them whether it has or not."""

    @property
    def is_pending(self) -> bool:
        """Whether the snapshot in progress is incomplete on this rank."""
        return self._failed or (self._thread is not None and self._thread.is_alive())

    @property
    def interval(self) -> int:
        """Number of steps between two snapshots that this rank wants; all use the largest."""
        if self._interval is not None:
            return self._interval
        return self._cost.interval if self.has_room else NEVER

    def report(self, state: LoopState) -> Report:
        return {SNAPSHOT_PENDING: self.is_pending, SNAPSHOT_INTERVAL: self.interval}

    def before_next(self, state: LoopState) -> None:
        """Take a snapshot if one is due. All ranks decide alike, from the summary of the step."""
        summary, step = state.summary, state.progress.step
        if state.is_paused:
            return
        if self._last is None:
            self._last = step - 1
        if summary is None or self._target is None:
            return
        is_pending = summary[SNAPSHOT_PENDING]
        if state.record is not None:
            self._cost.record(state.record.step_s, is_pending=is_pending, completes=self._newest is not None)
        if is_pending:
            return
        if self._newest is not None:
            self._store.complete(self._newest)
            self._newest = None
        if step - self._last >= summary[SNAPSHOT_INTERVAL]:
            self._take(step, state.progress.to_dict(), state.idle)

    def at_return(self, state: LoopState) -> None:
        step = state.progress.step
        self._store.return_to(step)
        self._newest, self._last = None, step

    def close(self) -> None:
        """End the thread. If its snapshot is incomplete, abort the groups, since it may wait for them."""
        if self._thread is not None and self._thread.is_alive():
            self._groups.interrupt("the view has ended")
            self._thread.join(END_S)
            self._groups.abort("the view has ended")

    def memory_bytes(self) -> int:
        """Return the host memory that all snapshots on this rank take at most, with those that it receives."""
        states = len(self._job.plugins.optimizer.states)
        weights = (weight for layer in self._own_layers() for weight in layer.weights)
        share = sum(weight.master.nbytes + states * weight.grad_bytes for weight in weights)
        return KEPT * share * (1 + len(self._sources))

    def _fits(self) -> bool:
        return self.memory_bytes() * self._job.local_world_size <= host_memory().available

    def _take(self, step: int, progress: dict[str, Any], joining: Collection[int]) -> None:
        """Copy the state, and start to send it. joining: replicas without state, which copy nothing."""
        started = time.perf_counter()
        streams = tuple(None if each is None else asdict(each) for each in self._reader.stream_states(step))
        share = PackedLayers.copy_of(self._share(joining), self._job.streams)
        snapshot = Snapshot(self._epoch, step, progress, streams, share.layers())
        self._store.begin(snapshot)
        self._cost.begin(time.perf_counter() - started)
        self._newest = self._last = step
        self._thread = threading.Thread(target=self._exchange, args=(snapshot, share), name="snapshot", daemon=True)
        self._thread.start()

    def _own_layers(self, joining: Collection[int] = ()) -> list[LoadedLayer]:
        """Return the layers that this replica copies: those of a stage are dealt to its replicas with state in turn."""
        is_writer = self._session.owned.ownership.is_writer
        return [layer for layer in self._session.layers if is_writer(layer.spec.index, joining)]

    def _share(self, joining: Collection[int]) -> dict[int, dict[str, Tensor]]:
        """Return the tensors of these layers, not copied."""
        session, (weights, mode) = self._session, _global_state(self._session)
        if self._job.topology.replica in joining:
            return {}
        own = self._own_layers(joining)
        return {layer.spec.index: layer_tensors_of(session, layer, weights, mode) for layer in own}

    # The rest runs in the thread.

    def _exchange(self, snapshot: Snapshot, share: PackedLayers) -> None:
        """Send this rank's share to the next host, and receive those of the ranks that send theirs here."""
        try:
            sending = self._send(share)
            received = [self._receive(source) for source in self._sources]
            for work in sending:
                self._groups.waits.wait(work)
            for packed in received:
                snapshot.layers = snapshot.layers | packed.layers()  # not in place: the main thread reads it
        except (RunError, RuntimeError, WaitInterruptedError) as error:
            self._failed = True  # the view ends soon; the snapshot before is kept
            log.info("the snapshot of step %d is incomplete: %s", snapshot.step, reason(error))

    def _send(self, share: PackedLayers) -> list[Any]:
        assert self._target is not None
        header = torch.frombuffer(bytearray(header_of(share.fields)), dtype=torch.uint8)
        pieces = [torch.tensor([len(header)]), header, *_pieces(share.buffer)]
        return [self._groups.background.isend(piece, self._target) for piece in pieces]

    def _receive(self, source: int) -> PackedLayers:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait_for(length, source)
        header = torch.empty(int(length), dtype=torch.uint8)
        self._wait_for(header, source)
        packed = PackedLayers.empty(fields_of(header.numpy().tobytes()))
        for piece in _pieces(packed.buffer):
            self._wait_for(piece, source)
        return packed

    def _wait_for(self, buffer: Tensor, source: int) -> None:
        self._groups.waits.wait(self._groups.background.irecv(buffer, source))


def open_snapshots(
    store: SnapshotStore, session: Session, reader: BatchReader, groups: Groups, view: View
) -> Snapshots | None:
    """Return the snapshots of a rank.

    None if elastic.snapshot is 0, if all ranks of the view are on one host, or if replicas divide the state.
    """
    chosen, ranks = session.job.config.elastic.snapshot, view.plan.ranks
    if chosen == "0" or not next_hosts(ranks) or session.job.config.dp.shard != "none":
        return None
    interval = None if chosen == "auto" else int(chosen)
    return Snapshots(store, session, reader, groups, ranks, epoch=view.epoch, interval=interval)


def _global_state(session: Session) -> tuple[Mapping[str, Tensor], WeightState]:
    """Return the global weights, and what the replicas have in common besides. Collective."""
    weights: dict[str, Tensor] = {}
    mode: WeightState = {}
    table = session.job.plugins.mode.states
    common = {state.name for state in table if state.is_common and state.merge != "reset"}
    for stage in session.stages.values():
        weights |= stage.sync.global_weights() or {}
        for name, by_key in stage.sync.state_dict().items():
            if name in common and session.job.topology.replicas > 1:
                mode.setdefault(name, {}).update(by_key)
    return weights, mode


def _pieces(buffer: Tensor) -> tuple[Tensor, ...]:
    """Return the messages of a buffer; none if it is empty."""
    return buffer.split(CHUNK_BYTES) if len(buffer) else ()
