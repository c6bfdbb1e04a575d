"""Exact agreement through one server, the first replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from acsgd.dp.exchange.peers import Peers
from acsgd.dp.modes.sharded_ps import ServedSync, ShardedPS
from acsgd.dp.sync import Alone, GradSync
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class CentralPS(ShardedPS):
    """Replica 0 collects all gradients from all, adds in replica order in fp32, and tells all.

    Of R replicas, the first sends R - 1 numbers per parameter and step, every other one 1: for a star of links, of
    which that of the first is the fastest.
    """

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        if peers.size == 1:
            return Alone(weights)
        return ServedSync(self.buckets(weights), peers, servers=1, dtype=self.dtype)
