"""SparseLoCo: local steps, then a chunk-wise top-k exchange of their sum with error feedback.

Source: Sarfi et al. 2025, arXiv:2508.15706, Algorithm 1. n = weights of a buffer, R = replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from acsgd.codecs.topk import TopK
from acsgd.config.ranges import COUNT_OR_NONE, Range
from acsgd.dp.exchange.error_feedback import RESIDUAL, ErrorFeedback
from acsgd.dp.exchange.local_weights import LOCAL_WEIGHTS, LocalWeightsSync
from acsgd.dp.exchange.second_moments import moment_states
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState
from acsgd.dp.sync import Exchanges, GradSync, SingleReplicaSync
from acsgd.optim.base import Capability, SecondMoments
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class SparseLoCo:
    """Every `inner` steps: e = decay e + local - global; all-gather C(e); e -= C(e); global += outer_lr mean(C(e)).

    Then all replicas load the global weights.
    """

    exchanges: ClassVar[Exchanges] = "updates"
    RENAMED: ClassVar[dict[str, str]] = {"moments": "moment_correction"}

    inner: int = 30
    """Number of local steps between exchanges, H."""
    topk: float = 64 / 4096
    """Fraction of coordinates sent per chunk, in (0, 1]."""
    chunk: int = 4096
    """Number of neighbouring coordinates among which the largest are selected; 0 = all of a buffer."""
    bits: int = 2
    """Bits per value, 1 to 8."""
    decay: float = 0.95
    """Decay of the residual per exchange, in [0, 1]."""
    outer_lr: Annotated[float, Range(0, 1000, above=True)] = 1.0
    """Multiplier on the decoded mean update (outer learning rate)."""
    moment_correction: bool = False
    """Whether to keep AdamW's second moments as large as those of the mean gradient, row by row."""
    redundant_steps: Annotated[int, COUNT_OR_NONE] = 0
    """Number of initial steps in which each replica computes all micro-batches: nothing is exchanged, none differs."""

    def __post_init__(self) -> None:
        if self.inner < 1:
            raise ValueError(f"inner={self.inner} must be 1 or more steps")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay} must lie in [0, 1]; 0.95 is usual")
        self.codec()

    def codec(self) -> TopK:
        """Return the codec of updates. Raises ValueError if an option is invalid."""
        return TopK(self.topk, self.bits, group=max(1, round(self.topk * self.chunk)), chunk=self.chunk)

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("second_moments",)) if self.moment_correction else frozenset()

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state that each of several replicas keeps between steps."""
        return LOCAL_WEIGHTS, *moment_states(required=self.moment_correction), RESIDUAL

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights, self.states)
        return SparseLoCoSync(self, weights, peers)

    def sends_after(self, step: int) -> bool:
        """Return whether updates are exchanged after a step."""
        return step >= self.redundant_steps and (step + 1 - self.redundant_steps) % self.inner == 0


class SparseLoCoSync(LocalWeightsSync):
    """Local weights with one error feedback per buffer, on the sender's side."""

    def __init__(self, mode: SparseLoCo, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(
            weights,
            peers,
            mode.states,
            redundant_steps=mode.redundant_steps,
            moment_correction=mode.moment_correction,
        )
        self._mode = mode
        self._feedback = [ErrorFeedback(buffer.local, peers, server=False) for buffer in self.buffers]

    def tensors(self) -> dict[str, list[Tensor]]:
        return super().tensors() | {RESIDUAL.name: [feedback.residual for feedback in self._feedback]}

    def exchanges_after(self, step: int) -> bool:
        return super().exchanges_after(step) or self._mode.sends_after(step)

    @torch.no_grad()
    def exchange(self, step: int, moments: SecondMoments) -> None:
        self.received = []
        if self._mode.sends_after(step):
            for buffer, feedback in zip(self.buffers, self._feedback, strict=True):
                x = (feedback.residual * self._mode.decay).add_(buffer.local).sub_(buffer.shared)
                exchange = partial(feedback.exchange_gathered, x, self._mode.codec(), self.meter)
                self.received.append(self.peers.submit(exchange).result(self.meter))
        super().exchange(step, moments)

    def after_step(self, step: int, moments: SecondMoments) -> None:
        if self._mode.sends_after(step):
            for buffer, feedback, exchanged in zip(self.buffers, self._feedback, self.received, strict=True):
                feedback.apply(exchanged)
                buffer.load_shared(exchanged.mean, self._mode.outer_lr)
            self.received = []
        super().after_step(step, moments)
