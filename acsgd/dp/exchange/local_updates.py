"""Steps from the same weights, each replica on its own gradients; the mean of the steps, compressed, is what all make.

What messages lack stays owed on both sides (owed.py), so replicas stay equal to the bit. n = weights of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from acsgd.codecs.message import MessageCodec
from acsgd.dp.exchange.error_feedback import Owed
from acsgd.dp.exchange.local_weights import OWN_ERROR, SERVED_ERROR, OwnWeights, Unit, load_served, served_state
from acsgd.dp.exchange.peers import Peers
from acsgd.optim.base import LocalStep, SecondMoments
from acsgd.shards.weights import Weight, WeightState


class UpdateSync(OwnWeights):
    """A unit's own weights are what all share, but between the optimizer's step and the exchange, which follows it."""

    remembers = (OWN_ERROR, SERVED_ERROR)

    def __init__(
        self,
        weights: Sequence[Weight],
        peers: Peers,
        compressor: MessageCodec,
        *,
        exact_steps: int,
        how: LocalStep,
        moments: bool = False,
    ) -> None:
        super().__init__(weights, peers, exact_steps=exact_steps, how=how, moments=moments)
        self._compressor = compressor
        self._owed = [Owed(torch.zeros_like(unit.own), peers) for unit in self.units]

    @torch.no_grad()
    def after_step(self, step: int, moments: SecondMoments) -> None:
        if step < self.exact_steps:
            for unit in self.units:
                unit.shared.copy_(unit.own)
            return
        for unit, owed in zip(self.units, self._owed, strict=True):
            self._exchange(unit, owed)
        super().after_step(step, moments)

    def state_dict(self) -> WeightState:
        pairs = list(zip(self.units, self._owed, strict=True))
        return {
            OWN_ERROR: {key: x for unit, owed in pairs for key, x in unit.views(owed.own).items()},
            SERVED_ERROR: served_state(self.units, [owed.served for owed in self._owed], self.peers),
            **self.rows_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        self.load_rows(saved, self.remembers)
        for unit, owed in zip(self.units, self._owed, strict=True):
            unit.shared.copy_(unit.own)
            unit.publish()
            owed.own.zero_()
            if any(OWN_ERROR in state for state in saved):
                self.load_into(unit, owed.own, [state[OWN_ERROR] for state in saved])
        load_served(self.units, [owed.served for owed in self._owed], self.peers, saved)

    def _exchange(self, unit: Unit, owed: Owed) -> None:
        """Owe this replica's step, and make instead the one that all make."""
        owed.own += unit.own.sub_(unit.shared)
        exchange = partial(owed.exchange, self._compressor, self.meter)
        unit.shared += self.peers.begin(exchange).result(self.meter)
        unit.own.copy_(unit.shared)
        unit.publish()
