"""Exact agreement: gradients are summed over the replicas, bucket by bucket, while backward still runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from acsgd.dp.base import Alone, Bucket, GradSync, Memoryless, make_buckets
from acsgd.dp.peers import Peers
from acsgd.meter import Meter, Work
from acsgd.shards.base import Weight
from acsgd.topology import together


@dataclass(frozen=True)
class AllReduce:
    """Sum in fp32 by ring all-reduce."""

    bucket_mb: float = 25.0
    """Megabytes of gradients per message. Smaller = earlier start, more messages."""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb} must be greater than 0")

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        if peers.size == 1:
            return Alone(weights)
        return AllReduceSync(make_buckets(weights, int(self.bucket_mb * 1e6)), peers)


class AllReduceSync(Memoryless):
    """Buckets leave in one fixed order on every replica, each as soon as it and those before it are full."""

    def __init__(self, buckets: list[Bucket], peers: Peers) -> None:
        self.meter = Meter()
        self._buckets = buckets
        self._bucket_of = {weight.key: bucket for bucket in buckets for weight in bucket.weights}
        self._group = peers.group
        self._under_way: list[tuple[Work, float]] = []

    def begin(self, step: int) -> None:
        assert not self._under_way
        for bucket in self._buckets:
            bucket.begin()

    def grad_made(self, weight: Weight, *, complete: bool) -> None:
        bucket = self._bucket_of[weight.key]
        bucket.adopt(weight)
        if complete:
            bucket.missing -= 1
            while self._next_is_full():
                self._launch()

    def reduce(self) -> None:
        for bucket in self._buckets[len(self._under_way) :]:  # those with a parameter that took no part
            for weight in bucket.weights:
                bucket.adopt(weight)
            self._launch()

    def wait(self) -> None:
        for work, posted_at in self._under_way:
            with together("summing gradients", self._group):
                self.meter.wait(work, posted_at)
        self._under_way.clear()

    def _next_is_full(self) -> bool:
        launched = len(self._under_way)
        return launched < len(self._buckets) and self._buckets[launched].missing == 0

    def _launch(self) -> None:
        flat = self._buckets[len(self._under_way)].flat
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        replicas = self._group.size()
        self.meter.sent_bytes += 2 * (replicas - 1) * flat.nbytes // replicas  # of a ring, per rank
        self._under_way.append((work, time.perf_counter()))
