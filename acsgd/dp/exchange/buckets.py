"""Gradients gathered into buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.dp.sync import Memoryless
from acsgd.meter import Meter
from acsgd.optim.base import Capability
from acsgd.shards.weights import Weight


class Bucket:
    """Gradients that travel together: one flat fp32 tensor, into which the masters' gradients become views."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)
        masters = [weight.master for weight in weights]
        self.flat = torch.zeros(sum(master.numel() for master in masters), device=masters[0].device)
        pieces = self.flat.split([master.numel() for master in masters])
        self._views: dict[str, Tensor] = {
            weight.key: piece.view(weight.master.shape) for weight, piece in zip(weights, pieces, strict=True)
        }
        self.missing = 0

    def begin(self) -> None:
        """Forget the gradients and expect all of them anew."""
        self.missing = len(self.weights)
        for weight in self.weights:
            weight.master.grad = None

    def adopt(self, weight: Weight) -> None:
        """Make a gradient that is a tensor of its own, or none, a view into the flat one; later sums go there.

        Autograd hands over its first gradient without a copy, so this costs less than zeroing and adding.
        """
        view, grad = self._views[weight.key], weight.master.grad
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad)
        weight.master.grad = view


def make_buckets(weights: Sequence[Weight], nbytes: int) -> list[Bucket]:
    """Cut weights into buckets of about `nbytes` of gradients, last layer first: as backward completes them."""
    buckets: list[Bucket] = []
    members: list[Weight] = []
    size = 0
    for weight in reversed(weights):
        members.append(weight)
        size += weight.master.nbytes
        if size >= nbytes:
            buckets.append(Bucket(members))
            members, size = [], 0
    if members:
        buckets.append(Bucket(members))
    return buckets


@dataclass(frozen=True)
class InBuckets:
    """What modes have in common that sum gradients bucket by bucket."""

    requires: ClassVar[frozenset[Capability]] = frozenset()

    bucket_mb: float = 25.0
    """Megabytes of gradients per message. Smaller = earlier start, more messages."""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb} must be greater than 0")

    def buckets(self, weights: Sequence[Weight]) -> list[Bucket]:
        """Cut a stage's weights into buckets."""
        return make_buckets(weights, int(self.bucket_mb * 1e6))


class BucketSync(Memoryless):
    """Buckets leave in one fixed order on every replica, each as soon as it and those before it are full.

    A mode adds what it means to leave.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self.meter = Meter()
        self._buckets = buckets
        self._bucket_of = {weight.key: bucket for bucket in buckets for weight in bucket.weights}
        self._under_way: list[Callable[[], None]] = []

    def leave(self, bucket: Bucket) -> Callable[[], None]:
        """Start to exchange a bucket; return what waits until it is summed, in its flat tensor."""
        raise NotImplementedError

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        assert not self._under_way
        for bucket in self._buckets:
            bucket.begin()

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        bucket = self._bucket_of[weight.key]
        bucket.adopt(weight)
        if is_final:
            bucket.missing -= 1
            while self._next_is_full():
                self._launch()

    def reduce(self) -> None:
        for bucket in self._buckets[len(self._under_way) :]:  # those with a parameter that took no part
            for weight in bucket.weights:
                bucket.adopt(weight)
            self._launch()

    def wait(self) -> None:
        for finish in self._under_way:
            finish()
        self._under_way.clear()

    def _next_is_full(self) -> bool:
        launched = len(self._under_way)
        return launched < len(self._buckets) and self._buckets[launched].missing == 0

    def _launch(self) -> None:
        self._under_way.append(self.leave(self._buckets[len(self._under_way)]))
