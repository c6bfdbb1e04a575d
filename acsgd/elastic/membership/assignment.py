"""Which worker gets which rank, and which layers move between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from acsgd.io.files.fields import Natural

StoredCut = tuple[tuple[Natural, ...], ...]
"""The layers of each position of a pipeline, by their indices in the model. Each layer has one position."""


class ReplicaLayer(NamedTuple):
    """The state of a layer, or a part of it where replicas divide it."""

    replica_id: int
    """Whose weights it has, see `WorkerState.replica_id`."""
    layer: int
    part: int = 0
    parts: int = 1
    """See `WorkerState.part`."""


Held = Mapping[str, frozenset[ReplicaLayer]]
"""The layers of which each worker can keep or send the state; a worker without any may be missing."""
Wanted = Sequence[frozenset[ReplicaLayer]]
"""The layers of each rank, or parts of them."""


@dataclass(frozen=True)
class Transfer:
    """A transfer of the state of some layers from the memory of one rank to that of another.

    Where replicas divide the state, it is the part that the source holds.
    """

    layers: tuple[Natural, ...]
    source: Natural
    target: Natural


def complete_replicas(workers: Sequence[str], held: Held, cut: StoredCut) -> list[int]:
    """Return the ids of the replicas of which workers hold all layers, those of the first workers first."""
    layers = {layer for position in cut for layer in position}
    found: dict[int, set[int]] = {}
    for name in workers:
        for each in sorted(held.get(name, ())):
            found.setdefault(each.replica_id, set()).add(each.layer)
    return [replica_id for replica_id, has in found.items() if has >= layers]


def assign(workers: Sequence[str], held: Held, wanted: Wanted) -> tuple[str, ...]:
    """Return the worker of each rank: those that hold most of its layers first."""
    overlaps = (
        (-len(held[name].intersection(layers)), rank, seniority)
        for seniority, name in enumerate(workers)
        if name in held
        for rank, layers in enumerate(wanted)
    )
    free, ranks = list(workers), dict[int, str]()
    for overlap, rank, seniority in sorted(overlaps):
        if overlap and rank not in ranks and workers[seniority] in free:
            ranks[rank] = workers[seniority]
            free.remove(workers[seniority])
    return tuple(ranks[rank] if rank in ranks else free.pop(0) for rank in range(len(wanted)))


def lacks_layers(ranks: Collection[str], held: Held, wanted: Wanted) -> bool:
    """Return whether no rank holds some layer."""
    return not ranks or not {each for layers in wanted for each in layers} <= {
        each for name in ranks for each in held.get(name, ())
    }


def transfers_of(ranks: Sequence[str], held: Wanted, wanted: Wanted) -> tuple[Transfer, ...]:
    """Return the transfers that give each rank its layers, spread evenly over the ranks that hold them.

    ranks: worker of each rank; held: layers by rank. Ranks that keep a layer are preferred as its sources. A rank that
    holds nothing gets its layers from an earlier one of its host that gets the same: they reach the host once.
    """
    load, layers_of = Counter[int](), dict[tuple[int, int], list[int]]()
    first = dict[tuple[str, frozenset[ReplicaLayer]], int]()
    for target, layers in enumerate(wanted):
        if not held[target]:
            relay = first.setdefault((ranks[target].partition("/")[0], layers), target)
            if relay != target:
                layers_of[relay, target] = sorted({each.layer for each in layers})
                continue
        for layer in sorted(set(layers) - held[target]):
            sources = (rank for rank in range(len(wanted)) if layer in held[rank])
            source = min(sources, key=lambda rank: (layer not in wanted[rank], load[rank], rank))
            load[source] += 1
            layers_of.setdefault((source, target), []).append(layer.layer)
    return tuple(Transfer(tuple(layers), source, target) for (source, target), layers in layers_of.items())


def holders_of(ranks: Sequence[str], held: Held, wanted: Wanted, transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """Return the workers that keep or send state of their own."""
    senders = {transfer.source for transfer in transfers}
    return tuple(
        name
        for rank, name in enumerate(ranks)
        if (own := held.get(name)) and (rank in senders or own.intersection(wanted[rank]))
    )
