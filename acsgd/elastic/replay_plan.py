"""The plan of a replay: a lost position repeats its steps since a snapshot, with the messages that others logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from acsgd.elastic.assignment import Cut, Transfer, transfers_of
from acsgd.fields import Natural


@dataclass(frozen=True)
class LoggedSteps:
    """Consecutive steps of which a worker has all messages that it has sent."""

    epoch: Natural
    """View since which the run has had one replica and the same stages."""
    stages: Natural
    """Ranks per pipeline."""
    first: Natural
    """Number of steps before the first one."""
    end: Natural
    """Number of steps up to the last one."""


@dataclass(frozen=True)
class Replay:
    """The steps that the new rank of a lost position repeats, from a snapshot of its layers."""

    rank: Natural
    step: Natural
    """Number of steps applied to the snapshot."""
    epoch: Natural
    """View in which it was taken."""
    progress: dict[str, Any]
    """Progress of the run after these steps."""
    streams: tuple[dict[str, Any] | None, ...] = ()
    """As of WorkerState, after these steps."""
    transfers: tuple[Transfer, ...] = ()
    """Transfers of layers of the snapshot to the rank, in this order."""


class _Copies(Protocol):
    """As of CopiedLayers."""

    @property
    def layers(self) -> tuple[Natural, ...]: ...

    @property
    def progress(self) -> dict[str, Any]: ...

    @property
    def streams(self) -> tuple[dict[str, Any] | None, ...]: ...


def plan_replay(
    cut: Cut,
    held: Sequence[frozenset[int]],
    copies: Sequence[Mapping[tuple[int, int], _Copies]],
    logs: Sequence[LoggedSteps | None],
    step: int,
) -> Replay | None:
    """Return the replay that brings a lost position to the state after `step` steps, from the newest snapshot possible.

    All by rank. held: layers whose state it has after `step` steps; copies: of layers in snapshots, by epoch and step
    of the snapshot; logs: the steps that it has logged. None unless there is one replica, which lacks one position,
    and all other ranks have logged all steps since a snapshot of the layers of that position.
    """
    lost = [rank for rank, (layers, mine) in enumerate(zip(cut, held, strict=False)) if not mine.issuperset(layers)]
    others = [log for rank, log in enumerate(logs) if rank not in lost and log and log.stages == len(cut)]
    if len(held) != len(cut) or len(lost) != 1 or not others or len(others) < len(cut) - 1:
        return None
    if any(log.end < step for log in others):
        return None
    (rank,), first, since = lost, max(log.first for log in others), max(log.epoch for log in others)
    wanted = tuple(layers if each == rank else () for each, layers in enumerate(cut))
    for epoch, taken in sorted({snapshot for own in copies for snapshot in own}, reverse=True):
        found = [own.get((epoch, taken)) for own in copies]
        layers = [frozenset(each.layers) if each else frozenset() for each in found]
        if epoch >= since and first <= taken <= step and frozenset().union(*layers).issuperset(cut[rank]):
            known = max((each for each in found if each), key=lambda each: len(each.streams))
            return Replay(rank, taken, epoch, known.progress, known.streams, transfers_of(layers, wanted))
    return None
