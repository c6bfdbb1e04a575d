"""A weight that two ranks hold: the embedding on the first stage, and the head that is tied to it on the last."""

from __future__ import annotations

from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.link import LinkFactory
from acsgd.shards.weights import Weight


class TiedPair:
    """The two copies of a tied weight on the first and the last rank; their gradients are summed after reduction.

    Addition commutes, so both ends get the same bits, take the same step, and stay equal.
    """

    def __init__(self, weight: Weight, factory: LinkFactory, *, boundary: int, peer: int) -> None:
        self._weight = weight
        spec = TensorSpec(tuple(weight.master.shape), weight.master.dtype)
        self._outbox, self._inbox = factory.open_tie(boundary, spec, peer=peer)

    def sum_gradients(self, step: int) -> None:
        """Add the other copy's gradient to this one's, in place."""
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
