"""Sparse exchange of updates in every step; all replicas keep the same weights.

Sparse gradients with error feedback do badly under Adam: a coordinate that has waited arrives as a burst, and Adam
divides it by second moments of bursts. Here each replica preconditions first: it adds its own AdamW update, without
momentum, to its residual, which takes the place of momentum; second moments are kept as large as those of the mean
gradient. Compare Lin et al. 2018, arXiv:1712.01887 (top-k of momentum with masking) and Karimireddy et al. 2019,
arXiv:1901.09847 (error feedback after the learning rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from acsgd.codecs.topk import TopK
from acsgd.dp.exchange.reduced_updates import ReducedUpdateSync, reduced_update_states
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState
from acsgd.dp.sync import Exchanges, GradSync, SingleReplicaSync
from acsgd.optim.base import Capability, LocalStep
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class CocktailGrad:
    """Top-k exchange of updates with error feedback in both directions, between two steps.

    AdamW runs without its first moment, whatever optim.betas is.
    """

    exchanges: ClassVar[Exchanges] = "updates"
    RENAMED: ClassVar[dict[str, str]] = {"bucket": "group", "moments": "moment_correction"}

    topk: float = 0.02
    """Fraction of coordinates sent per step, in (0, 1]."""
    bits: int = 4
    """Bits per value, 1 to 8."""
    group: int = 128
    """Number of values that share a scale."""
    moment_correction: bool = True
    """Whether to keep AdamW's second moments as large as those of the mean gradient, row by row."""
    exact_steps: int = 0
    """Number of initial steps that use exact all-reduce and momentum. 0 = none."""

    def __post_init__(self) -> None:
        if self.exact_steps < 0:
            raise ValueError(f"exact_steps={self.exact_steps} must be 0 or more")
        self.codec()

    def codec(self) -> TopK:
        """Return the codec of updates. Raises ValueError if an option is invalid."""
        return TopK(self.topk, self.bits, self.group)

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("no_momentum", "second_moments") if self.moment_correction else ("no_momentum",))

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state that each of several replicas keeps between steps."""
        return reduced_update_states(moment_correction=self.moment_correction)

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights, self.states)
        return ReducedUpdateSync(
            weights,
            peers,
            self.codec(),
            exact_steps=self.exact_steps,
            how=LocalStep(momentum=False),
            moment_correction=self.moment_correction,
        )
