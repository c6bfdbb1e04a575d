"""SparseLoCo: local steps, then the largest few of the changes in every chunk, with error feedback and no momentum.

Source: Sarfi et al. 2025, arXiv:2508.15706, Algorithm 1. n = weights of a unit, R = replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.codecs.topk import TopK
from acsgd.dp.exchange.averaging import told_mean
from acsgd.dp.exchange.local_weights import OWN_ERROR, Merging, OwnWeights, Unit
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.optim.base import Capability, SecondMoments
from acsgd.shards.weights import Weight, WeightState


@dataclass(frozen=True)
class SparseLoCo:
    """Every `inner` steps: e = decay e + own - shared; C(e) travels to all; e -= C(e); shared += outer_lr mean(C(e)).

    All replicas then go on from what is shared.
    """

    inner: int = 30
    """Steps between exchanges, H."""
    topk: float = 64 / 4096
    """Share of every chunk that is sent, in (0, 1]."""
    chunk: int = 4096
    """Neighbours of which the largest are sent; 0 = all of a unit."""
    bits: int = 2
    """Per value, 1 to 8."""
    decay: float = 0.95
    """Of what is owed, from one exchange to the next, in [0, 1]."""
    outer_lr: float = 1.0
    moment_correction: bool = False
    """Whether AdamW's second moments are kept at the size that they have for mean gradients, by row (moments.py)."""

    RENAMED: ClassVar[dict[str, str]] = {"moments": "moment_correction"}

    def __post_init__(self) -> None:
        if self.inner < 1:
            raise ValueError(f"inner={self.inner} must be 1 or more steps")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay} must lie in [0, 1]; 0.95 is usual")
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr={self.outer_lr} must be greater than 0; 1 is usual")
        self.compressor()

    def compressor(self) -> TopK:
        """Return what makes messages of what is owed."""
        return TopK(self.topk, self.bits, group=max(1, round(self.topk * self.chunk)), chunk=self.chunk)

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("second_moments",)) if self.moment_correction else frozenset()

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        return Merging(weights) if peers.size == 1 else _SparseLoCoSync(self, weights, peers)


class _SparseLoCoSync(OwnWeights):
    remembers = (OWN_ERROR,)

    def __init__(self, mode: SparseLoCo, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(weights, peers, moments=mode.moment_correction)
        self._mode = mode
        self._errors = [torch.zeros_like(unit.own) for unit in self.units]

    @torch.no_grad()
    def after_step(self, step: int, moments: SecondMoments) -> None:
        if (step + 1) % self._mode.inner == 0:
            for unit, error in zip(self.units, self._errors, strict=True):
                self._exchange(unit, error)
        super().after_step(step, moments)

    def state_dict(self) -> WeightState:
        pairs = zip(self.units, self._errors, strict=True)
        return super().state_dict() | {
            OWN_ERROR: {key: x for unit, error in pairs for key, x in unit.views(error).items()}
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        super().load_state_dict(saved)
        for unit, error in zip(self.units, self._errors, strict=True):
            error.zero_()
            if any(OWN_ERROR in state for state in saved):
                self.load_into(unit, error, [state[OWN_ERROR] for state in saved])

    def _exchange(self, unit: Unit, error: Tensor) -> None:
        error.mul_(self._mode.decay).add_(unit.own).sub_(unit.shared)
        exchange = partial(told_mean, error, self._mode.compressor(), self.peers, self.meter)
        sent, mean = self.peers.begin(exchange).result(self.meter)
        error -= sent
        unit.shared.add_(mean, alpha=self._mode.outer_lr)
        unit.own.copy_(unit.shared)
        unit.publish()
