"""Exact reduction of gradients by one parameter server, the first replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from acsgd.dp.exchange.buckets import make_buckets
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.exchange.single_replica import SingleReplicaSync
from acsgd.dp.modes.sharded_ps import ParameterServerSync, ShardedPS
from acsgd.dp.sync import GradSync
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class CentralPS(ShardedPS):
    """Replica 0 receives all gradients, sums them in replica order in fp32, and sends the sums to all.

    The first of R replicas sends R - 1 numbers per parameter and step, every other one 1: for a star of links, of which
    that of the first is the fastest.
    """

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.size == 1:
            return SingleReplicaSync(weights)
        return ParameterServerSync(make_buckets(weights, self.bucket_mb), peers, servers=1, dtype=self.dtype)
