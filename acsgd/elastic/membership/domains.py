"""Domains of an elastic run whose replicas divide the state of their layers (dp.shard).

The replicas of a domain, such as a host, hold all parts of the state together, and each other domain holds the same: a
domain that is lost takes nothing with it that another one does not have. So all domains of a view have the same number
of replicas, and each replica has its workers in one domain. All other workers are spares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from acsgd.elastic.membership.assignment import Held, ReplicaLayer, StoredCut, Wanted, assign

MIN_REPLICAS = 2
"""Minimum number of replicas of a domain: one alone has nothing to divide."""


class Domains(NamedTuple):
    """The domains of a view."""

    workers: Sequence[Sequence[str]]
    """The workers of each domain, most senior first, of which some may be spares."""
    replicas: int
    """Number of replicas of each domain, which is that of the parts of the state."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all domains."""
        return len(self.workers) * self.replicas


def possible_domains(
    domain_of: Mapping[str, str],
    held: Held,
    stages: int,
    *,
    min_replicas: int,
    max_replicas: int,
    equal_micros: int = 0,
) -> list[Domains]:
    """Return the domains that may train, preferred first: with most replicas, of several such in the most domains.

    domain_of: the domain of each worker, most senior first; held: their state. stages: ranks per pipeline.
    min_replicas, max_replicas: of all domains. equal_micros: number of micro-batches of a step if all replicas need the
    same number of them; 0 = they need not. Domains that hold state come first.
    """
    by_domain: dict[str, list[str]] = {}
    for worker, domain in domain_of.items():
        by_domain.setdefault(domain, []).append(worker)
    known = sorted(by_domain.values(), key=lambda workers: not any(held.get(worker) for worker in workers))
    most = max((len(workers) // stages for workers in known), default=0)
    found = list[Domains]()
    for replicas in range(MIN_REPLICAS, most + 1):
        able = [workers for workers in known if len(workers) // stages >= replicas]
        found += [Domains(able[:number], replicas) for number in range(1, len(able) + 1)]
    allowed = [
        each
        for each in found
        if min_replicas <= each.num_replicas <= max_replicas and not (equal_micros and equal_micros % each.num_replicas)
    ]
    return sorted(allowed, key=lambda each: (-each.num_replicas, -len(each.workers)))


def parts_of_ranks(domains: Domains, cut: StoredCut, held: Held) -> Wanted:
    """Return the parts of the state that each rank needs: its own, or all of its layers if they were divided otherwise.

    Ranks are those of the first domain, then those of the next. If some layer is held in no division as a whole, each
    rank needs its own part, which is missing then.
    """
    is_held = {each for workers in domains.workers for worker in workers for each in held.get(worker, ())}
    numbers = sorted({each.parts for each in is_held}, key=lambda parts: parts != domains.replicas)
    layers = [layer for position in cut for layer in position]

    def are_held(parts: int) -> bool:
        return all(ReplicaLayer(0, layer, part, parts) in is_held for layer in layers for part in range(parts))

    parts = next(filter(are_held, numbers), domains.replicas)
    of_domain = [
        frozenset(
            ReplicaLayer(0, layer, part, parts)
            for layer in position
            for part in ([replica] if parts == domains.replicas else range(parts))
        )
        for replica in range(domains.replicas)
        for position in cut
    ]
    return of_domain * len(domains.workers)


def assign_domains(domains: Domains, held: Held, wanted: Wanted) -> tuple[str, ...]:
    """Return the worker of each rank, those of a domain together. wanted: of all ranks."""
    of_domain = wanted[: len(wanted) // max(1, len(domains.workers))]
    return tuple(chain.from_iterable(assign(workers, held, of_domain) for workers in domains.workers))
