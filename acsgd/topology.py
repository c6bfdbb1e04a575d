"""The grid of ranks: replicas x pipeline stages, as named axes.

    rank = replica * stages + stage rank        4 stages x 2 replicas:   replica 0:  0 1 2 3
                                                                         replica 1:  4 5 6 7

Neighbours in a pipeline are adjacent ranks, so torchrun places them on one host first. pp.hosts gives the hosts
another order, with all of their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Axis = Literal["replica", "shard", "context", "pipeline"]
"""Name of an axis of the grid. There are no options yet for the sizes of "shard" and "context"."""


@dataclass(frozen=True)
class Topology:
    """This rank's position in the grid of ranks."""

    rank: int
    sizes: Mapping[Axis, int]
    """Number of ranks along each axis. Neighbours along the last axis are adjacent ranks. An axis of size 1 may be
    missing."""
    order: tuple[int, ...] = ()
    """As `ranks`. Empty = ranks are positions."""

    @classmethod
    def of(cls, rank: int, world_size: int, stages: int, order: tuple[int, ...] = ()) -> Topology:
        """Return the grid of replicas x pipeline stages. Raises ValueError if `stages` does not divide `world_size`."""
        if world_size % stages:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ValueError(
                f"pp.stages={stages} does not divide the number of processes, {world_size}; use "
                f"--pp.stages {' or '.join(str(n) for n in divisors)}, or launch a multiple of {stages} "
                f"processes: torchrun --nproc-per-node {stages * max(1, world_size // stages)} ..."
            )
        return cls(rank, {"replica": world_size // stages, "pipeline": stages}, order)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def index(self, axis: Axis) -> int:
        """Return this rank's position along an axis, 0 = first."""
        return self._position // self._stride(axis) % self.sizes.get(axis, 1)

    def ranks_along(self, axis: Axis) -> list[int]:
        """Return this rank and those that differ from it in their position along an axis only, in order of position."""
        stride, size = self._stride(axis), self.sizes.get(axis, 1)
        first, ranks = self._position - self.index(axis) * stride, self.ranks
        return [ranks[position] for position in range(first, first + size * stride, stride)]

    def lines(self, axis: Axis) -> list[list[int]]:
        """Return the ranks along an axis for each position along the other axes: every rank is in one of the lists."""
        grid = (replace(self, rank=rank) for rank in self.ranks)
        return [each.ranks_along(axis) for each in grid if each.index(axis) == 0]

    def domains(self, names: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
        """Return the replicas of each domain, by the names of its ranks along a pipeline, in order of replicas.

        names: of the domain of each rank. Two replicas share a domain if they do so at each position of their
        pipelines.
        """
        found: dict[tuple[str, ...], list[int]] = {}
        for replica, ranks in enumerate(self.lines("pipeline")):
            found.setdefault(tuple(names[rank] for rank in ranks), []).append(replica)
        return found

    @property
    def ranks(self) -> Sequence[int]:
        """The rank at each position of the grid, those of the first replica first."""
        return self.order or range(self.world_size)

    @property
    def _position(self) -> int:
        """Position of this rank in the grid."""
        return self.ranks.index(self.rank)

    def _stride(self, axis: Axis) -> int:
        """Return the difference between the ranks of neighbours along an axis."""
        axes = [*self.sizes]
        return math.prod(self.sizes[each] for each in axes[axes.index(axis) + 1 :]) if axis in axes else 1

    @property
    def stages(self) -> int:
        """Ranks per pipeline."""
        return self.sizes["pipeline"]

    @property
    def replicas(self) -> int:
        """Number of copies of the pipeline."""
        return self.sizes["replica"]

    @property
    def stage_rank(self) -> int:
        """This rank's position in its pipeline, 0 = first."""
        return self.index("pipeline")

    @property
    def replica(self) -> int:
        """Index of the replica this rank belongs to."""
        return self.index("replica")
