"""Exact agreement: gradients are summed over the replicas, bucket by bucket, while backward still runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from acsgd.codecs.identity import DTYPES
from acsgd.dp.exchange.buckets import Bucket, BucketSync, InBuckets
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.sync import Alone, GradSync
from acsgd.meter import Meter
from acsgd.shards.weights import Weight
from acsgd.topology import collective_errors

Dtype = Literal["fp32", "bf16", "fp16"]
"""Of gradients on their way. fp16 has more bits than bf16, but loses what is smaller than 6e-8 or larger than 65504."""


@dataclass(frozen=True)
class AllReduce(InBuckets):
    """Sum by ring all-reduce: of R replicas, each sends 2 (R - 1) / R numbers per parameter and step."""

    dtype: Dtype = "fp32"
    """What travels, and in which sums are rounded on their way; gradients and their sum are fp32."""

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        return Alone(weights) if peers.size == 1 else AllReduceSync(self.buckets(weights), peers, self.dtype)


class AllReduceSync(BucketSync):
    """Each bucket is one message of an all-reduce."""

    def __init__(self, buckets: list[Bucket], peers: Peers, dtype: Dtype = "fp32") -> None:
        super().__init__(buckets)
        self._group = peers.group
        self._dtype = DTYPES[dtype]
        # the mean travels in fp16, so that a sum overflows no sooner than a gradient
        self._divisor = peers.size if dtype == "fp16" else 1

    def leave(self, bucket: Bucket) -> Callable[[], None]:
        flat, divisor = bucket.flat, self._divisor
        message = (flat / divisor if divisor > 1 else flat).to(self._dtype)
        wait = start_sum(message, self._group, self.meter)

        def finish() -> None:
            wait()
            if message is not flat:
                flat.copy_(message).mul_(divisor)

        return finish


def start_sum(message: Tensor, group: dist.ProcessGroup, meter: Meter) -> Callable[[], None]:
    """Start to sum a tensor over the ranks of a group, in place; return what waits for it, and may raise RunError."""
    since = time.perf_counter()
    work = dist.all_reduce(message, group=group, async_op=True)
    meter.sent_bytes += 2 * (group.size() - 1) * message.nbytes // group.size()  # of a ring, per rank

    def wait() -> None:
        with collective_errors("summing gradients", group):
            meter.wait(work, since)

    return wait
