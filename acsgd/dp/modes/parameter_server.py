"""Exact reduction of gradients by parameter servers: each replica owns a part, or the first owns all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from acsgd.codecs.identity import Identity
from acsgd.codecs.message import PackedCodec
from acsgd.dp.exchange.averaging import decode_message, split_evenly
from acsgd.dp.exchange.buckets import Bucket, BucketOptions, BucketSync, Dtype, make_buckets
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync, SingleReplicaSync
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class ShardedPS(BucketOptions):
    """Replica j receives part j of each bucket from all, sums it in replica order in fp32, and sends the sum to all.

    Each of R replicas sends 2 (R - 1) / R numbers per parameter and step, as in a ring, but in 2 hops instead of
    2 (R - 1).
    """

    dtype: Dtype = "fp32"
    """Dtype of gradients and their sums in messages."""

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights)
        return ParameterServerSync(make_buckets(weights, self.bucket_mb), peers, servers=peers.size, dtype=self.dtype)


class ParameterServerSync(BucketSync):
    """Gradient sync through servers: the first `servers` replicas, each of which owns a part of every bucket.

    The sums do not depend on the number of servers, bit for bit.
    """

    def __init__(self, buckets: list[Bucket], peers: Peers, *, servers: int, dtype: Dtype) -> None:
        super().__init__(buckets, peers)
        self._servers = servers
        self._codec = PackedCodec(Identity(dtype))
        self._divisor = peers.size if dtype == "fp16" else 1  # fp16 sends the mean, which overflows no sooner

    def start_reduction(self, bucket: Bucket) -> Callable[[], None]:
        pending = self._peers.submit(partial(self._sum, bucket.flat))
        return lambda: pending.result(self.meter)

    def _sum(self, flat: Tensor) -> None:
        """Replace a tensor [n] by its sum over the replicas. Runs in the thread of the peers."""
        replicas = self._peers.size
        parts = split_evenly(flat, self._servers) + [flat[:0]] * (replicas - self._servers)
        mine = parts[self._peers.replica]
        received = self._exchange([self._codec.encode(part) for part in parts], [mine] * replicas)
        total = torch.zeros_like(mine)
        for each in received:
            total += each
        answer = self._codec.encode(total.div_(self._divisor))
        torch.cat(self._exchange([answer] * replicas, parts), out=flat).mul_(self._divisor)

    def _exchange(self, messages: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Send a message to each replica; return the decoded messages of all, with this replica's own, in order.

        like: by replica, vectors of the lengths and device of the result. Empty vectors are not sent.
        """
        me, device = self._peers.replica, self._peers.device
        outgoing = {peer: message.to(device) for peer, message in enumerate(messages) if peer != me and len(message)}
        lengths = {peer: self._codec.max_bytes(len(x)) for peer, x in enumerate(like) if peer != me and len(x)}
        received = {me: messages[me]} | self._peers.exchange(outgoing, lengths, self.meter)
        return [decode_message(self._codec, received[peer], x, peer) if len(x) else x for peer, x in enumerate(like)]


@dataclass(frozen=True)
class CentralPS(ShardedPS):
    """Replica 0 receives all gradients, sums them in replica order in fp32, and sends the sums to all.

    The first of R replicas sends R - 1 numbers per parameter and step, every other one 1: for a star of links, of which
    that of the first is the fastest.
    """

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights)
        return ParameterServerSync(make_buckets(weights, self.bucket_mb), peers, servers=1, dtype=self.dtype)
