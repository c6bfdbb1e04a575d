"""The plan of a view: the rank of each worker, the step they continue from, and whose state is copied to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from acsgd.fields import Natural


@dataclass(frozen=True)
class WorkerState:
    """What a worker reports once it has stopped."""

    step: Natural = 0
    """Number of steps applied to the state it holds."""
    stage_rank: int | None = None
    """Position in the pipeline whose layers it holds; None = it holds no state."""
    ready: bool = False
    """Whether its gradients of the next step are reduced, and it has sent its report of that step."""
    progress: dict[str, Any] | None = None
    """Progress of the run after `step` steps; None if it holds no state."""
    summary: dict[str, Any] | None = None
    """Summary of the reports of all ranks of the last applied step; None if it has applied none in this process."""
    is_synced: bool = True
    """Whether its weights include the exchange between replicas that follows its last step, if one does."""
    exchanges: bool = False
    """Whether an exchange between replicas follows its next step."""
    is_open: bool = False
    """Whether evaluation, log and save after its last step are incomplete."""
    store_port: Natural = 0
    """Port of the store that it has opened for the next view, used if it becomes rank 0."""
    streams: tuple[dict[str, Any] | None, ...] = ()
    """StreamState of each source after `step` steps, None if it is not streamed; empty if the worker streams none."""


@dataclass(frozen=True)
class Copy:
    """A transfer of the state of one pipeline position from one rank to another."""

    source: Natural
    target: Natural


@dataclass(frozen=True)
class Plan:
    """What the workers of a view do. A worker is named by its host and its number on that host: "f3a0/1"."""

    stages: Natural
    """Ranks per pipeline."""
    ranks: tuple[str, ...] = ()
    """Worker of each rank; empty if there are fewer workers than a pipeline needs."""
    spares: tuple[str, ...] = ()
    """Workers without a rank."""
    store_port: Natural = 0
    """Port of the view's store, on the host of rank 0."""
    step: Natural = 0
    """Number of applied steps from which all ranks continue."""
    from_disk: bool = True
    """Whether all ranks start from the newest checkpoint, or from the initial weights if there is none."""
    copies: tuple[Copy, ...] = ()
    """Transfers of state between memories, before training continues."""
    behind: tuple[str, ...] = ()
    """Workers that have not applied step `step` yet. Their gradients are complete, so they apply it by `summary`."""
    unsynced: tuple[int, ...] = ()
    """Pipeline positions whose replicas all lack the exchange that follows step `step`, and run it first."""
    progress: dict[str, Any] | None = None
    """Progress of the run after `step` steps; None if `from_disk`."""
    summary: dict[str, Any] | None = None
    """Summary of the reports of the last of these steps; None if this view's workers have applied none yet."""
    is_open: bool = False
    """Whether evaluation, log and save after the last step are incomplete."""
    is_first: bool = False
    """Whether no host was in an earlier view."""
    streams: tuple[dict[str, Any] | None, ...] = ()
    """StreamState of each source, at or before the next sequence, None if it is not streamed; empty if none is."""

    @property
    def replicas(self) -> int:
        return len(self.ranks) // self.stages

    def rank_of(self, worker: str) -> int | None:
        """Return the rank of a worker, None if it is a spare."""
        return self.ranks.index(worker) if worker in self.ranks else None


def make_plan(
    workers: Mapping[str, WorkerState],
    *,
    staying: Sequence[str],
    stages: int,
    min_replicas: int = 1,
    max_replicas: int | None = None,
) -> Plan:
    """Plan the next view from the states of the workers that have stopped.

    workers: by name; staying: those of the hosts of the view, most senior first. Others leave: their states decide
    the step, and nothing else. With fewer than `min_replicas`, all workers are spares, which keep what they hold.

    Every rank of a stopped view has reported a step before any rank applies it (docs/architecture/step.md). So holders
    of state are at most one step apart, and those behind can apply it alone. If replicas exchange weights after the
    step, some have and some have not: those that have not get the state of one that has, or run the exchange again.
    """
    holders = {name: state for name, state in workers.items() if state.stage_rank is not None}
    ahead = max(holders.values(), key=lambda state: (state.step, state.is_open), default=WorkerState())
    held = _held(holders, staying, ahead)
    replicas = min(len(staying) // stages, max_replicas or len(staying))
    replicas = replicas if replicas >= min_replicas else 0
    ranks = _assign(staying, held, stages, replicas)
    keepers = [rank for rank, name in enumerate(ranks) if held.get(name) == rank % stages]
    store_port = workers[ranks[0]].store_port if ranks else 0
    from_disk = Plan(stages, ranks, tuple(name for name in staying if name not in ranks), store_port)
    if len({rank % stages for rank in keepers}) < stages:  # also if there are no ranks
        return from_disk
    behind = tuple(ranks[rank] for rank in keepers if holders[ranks[rank]].step < ahead.step)
    return replace(
        from_disk,
        step=ahead.step,
        from_disk=False,
        copies=_copies(keepers, len(ranks), stages),
        behind=behind,
        unsynced=tuple(sorted({rank % stages for rank in keepers if not _is_synced(holders[ranks[rank]], ahead)})),
        progress=ahead.progress,
        summary=ahead.summary,
        is_open=ahead.is_open or bool(behind),
        streams=max(holders.values(), key=_place_in_streams).streams,
    )


def _held(holders: Mapping[str, WorkerState], staying: Sequence[str], ahead: WorkerState) -> dict[str, int | None]:
    """Return the pipeline position of each worker that stays and can keep its state.

    Of a position of which some workers have completed the last exchange and others have not, only the former can.
    """
    reaching = {name: holders[name] for name in staying if name in holders and _reaches(holders[name], ahead)}
    synced = {state.stage_rank for state in reaching.values() if _is_synced(state, ahead)}
    return {
        name: state.stage_rank
        for name, state in reaching.items()
        if _is_synced(state, ahead) or state.stage_rank not in synced
    }


def _reaches(state: WorkerState, ahead: WorkerState) -> bool:
    """Return whether a holder has applied as many steps as the one that is ahead, or can apply the last one alone."""
    return state.step == ahead.step or (state.step == ahead.step - 1 and state.ready and ahead.summary is not None)


def _is_synced(state: WorkerState, ahead: WorkerState) -> bool:
    """Return whether a holder's weights after the last step do not lack an exchange that others may have made."""
    return state.is_synced if state.step == ahead.step else not state.exchanges


def _place_in_streams(state: WorkerState) -> tuple[int, list[int]]:
    """Return a key by which the states that lie further ahead in the streamed sources are larger.

    A place after fewer steps than others have applied is one at or before the next sequence, too.
    """
    return state.step if state.streams else -1, [each["segment"] for each in state.streams if each is not None]


def _assign(workers: Sequence[str], held: Mapping[str, int | None], stages: int, replicas: int) -> tuple[str, ...]:
    """Return the worker of each rank: where possible one that holds its stage already."""
    free = list(workers)
    ranks: dict[int, str] = {}
    for rank in range(replicas * stages):
        if holder := next((name for name in free if held.get(name) == rank % stages), None):
            ranks[rank] = holder
            free.remove(holder)
    for rank in range(replicas * stages):
        if rank not in ranks:
            ranks[rank] = free.pop(0)
    return tuple(ranks[rank] for rank in range(replicas * stages))


def _copies(keepers: Sequence[int], num_ranks: int, stages: int) -> tuple[Copy, ...]:
    """Return a transfer to each rank that does not hold its stage, spread evenly over the ranks that do."""
    load = Counter[int]()
    copies = []
    for target in sorted(set(range(num_ranks)) - set(keepers)):
        source = min(
            (rank for rank in keepers if rank % stages == target % stages), key=lambda rank: (load[rank], rank)
        )
        load[source] += 1
        copies.append(Copy(source, target))
    return tuple(copies)
