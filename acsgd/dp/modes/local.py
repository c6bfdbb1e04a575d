"""Independent training of the replicas; the model is the mean of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.dp.exchange.local_weights import LOCAL_WEIGHTS, LocalWeightsSync
from acsgd.dp.exchange.second_moments import moment_states
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState
from acsgd.dp.sync import Exchanges, GradSync, SingleReplicaSync
from acsgd.groups import collective_errors
from acsgd.optim.base import Capability
from acsgd.shards.weights import Weight, WeightState


@dataclass(frozen=True)
class Local:
    """Local steps without communication; the mean weights are evaluated and saved. Baseline of the other modes."""

    requires: ClassVar[frozenset[Capability]] = frozenset()
    exchanges: ClassVar[Exchanges] = "nothing"
    states: ClassVar[tuple[ReplicaState, ...]] = (LOCAL_WEIGHTS, *moment_states(required=False))

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights, self.states)
        return LocalSync(weights, peers, self.states)


class LocalSync(LocalWeightsSync):
    """Sync that averages weights only where they are read."""

    def take_state(self) -> WeightState:
        return self.state_dict()  # the master weights stay local: there are no global ones without an exchange

    @torch.no_grad()
    def global_weights(self) -> Mapping[str, Tensor] | None:
        for buffer in self.buffers:
            buffer.shared.copy_(torch.zeros_like(buffer.local) if self.peers.is_observer else buffer.local)
            with collective_errors("averaging weights", self.peers.group):
                self.peers.waits.wait(self.peers.group.all_reduce(buffer.shared))
            buffer.shared /= self.peers.size
        return super().global_weights()
