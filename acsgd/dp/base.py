"""How replicas agree: the protocol of a data-parallel mode, and gradients gathered into buckets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acsgd.dp.peers import Peers
from acsgd.failure import RunError
from acsgd.meter import Meter
from acsgd.shards.base import Weight
from acsgd.shards.disk import WeightState


class LocalStep(NamedTuple):
    """How the optimizer makes a step in which each replica has gradients of its own."""

    momentum: bool = True
    """Whether AdamW's first moment is used; else the gradient takes its place."""
    frozen: bool = False
    """Whether AdamW's second moment stays what it is."""
    shares: Mapping[str, Tensor] = MappingProxyType({})
    """By key, [rows], how much of the squares of gradients AdamW's second moments are made of; empty = all of all."""


class SecondMoments(NamedTuple):
    """AdamW's, of some weights; to be changed in place."""

    by_key: Mapping[str, Tensor]
    """None of weights without a step yet."""
    decay: float
    """What one step leaves of them, beta_2."""


class GradSync(Protocol):
    """Agreement of the replicas on one stage. Gradients are those of the masters, in fp32.

    They may agree on gradients, so that all make the same step, or on weights, after each has made steps of its own.
    """

    meter: Meter

    def local_step(self, step: int) -> LocalStep | None:
        """Return how each replica makes this step on its own gradients; None = they are summed, the step is common."""
        ...

    def begin(self, step: int, scale: float = 1.0) -> None:
        """Forget the gradients of the last step; step `step`, counted from 0, begins. scale: of its gradients."""
        ...

    def grad_made(self, weight: Weight, *, complete: bool) -> None:
        """Take note that a backward has added to one gradient; complete: for the last time in this step."""
        ...

    def reduce(self) -> None:
        """Start what is left to exchange: every gradient of the stage is complete."""
        ...

    def wait(self) -> None:
        """Block until every gradient is the sum over the replicas, unless the step is local."""
        ...

    def after_step(self, step: int, moments: SecondMoments) -> None:
        """Take note that the optimizer has made step `step`; moments: of the stage's weights, may be changed."""
        ...

    def shared(self) -> Mapping[str, Tensor] | None:
        """Return what all replicas have in common where each has weights of its own: fp32 by key, not copied.

        It is what is evaluated and saved as the model; None = the masters are. All replicas call it together.
        """
        ...

    def state_dict(self) -> WeightState:
        """Return what this replica remembers between steps (error feedback is training state), not copied."""
        ...

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Take over what the replicas of a run remembered, one entry each; there may have been more or fewer.

        The masters have been set to the saved model before.
        """
        ...


class Mode(Protocol):
    """A data-parallel mode, chosen by spec; a frozen dataclass."""

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights; alone, it has nothing to do."""
        ...


class Memoryless:
    """A mode whose every step is complete in itself."""

    def local_step(self, step: int) -> None:
        """All replicas make the same step."""

    def after_step(self, step: int, moments: SecondMoments) -> None:
        """Nothing is left to do."""

    def shared(self) -> None:
        """All replicas have the same weights."""

    def state_dict(self) -> WeightState:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Raise RunError if there is something to remember: what the replicas owe each other would be lost."""
        refuse_others(saved)


def refuse_others(saved: Sequence[WeightState], known: Collection[str] = ()) -> None:
    """Raise RunError if replicas remembered anything under a name that is not among `known`."""
    names = {name for state in saved for name in state} - set(known)
    if names:
        raise RunError(
            f"the checkpoint holds {sorted(names)} of another data-parallel mode, which this one would lose; "
            "go on in the mode that saved it (dp.mode in its config.toml)"
        )


class Unsummed:
    """What agreements have in common that leave each replica its own gradients."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.meter = Meter()
        self.weights = tuple(weights)

    def begin(self, step: int, scale: float = 1.0) -> None:
        for weight in self.weights:
            weight.master.grad = None

    def grad_made(self, weight: Weight, *, complete: bool) -> None:
        pass

    def reduce(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Alone(Unsummed, Memoryless):
    """The only replica agrees with itself."""


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

    def begin(self, step: int, scale: float = 1.0) -> None:
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
        for finish in self._under_way:
            finish()
        self._under_way.clear()

    def _next_is_full(self) -> bool:
        launched = len(self._under_way)
        return launched < len(self._buckets) and self._buckets[launched].missing == 0

    def _launch(self) -> None:
        self._under_way.append(self.leave(self._buckets[len(self._under_way)]))
