"""Reduced updates: local steps from the global weights, of which all replicas apply the compressed mean.

n = parameters of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from acsgd.codecs.message import MessageCodec
from acsgd.dp.exchange.error_feedback import RESIDUAL, SERVER_RESIDUAL, ErrorFeedback
from acsgd.dp.exchange.local_weights import LocalWeightsSync
from acsgd.dp.exchange.second_moments import moment_states
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState
from acsgd.optim.base import LocalStep, SecondMoments
from acsgd.shards.weights import Weight, WeightState


def reduced_update_states(*, moment_correction: bool) -> tuple[ReplicaState, ...]:
    """Return the state of ReducedUpdateSync."""
    return RESIDUAL, SERVER_RESIDUAL, *moment_states(required=moment_correction)


class ReducedUpdateSync(LocalWeightsSync):
    """Sync that exchanges the optimizer's updates after each step, with error feedback in both directions.

    After the exchange the local weights equal the global ones, bit for bit on all replicas.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        peers: Peers,
        codec: MessageCodec,
        *,
        exact_steps: int,
        how: LocalStep,
        moment_correction: bool = False,
    ) -> None:
        super().__init__(
            weights,
            peers,
            reduced_update_states(moment_correction=moment_correction),
            exact_steps=exact_steps,
            how=how,
            moment_correction=moment_correction,
        )
        self._codec = codec
        self._feedback = [ErrorFeedback(buffer.local, peers) for buffer in self.buffers]

    def tensors(self) -> dict[str, list[Tensor]]:
        return {
            RESIDUAL.name: [feedback.residual for feedback in self._feedback],
            SERVER_RESIDUAL.name: [feedback.server_residual for feedback in self._feedback],
        }

    def exchanges_after(self, step: int) -> bool:
        return step >= self.exact_steps

    @torch.no_grad()
    def exchange(self, step: int, moments: SecondMoments) -> None:
        self.received = []
        if step >= self.exact_steps:
            for buffer, feedback in zip(self.buffers, self._feedback, strict=True):
                exchange = partial(feedback.exchange_update, buffer.local, buffer.shared, self._codec, self.meter)
                self.received.append(self.peers.submit(exchange).result(self.meter))
        super().exchange(step, moments)

    @torch.no_grad()
    def after_step(self, step: int, moments: SecondMoments) -> None:
        if step >= self.exact_steps:
            for buffer, feedback, exchanged in zip(self.buffers, self._feedback, self.received, strict=True):
                feedback.apply(exchanged)
                buffer.load_shared(exchanged.mean)
            self.received = []
        super().after_step(step, moments)

    @torch.no_grad()
    def take_state(self) -> WeightState:
        for buffer, feedback in zip(self.buffers, self._feedback, strict=True):
            feedback.add(buffer.local - buffer.shared)  # of a step whose exchange is missing
            buffer.local.copy_(buffer.shared)
        return super().take_state()
