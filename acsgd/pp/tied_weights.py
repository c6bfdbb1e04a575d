"""Gradient sync of a weight with copies on two ranks: the embedding on the first stage, the tied head on the last."""

from __future__ import annotations

from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.link import LinkFactory
from acsgd.shards.weights import Weight


class TiedPair:
    """One copy of a tied weight, and the links to the rank with the other copy.

    Both ranks sum the two gradients after the reduction over replicas. Addition is commutative, so both get the same
    bits and the copies stay equal.
    """

    def __init__(self, weight: Weight, factory: LinkFactory, *, boundary: int, peer: int) -> None:
        self._weight = weight
        spec = TensorSpec(tuple(weight.master.shape), weight.master.dtype)
        self._outbox, self._inbox = factory.open_tie(boundary, spec, peer=peer)

    def sum_gradients(self, step: int) -> None:
        """Add the gradient of the other copy to that of this copy, in place."""
        grad = self._weight.master.grad
        assert grad is not None, f"{self._weight.key} took no part in the loss"
        self._inbox.post()
        self._outbox.send(TransferInfo(step, 0), {"gradient": grad})
        self._outbox.flush(wait=True)
        grad += self._inbox.receive(TransferInfo(step, 0))["gradient"]
        self._outbox.drain()

    def close(self) -> None:
        """End the thread of the exchange."""
        self._outbox.close()
