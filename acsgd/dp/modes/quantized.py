"""Momentum in few bits: after some exact steps AdamW's second moments are frozen, and its first are exchanged.

Sources: Tang et al. 2021, arXiv:2102.02888 (1-bit Adam), Algorithm 1; QuantizedAdam of AC-SGD. Where the second moments
are frozen and equal, a step is a fixed multiple of the momentum, weight by weight; so what travels here is the step,
scaled as it will be applied, not the bare momentum, and each replica keeps its own momentum: the mean is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.lloyd import Lloyd
from acsgd.codecs.message import PackedCodec
from acsgd.dp.exchange.local_updates import UpdateSync
from acsgd.dp.exchange.local_weights import Merging
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.optim.base import Capability, LocalStep
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class Quantized:
    """`exact_steps` on summed gradients; then all steps are exchanged in few bits, errors fed back on both sides."""

    bits: int = 4
    """Per value, 1 to 8; of 1 bit a sign and the mean magnitude."""
    group: int = 512
    """Values that share a scale."""
    exact_steps: int = 100
    """At the start, from which the second moments are known; a tenth to a fifth of a run is usual."""

    RENAMED: ClassVar[dict[str, str]] = {"bucket": "group"}

    def __post_init__(self) -> None:
        if self.exact_steps < 1:
            raise ValueError(f"exact_steps={self.exact_steps} must be 1 or more: second moments come from these steps")
        if self.group < 1:
            raise ValueError(f"group={self.group} must be 1 or more values that share a scale; 512 is usual")
        self.compressor()

    def compressor(self) -> PackedCodec:
        """Return what makes messages of what is owed."""
        if self.bits == 1:
            return PackedCodec(FixPoint(1, dims="group", group=self.group))
        return PackedCodec(Lloyd(self.bits, "group", self.group))

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("frozen_second_moments",))

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        if peers.size == 1:
            return Merging(weights)
        how = LocalStep(frozen=True)
        return UpdateSync(weights, peers, self.compressor(), exact_steps=self.exact_steps, how=how)
