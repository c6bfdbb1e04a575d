"""A few coordinates per step, on which all replicas agree before the next: the sparse exchange for equal replicas.

Gradients with error feedback do badly under Adam where few coordinates travel: one that waited comes as a burst, which
Adam divides by what it has seen of bursts. Here each replica divides first: its own AdamW step is what it owes, without
momentum, since what is owed takes its place, and with second moments as large as those of mean gradients (moments.py).
Compare Lin et al. 2018, arXiv:1712.01887 (top-k of momentum, masked once sent) and Karimireddy et al. 2019,
arXiv:1901.09847 (error feedback after the learning rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from acsgd.codecs.topk import TopK
from acsgd.dp.exchange.local_updates import UpdateSync
from acsgd.dp.exchange.local_weights import Merging
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.optim.base import Capability, LocalStep
from acsgd.shards.weights import Weight


@dataclass(frozen=True)
class CocktailGrad:
    """From the same weights each replica makes a step; of what it owes, the largest `topk` share travels, both ways.

    The exchange takes place between two steps. AdamW runs without its first moment, whatever optim.betas says.
    """

    topk: float = 0.02
    """Share of the weights that is sent, in (0, 1]."""
    bits: int = 4
    """Per value, 1 to 8."""
    group: int = 128
    """Values that share a scale."""
    moment_correction: bool = True
    """Whether AdamW's second moments are kept at the size that they have for mean gradients, by row (moments.py)."""
    exact_steps: int = 0
    """So many steps at the start are made on gradients summed exactly, with momentum."""

    RENAMED: ClassVar[dict[str, str]] = {"bucket": "group", "moments": "moment_correction"}

    def __post_init__(self) -> None:
        if self.exact_steps < 0:
            raise ValueError(f"exact_steps={self.exact_steps} must be 0 or more")
        self.compressor()

    def compressor(self) -> TopK:
        """Return what makes messages of what is owed. Raises ValueError."""
        return TopK(self.topk, self.bits, self.group)

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("no_momentum", "second_moments") if self.moment_correction else ("no_momentum",))

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        if peers.size == 1:
            return Merging(weights)
        return UpdateSync(
            weights,
            peers,
            self.compressor(),
            exact_steps=self.exact_steps,
            how=LocalStep(momentum=False),
            moments=self.moment_correction,
        )
