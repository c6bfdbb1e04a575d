"""Gradient sync of a weight with copies on several ranks, such as an embedding that is also the head."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.link import AnyInbox, AnyOutbox, LinkFactory
from acsgd.shards.weights import Weight


class TiedGroup:
    """One copy of a tied weight, and the links to the ranks with the other copies.

    After the reduction over replicas, each rank sends its gradient to all others and adds up all gradients in the order
    of the ranks. So all get the same bits, and the copies stay equal.

    number: position of the weight among the tied weights of the model. ranks: global ranks with a copy, in the order of
    the layers.
    """

    def __init__(self, weight: Weight, factory: LinkFactory, *, number: int, ranks: Sequence[int], rank: int) -> None:
        self.weight = weight
        spec = TensorSpec(tuple(weight.master.shape), torch.float32)
        self._ranks = ranks
        self._rank = rank
        self._links = {peer: factory.open_tie(number, spec, peer=peer) for peer in ranks if peer != rank}

    @property
    def outboxes(self) -> list[AnyOutbox]:
        """Sending ends of all channels."""
        return [outbox for outbox, _ in self._links.values()]

    @property
    def inboxes(self) -> list[AnyInbox]:
        """Receiving ends of all channels."""
        return [inbox for _, inbox in self._links.values()]

    def post(self) -> None:
        """Post the receives of the gradients of all other copies."""
        for _, inbox in self._links.values():
            inbox.post()

    def send(self, step: int) -> None:
        """Send the gradient of this copy to the other ranks."""
        info = TransferInfo(step, 0)
        for outbox, _ in self._links.values():
            outbox.send(info, {"gradient": self._grad.to(self.weight.param.device)})  # masters may be in host memory
        for outbox, _ in self._links.values():
            outbox.flush(wait=True)

    def receive(self, step: int) -> None:
        """Add the gradients of all other copies to the gradient of this copy, in place."""
        info = TransferInfo(step, 0)
        grads = {
            rank: inbox.receive(info).state["gradient"].to(self._grad.device)
            for rank, (_, inbox) in self._links.items()
        }
        if len(grads) == 1:  # the order of two does not matter
            self._grad.add_(*grads.values())
        else:
            grads[self._rank] = self._grad
            self._grad.copy_(functools.reduce(torch.add, (grads[rank] for rank in self._ranks)))
        for outbox, _ in self._links.values():
            outbox.drain()

    @property
    def _grad(self) -> Tensor:
        grad = self.weight.master.grad
        assert grad is not None, f"{self.weight.key} took no part in the loss"
        return grad


def sum_tied_gradients(groups: Sequence[TiedGroup], step: int) -> None:
    """Sum the gradients of the copies of each tied weight, in place. Sends all before it waits for any.

    All receives are posted first: their notices would wait behind a gradient that is sent to the same rank.
    """
    for group in groups:
        group.post()
    for group in groups:
        group.send(step)
    for group in groups:
        group.receive(step)
