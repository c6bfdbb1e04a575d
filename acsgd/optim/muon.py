from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from acsgd.config.options import OptimConfig
from acsgd.config.ranges import Range
from acsgd.optim.adamw import AdamW, AdamWOptimizer
from acsgd.optim.base import PLAIN_STEP, Capability, LocalStep, SecondMoments
from acsgd.optim.torch_optimizer import TorchOptimizer
from acsgd.shards.weights import StateTensor, Weight, WeightState


@dataclass(frozen=True)
class Muon:
    """Orthogonalized momentum for the matrices of blocks (Jordan et al. 2024, kellerjordan.github.io/posts/muon), AdamW
    for embeddings, heads, vectors and stacked experts; torch's own.

    Updates of matrices have the root mean square of those of AdamW (Liu et al. 2025, arXiv:2502.16982), so that both
    use optim.lr and optim.weight_decay. optim.betas and optim.eps are of AdamW.
    """

    momentum: Annotated[float, Range(0, 1, below=True)] = 0.95
    """Decay rate of the sum of gradients that is orthogonalized."""
    nesterov: bool = True
    """Whether to orthogonalize the gradient plus the momentum times this sum."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset(("second_moments",))
    averages: ClassVar[bool] = False
    states: ClassVar[tuple[StateTensor, ...]] = (
        StateTensor("momentum_buffer", of_hidden_matrices=True),
        *(state._replace(of_hidden_matrices=False) for state in AdamW.states),
    )

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> MuonOptimizer:
        """Return the optimizer of these weights."""
        return MuonOptimizer(weights, config, self)


class MuonOptimizer:
    """Muon over the hidden matrices of one rank, AdamW over its other weights."""

    def __init__(self, weights: Sequence[Weight], config: OptimConfig, options: Muon) -> None:
        def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            return torch.optim.Muon(
                groups, momentum=options.momentum, nesterov=options.nesterov, adjust_lr_fn="match_rms_adamw"
            )

        self._muon = TorchOptimizer([weight for weight in weights if weight.is_hidden_matrix], config, make)
        self._adamw = AdamWOptimizer([weight for weight in weights if not weight.is_hidden_matrix], config)

    def step(self, step: int, how: LocalStep = PLAIN_STEP) -> None:
        """Update masters and parameters of step `step`, counted from 0, with the gradients of the masters."""
        self._muon.step(step, how)
        self._adamw.step(step, how)

    def copy_trained(self, weight: Weight, out: Tensor) -> None:
        """Copy the values of the master."""
        self._adamw.copy_trained(weight, out)

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return the second moments of AdamW, not copied: hidden matrices have none."""
        hidden = frozenset(weight.key for weight in weights if weight.is_hidden_matrix)
        others = [weight for weight in weights if not weight.is_hidden_matrix]
        return self._adamw.second_moments(others)._replace(without=hidden)

    def state_of(self, weights: Sequence[Weight]) -> WeightState:
        """Return the state of some weights, not copied; empty before the first step."""
        return self._muon.state_of([weight for weight in weights if weight.is_hidden_matrix]) | self._adamw.state_of(
            [weight for weight in weights if not weight.is_hidden_matrix]
        )

    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        """Load a copy of what `state_of` returned for a weight of the same key."""
        (self._muon if weight.is_hidden_matrix else self._adamw).load_state_of(weight, state)
