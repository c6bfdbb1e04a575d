"""Exact all-reduce of gradients, in buckets, overlapped with the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from acsgd.config.options import ShardKind
from acsgd.dp.exchange.buckets import AllReduceSync, BucketOptions, Dtype, bucket_mb, make_buckets
from acsgd.dp.exchange.sharded import ShardedSync
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync, Mode, SingleReplicaSync
from acsgd.optim.ownership import OwnedWeights
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class AllReduce(BucketOptions):
    """Ring all-reduce: each of R replicas sends 2 (R - 1) / R numbers per parameter and step."""

    dtype: Dtype = "fp32"
    """Dtype of gradients and their sums in messages. Gradients before and after are fp32."""

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights)
        return AllReduceSync(make_buckets(weights, self.bucket_mb), peers, self.dtype)


def open_sync(
    mode: Mode, weights: Sequence[Weight], owned: OwnedWeights, peers: Peers, *, shard: ShardKind
) -> GradSync:
    """Return the synchronization of one stage's weights with the other replicas, which may own parts of them."""
    if not owned.ownership.parts:
        return mode.open(weights, peers)
    return ShardedSync(
        weights,
        owned,
        peers.owners,
        bucket_mb=bucket_mb(mode),
        dtype=mode.dtype if isinstance(mode, AllReduce) and peers.across_domains is None else "fp32",
        every_pass=shard in ("gradients", "weights"),
        across_domains=None if peers.across_domains is None else mode.open(owned.of(weights), peers.across_domains),
    )
