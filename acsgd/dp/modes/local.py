"""Replicas that never agree while they train; the model is their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.dp.exchange.local_weights import Merging, OwnWeights
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.optim.base import Capability
from acsgd.shards.weights import Weight
from acsgd.topology import collective_errors


@dataclass(frozen=True)
class Local:
    """Each replica trains for itself; their mean is what is evaluated and saved. The least that any mode can send."""

    requires: ClassVar[frozenset[Capability]] = frozenset()

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        return Merging(weights) if peers.size == 1 else _LocalSync(weights, peers)


class _LocalSync(OwnWeights):
    @torch.no_grad()
    def global_weights(self) -> Mapping[str, Tensor] | None:
        for unit in self.units:
            unit.shared.copy_(unit.own)
            with collective_errors("averaging weights", self.peers.group):
                dist.all_reduce(unit.shared, group=self.peers.group)
            unit.shared /= self.peers.size
        return super().global_weights()
