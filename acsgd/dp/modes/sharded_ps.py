"""Exact agreement through servers: each adds up a part of the gradients and tells the sum to all.

R replicas; n = gradients of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from acsgd.codecs.identity import Identity
from acsgd.codecs.message import PackedCodec
from acsgd.dp.exchange.averaging import parts, read_message
from acsgd.dp.exchange.buckets import Bucket, BucketSync, InBuckets
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.modes.allreduce import Dtype
from acsgd.dp.sync import Alone, GradSync
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class ShardedPS(InBuckets):
    """Replica j collects part j of R of each bucket from all, adds in replica order in fp32, and tells all.

    Each replica sends 2 (R - 1) / R numbers per parameter and step, as in a ring, but in 2 hops instead of 2 (R - 1).
    """

    dtype: Dtype = "fp32"
    """What travels, gradients and their sums."""

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        if peers.size == 1:
            return Alone(weights)
        return ServedSync(self.buckets(weights), peers, servers=peers.size, dtype=self.dtype)


class ServedSync(BucketSync):
    """The first `servers` replicas serve one part each. What comes of it depends neither on who nor on how many."""

    def __init__(self, buckets: list[Bucket], peers: Peers, *, servers: int, dtype: Dtype) -> None:
        super().__init__(buckets)
        self._peers = peers
        self._servers = servers
        self._compressor = PackedCodec(Identity(dtype))
        # the mean is told in fp16, so that a sum overflows no sooner than a gradient
        self._divisor = peers.size if dtype == "fp16" else 1

    def leave(self, bucket: Bucket) -> Callable[[], None]:
        under_way = self._peers.begin(partial(self._exchange, bucket.flat))
        return lambda: under_way.result(self.meter)

    def _exchange(self, flat: Tensor) -> None:
        """Replace a tensor [n] by its sum over the replicas. To be called in the thread of the peers."""
        replicas = self._peers.size
        served = parts(flat, self._servers) + [flat[:0]] * (replicas - self._servers)
        mine = served[self._peers.replica]
        told = self._swap([self._compressor.encode(part) for part in served], [mine] * replicas)
        total = torch.zeros_like(mine)
        for each in told:
            total += each
        answer = self._compressor.encode(total.div_(self._divisor))
        torch.cat(self._swap([answer] * replicas, served), out=flat).mul_(self._divisor)

    def _swap(self, messages: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Send a message to each replica, and return what theirs to this one stand for, with its own, in their order.

        like: by replica, vectors of the lengths and on the device of what is returned. Nothing travels of empty ones.
        """
        me = self._peers.replica
        outgoing = {peer: message.cpu() for peer, message in enumerate(messages) if peer != me and len(message)}
        lengths = {peer: self._compressor.max_bytes(len(x)) for peer, x in enumerate(like) if peer != me and len(x)}
        told = {me: messages[me]} | self._peers.swap(outgoing, lengths, self.meter)
        return [read_message(self._compressor, told[peer], x, peer) if len(x) else x for peer, x in enumerate(like)]
