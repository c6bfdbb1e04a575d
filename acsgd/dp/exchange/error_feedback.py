"""Error feedback on both sides of an exchange: what a message lacks is owed, and sent with what comes later.

Source: Tang et al. 2019, arXiv:1905.05957 (DoubleSqueeze), Algorithm 1. n = elements of a vector; R replicas; part j of
R is what replica j serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError
from acsgd.codecs.message import MessageCodec
from acsgd.dp.exchange.averaging import parts, served_mean
from acsgd.dp.exchange.peers import Peers
from acsgd.errors import RunError
from acsgd.meter import Meter


class Owed:
    """What this replica owes: sum of all that was added to `own`, in the mean, == sum of the means + what is owed."""

    def __init__(self, own: Tensor, peers: Peers) -> None:
        """own: [n], fp32; becomes what the replica has not told yet, and is changed in place by every exchange."""
        self.own = own
        self.served = torch.zeros_like(parts(own, peers.size)[peers.replica])
        """Of the part that this replica serves: what all means so far have lacked."""
        self._peers = peers

    @torch.no_grad()
    def exchange(self, compressor: MessageCodec, meter: Meter) -> Tensor:
        """Send what is owed, as far as messages go; return the mean of what was sent, [n], equal on all replicas.

        To be called in the thread of the peers. Raises RunError.
        """
        cut = parts(self.own, self._peers.size)
        try:
            agreed = served_mean(cut, self.served, compressor, self._peers, meter)
        except NotFiniteError as error:
            raise RunError(
                f"replica {self._peers.replica}: what it owes is not finite ({error}); go back to a checkpoint"
            ) from error
        for part, sent in zip(cut, agreed.sent, strict=True):
            part -= sent
        self.served = agreed.error
        return torch.cat(agreed.mean)

    def served_whole(self) -> Tensor:
        """Return the served error as a tensor [n], 0 where other replicas serve."""
        whole = torch.zeros_like(self.own)
        parts(whole, self._peers.size)[self._peers.replica].copy_(self.served)
        return whole
