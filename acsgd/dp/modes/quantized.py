"""Quantized updates with frozen second moments, after initial exact steps.

Sources: Tang et al. 2021, arXiv:2102.02888 (1-bit Adam), Algorithm 1; QuantizedAdam of AC-SGD. With second moments that
are frozen and equal, an update is a fixed multiple of the momentum, weight by weight. So updates are sent instead of
momentum: they are scaled as they are applied, and each replica keeps its own momentum, whose mean is the same.

Unlike in the published method, second moments that are too small for a gradient grow (see AdamWOptimizer): embedding
rows of tokens that the exact steps have not seen have second moments of 0 or nearly 0, so their steps would be
momentum / eps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.lloyd import Lloyd
from acsgd.codecs.message import PackedCodec
from acsgd.dp.exchange.reduced_updates import ReducedUpdateSync, reduced_update_states
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState
from acsgd.dp.sync import Exchanges, GradSync, SingleReplicaSync
from acsgd.optim.base import Capability, LocalStep
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class Quantized:
    """Exact all-reduce for `exact_steps`, then quantized updates with error feedback in both directions."""

    exchanges: ClassVar[Exchanges] = "updates"
    RENAMED: ClassVar[dict[str, str]] = {"bucket": "group"}

    bits: int = 4
    """Bits per value, 1 to 8; 1 = a sign and the mean magnitude."""
    group: int = 512
    """Number of values that share a scale."""
    exact_steps: int = 100
    """Number of initial steps that use exact all-reduce, 1 or more; a tenth to a fifth of a run is usual. The second
    moments are those of these steps, but grow where a later gradient is far larger than all of them."""

    def __post_init__(self) -> None:
        if self.exact_steps < 1:
            raise ValueError(f"exact_steps={self.exact_steps} must be 1 or more: second moments come from these steps")
        if self.group < 1:
            raise ValueError(f"group={self.group} must be 1 or more values that share a scale; 512 is usual")
        self.codec()

    def codec(self) -> PackedCodec:
        """Return the codec of updates. Raises ValueError if an option is invalid."""
        if self.bits == 1:
            return PackedCodec(FixPoint(1, dims="group", group=self.group))
        return PackedCodec(Lloyd(self.bits, "group", self.group))

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("frozen_second_moments",))

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state that each of several replicas keeps between steps."""
        return reduced_update_states(moment_correction=False)

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights, self.states)
        how = LocalStep(frozen=True, replicas=peers.size)
        return ReducedUpdateSync(weights, peers, self.codec(), exact_steps=self.exact_steps, how=how)
