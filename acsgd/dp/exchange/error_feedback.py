"""Error feedback: what compression omits from a message is added to the next one.

Sources: Karimireddy et al. 2019, arXiv:1901.09847; for both directions, Tang et al. 2019, arXiv:1905.05957
(DoubleSqueeze), Algorithm 1. n = elements of a vector; R replicas; replica r owns part r of R.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.message import MessageCodec
from acsgd.codecs.topk import TopK
from acsgd.comm.waits import Meter
from acsgd.dp.exchange.averaging import gathered_mean, sharded_mean, split_evenly
from acsgd.dp.exchange.vectors import UpdateSum, Vector, dense
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState

RESIDUAL = ReplicaState("residual", merge="mean", single="add_to_weight")
"""Residual of a replica's updates."""
SERVER_RESIDUAL = ReplicaState("server_residual", merge="sum", single="add_to_weight", moves_to=RESIDUAL.name)
"""Residual of the means that a replica computes, 0 outside of the part that it owns."""


class Exchanged(NamedTuple):
    """Result of an exchange, and the residuals after it."""

    mean: Vector
    """[n], the decoded mean, equal on all replicas."""
    residual: Tensor | Sequence[UpdateSum]
    """[n], or the `UpdateSum`s of its parts, which `apply` stores."""
    server_residual: Tensor
    """[n_r]"""


class ErrorFeedback:
    """Residuals of the repeated exchange of a vector [n], fp32.

    The mean of all inputs equals the sum of all outputs plus the mean of `residual` over the replicas plus
    `server_residual` of each part.
    """

    def __init__(self, like: Tensor, peers: Peers, *, sender: bool = True, server: bool = True) -> None:
        """like: a tensor [n]. sender, server: which residuals there are; the other is empty."""
        self.residual = torch.zeros_like(like if sender else like[:0])
        """[n], what compression has omitted from the messages of this replica."""
        self.server_residual = torch.zeros_like(split_evenly(like, peers.size)[peers.replica] if server else like[:0])
        """[n_r], what compression has omitted from the means of the part that this replica owns."""
        self._peers = peers

    def add(self, x: Tensor) -> None:
        """Add a vector [n] to the residual, as input of the next exchange."""
        self.residual += x

    @torch.no_grad()
    def sharded_mean(self, codec: MessageCodec, meter: Meter) -> Tensor:
        """Send the residual; return the decoded mean [n], equal on all replicas. Both directions are compressed.

        The residual changes in place: others may have views of it.
        Call it in the thread of the peers. Raises RunError.
        """
        exchanged = self.exchange_sharded(self.residual, codec, meter)
        self.apply(exchanged)
        return dense(exchanged.mean)

    @torch.no_grad()
    def exchange_sharded(self, x: Tensor, codec: MessageCodec, meter: Meter) -> Exchanged:
        """Send a vector [n], which includes the residual and becomes the new one; both directions are compressed.

        Call it in the thread of the peers. Raises RunError.
        """
        result = sharded_mean(split_evenly(x, self._peers.size), self.server_residual, codec, self._peers, meter)
        return Exchanged(result.mean, x, result.server_residual)

    @torch.no_grad()
    def exchange_update(self, local: Tensor, shared: Tensor, codec: MessageCodec, meter: Meter) -> Exchanged:
        """Send the update local - shared, [n] each, and the residual; both directions are compressed.

        With TopK, `local`, `shared` and the residual must not change until the result is applied: they are read again.
        Call it in the thread of the peers. Raises RunError.
        """
        if not isinstance(codec, TopK):
            return self.exchange_sharded((local - shared).add_(self.residual), codec, meter)
        parts = zip(*(split_evenly(x, self._peers.size) for x in (local, shared, self.residual)), strict=True)
        sums = [UpdateSum(*each) for each in parts]
        result = sharded_mean(sums, self.server_residual, codec, self._peers, meter)
        return Exchanged(result.mean, sums, result.server_residual)

    @torch.no_grad()
    def exchange_gathered(self, x: Tensor, codec: MessageCodec, meter: Meter) -> Exchanged:
        """All-gather compressed vectors [n], each of which includes the residual and becomes the new one.

        Call it in the thread of the peers. Raises RunError.
        """
        return Exchanged(gathered_mean(x, codec, self._peers, meter), x, self.server_residual)

    @torch.no_grad()
    def apply(self, exchanged: Exchanged) -> None:
        """Replace the residuals by those after an exchange."""
        if isinstance(exchanged.residual, Tensor):
            self.residual = exchanged.residual
        else:
            for part in exchanged.residual:
                part.store_residual()
        self.server_residual = exchanged.server_residual


def pad_part(part: Tensor, like: Tensor, peers: Peers) -> Tensor:
    """Return a tensor [n] that holds the part that this replica owns, 0 elsewhere. like: a tensor [n]."""
    if len(part) == len(like):
        return part
    whole = torch.zeros_like(like)
    split_evenly(whole, peers.size)[peers.replica].copy_(part)
    return whole
