"""Named tensors in one flat tensor, and the reduction of gradients in such buckets during the backward pass."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from acsgd.codecs.identity import DTYPES
from acsgd.config.ranges import Range
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState
from acsgd.dp.sync import Exchanges, GradSync
from acsgd.optim.base import Capability
from acsgd.shards.weights import Weight


class FlatLayout:
    """Layout of named tensors, one after another, in a flat tensor [n]."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = {key: tuple(shape) for key, shape in shapes.items()}
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self.n = sum(self._sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a tensor [n, ...] by name: [*shape, ...]."""
        pieces = zip(self._shapes.items(), flat.split(self._sizes), strict=True)
        return {key: piece.view(*shape, *flat.shape[1:]) for (key, shape), piece in pieces}

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy named tensors into a flat tensor [n, ...], in place; names without a tensor keep their values."""
        for key, view in self.views(flat).items():
            if key in tensors:
                view.copy_(tensors[key])


Dtype = Literal["fp32", "bf16", "fp16"]
"""Dtype of gradients in messages. fp16 has more bits than bf16, but a range of only 6e-8 to 65504."""
BUCKET_MB = 25.0


class Bucket:
    """Gradients that are reduced in one message: a flat fp32 tensor, of which the masters' gradients become views."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)
        layout = FlatLayout({weight.key: weight.master.shape for weight in weights})
        self.flat = torch.zeros(layout.n, device=weights[0].master.device)
        self._views = layout.views(self.flat)
        self.missing = 0
        """Number of gradients that are not final yet."""

    def reset(self) -> None:
        """Clear the gradients for the next step."""
        self.missing = len(self.weights)
        for weight in self.weights:
            weight.master.grad = None

    def adopt(self, weight: Weight) -> None:
        """Make the gradient of a weight a view of the flat tensor, so that later backward passes accumulate there.

        A weight without a gradient gets zeros. Autograd hands over its first gradient without a copy, so this costs
        less than zeroing and adding.
        """
        view, grad = self._views[weight.key], weight.master.grad
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad)
        weight.master.grad = view


def split_weights(weights: Sequence[Weight], megabytes: float = BUCKET_MB) -> list[list[Weight]]:
    """Split weights into lists of about as many megabytes of gradients, last layer first, as backward makes them."""
    lists: list[list[Weight]] = []
    size = math.inf
    for weight in reversed(weights):
        if size >= int(megabytes * 1e6):
            lists.append([])
            size = 0
        lists[-1].append(weight)
        size += weight.grad_bytes
    return lists


def make_buckets(weights: Sequence[Weight], megabytes: float = BUCKET_MB) -> list[Bucket]:
    """Return a bucket for each of the lists of `split_weights`."""
    return [Bucket(members) for members in split_weights(weights, megabytes)]


def bucket_mb(mode: object) -> float:
    """Return the size of the buckets of a mode, megabytes: the default for one that has no buckets itself."""
    return mode.bucket_mb if isinstance(mode, BucketOptions) else BUCKET_MB


@dataclass(frozen=True)
class BucketOptions:
    """Options of the modes that reduce gradients in buckets."""

    requires: ClassVar[frozenset[Capability]] = frozenset()
    exchanges: ClassVar[Exchanges] = "gradients"

    bucket_mb: Annotated[float, Range(0, 2**20, above=True)] = BUCKET_MB
    """Gradients per message, megabytes. Smaller = earlier start, more messages."""

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state that each of several replicas keeps between steps: none."""
        return ()


class BucketSync(GradSync):
    """Base of syncs that reduce gradients in buckets.

    Buckets are reduced in the same order on every replica, each as soon as it and all before it are final.
    """

    def __init__(self, buckets: list[Bucket], peers: Peers) -> None:
        super().__init__()
        self._peers = peers
        self._buckets = buckets
        self._bucket_of = {weight.key: bucket for bucket in buckets for weight in bucket.weights}
        self._next = 0
        """Number of buckets of which all gradients of this replica are complete."""
        self._in_domain = deque[tuple[Bucket, Callable[[], None]]]()
        """Those that are being summed over the domain."""
        self._pending: list[Callable[[], None]] = []

    @property
    def has_buckets(self) -> bool:
        return True

    def start_reduction(self, bucket: Bucket) -> Callable[[], None]:
        """Start to reduce a bucket; return a function that waits for the sum, in the bucket's flat tensor."""
        raise NotImplementedError

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        assert not self._pending
        self._next = 0
        for bucket in self._buckets:
            bucket.reset()

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        bucket = self._bucket_of[weight.key]
        bucket.adopt(weight)
        if is_final:
            bucket.missing -= 1
            while self._next_is_final():
                self._start_next()

    def reduce(self) -> None:
        for bucket in self._buckets[self._next :]:  # those with a weight that has no gradient in this step
            for weight in bucket.weights:
                bucket.adopt(weight)
            self._start_next()
        self._start_reductions()

    def wait(self) -> None:
        for finish in self._pending:
            finish()
        self._pending.clear()

    def _next_is_final(self) -> bool:
        return self._next < len(self._buckets) and self._buckets[self._next].missing == 0

    def _start_next(self) -> None:
        """Start to sum the next bucket over the domain, and to reduce those that have been summed there.

        These are all but the last, after a wait, so that the order is the same on all ranks.
        """
        bucket = self._buckets[self._next]
        self._next += 1
        self._in_domain.append((bucket, self._peers.start_domain_sum(bucket.flat, self.meter)))
        self._start_reductions(but=int(len(self._peers.members) > 1))

    def _start_reductions(self, but: int = 0) -> None:
        while len(self._in_domain) > but:
            bucket, wait = self._in_domain.popleft()
            wait()
            self._pending.append(self.start_reduction(bucket))


class AllReduceSync(BucketSync):
    """Gradient sync by all-reduce of each bucket."""

    def __init__(self, buckets: list[Bucket], peers: Peers, dtype: Dtype = "fp32") -> None:
        super().__init__(buckets, peers)
        self._dtype = DTYPES[dtype]
        self._divisor = peers.size if dtype == "fp16" else 1  # fp16 sums the mean, which overflows no sooner

    def start_reduction(self, bucket: Bucket) -> Callable[[], None]:
        flat, divisor = bucket.flat, self._divisor
        message = (flat / divisor if divisor > 1 else flat).to(self._dtype)
        wait = self._peers.start_sum(message, self.meter)

        def finish() -> None:
            wait()
            if message is not flat:
                flat.copy_(message).mul_(divisor)

        return finish


class DomainSync(BucketSync):
    """Gradient sync of local steps: sums over the domain alone, whose replicas then make the same step."""

    def start_reduction(self, bucket: Bucket) -> Callable[[], None]:
        return lambda: None
