"""Steps from the same weights, each replica on its own gradients; the mean of the steps, compressed, is what all make.

What messages lack stays owed on both sides (owed.py), so replicas stay equal to the bit. n = weights of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from acsgd.dp.base import LocalStep, refuse_others
from acsgd.dp.mean import Compressor
from acsgd.dp.moments import is_due
from acsgd.dp.noise import NOISE, Noise
from acsgd.dp.owed import Owed
from acsgd.dp.own import OWN_ERROR, SERVED_ERROR, OwnWeights, Unit, load_served, served_state
from acsgd.dp.peers import Peers
from acsgd.shards.base import Weight
from acsgd.shards.disk import WeightState


class UpdateSync(OwnWeights):
    """A unit's own weights are what all share, but between the optimizer's step and the exchange, which follows it."""

    remembers = (OWN_ERROR, SERVED_ERROR, NOISE)

    def __init__(
        self,
        weights: Sequence[Weight],
        peers: Peers,
        compressor: Compressor,
        *,
        exact_steps: int,
        how: LocalStep,
        gains: bool = False,
        moments: bool = False,
    ) -> None:
        """how: the optimizer makes local steps; gains: they become as long as one on the mean gradient (noise.py);
        moments: AdamW's second moments are averaged (moments.py)."""
        super().__init__(weights, peers, exact_steps=exact_steps)
        self._compressor = compressor
        self._how = how
        self._owed = [Owed(torch.zeros_like(unit.own), peers) for unit in self.units]
        self._noise = Noise(weights, peers) if gains else None
        self._moments = moments

    def local_step(self, step: int) -> LocalStep | None:
        return self._how if step >= self.exact_steps else None

    @torch.no_grad()
    def after_step(self, step: int, moments: Mapping[str, Tensor]) -> None:
        if step < self.exact_steps:
            for unit in self.units:
                unit.shared.copy_(unit.own)
            return
        if self._noise is not None and self._noise.is_due(step - self.exact_steps):
            self.peers.begin(partial(self._noise.measure, step, self.meter)).result(self.meter)
        for unit, owed in zip(self.units, self._owed, strict=True):
            self._exchange(unit, owed)
        if self._moments and is_due(step + 1 - self.exact_steps):
            self.average_moments(moments)

    def state_dict(self) -> WeightState:
        pairs = list(zip(self.units, self._owed, strict=True))
        state = {
            OWN_ERROR: {key: x for unit, owed in pairs for key, x in unit.views(owed.own).items()},
            SERVED_ERROR: served_state(self.units, [owed.served for owed in self._owed], self.peers),
        }
        return state | (self._noise.state_dict() if self._noise is not None else {})

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        refuse_others(saved, self.remembers)
        for unit, owed in zip(self.units, self._owed, strict=True):
            unit.shared.copy_(unit.own)
            unit.publish()
            owed.own.zero_()
            if any(OWN_ERROR in state for state in saved):
                self.load_into(unit, owed.own, [state[OWN_ERROR] for state in saved])
        load_served(self.units, [owed.served for owed in self._owed], self.peers, saved)
        if self._noise is not None:
            self._noise.load_state_dict(saved)

    def _exchange(self, unit: Unit, owed: Owed) -> None:
        """Owe this replica's step, and make instead the one that all make."""
        step = unit.own.sub_(unit.shared)
        if self._noise is not None:
            for key, view in unit.views(step).items():
                view *= self._noise.gain(key)
        owed.own += step
        exchange = partial(owed.exchange, self._compressor, self.meter)
        unit.shared += self.peers.begin(exchange).result(self.meter)
        unit.own.copy_(unit.shared)
        unit.publish()
