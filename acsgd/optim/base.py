"""Interface of optimizers, and what data-parallel modes may require of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from acsgd.config.options import OptimConfig
from acsgd.shards.weights import StateTensor, Weight, WeightState

Capability = Literal["second_moments", "no_momentum", "frozen_second_moments", "elementwise"]
"""Optional abilities of an optimizer: second moments, at least of some weights, that modes may read, scale and
accumulate by shares; steps without the first moment; steps with frozen second moments; steps of some rows of a weight,
since each element depends on its own gradient and state alone."""


class LocalStep(NamedTuple):
    """How the optimizer steps where each replica has its own gradients."""

    momentum: bool = True
    """Whether the first moment is used; else the gradient in its place. False requires "no_momentum"."""
    frozen: bool = False
    """Whether the second moments stay as they are, except that those of elements that had hardly any gradient so far
    grow to what AdamW would have. True requires "frozen_second_moments"."""
    replicas: int = 1
    """Number of replicas whose steps are averaged; used with `frozen`."""
    shares: Mapping[str, Tensor] = MappingProxyType({})
    """Fraction of the squared gradients that second moments accumulate, by key, [rows], in (0, 1]; empty = all of them.
    Not empty requires "second_moments". Those of weights that have none are not used."""


PLAIN_STEP = LocalStep()


class SecondMoments(NamedTuple):
    """Second moments of some weights, not copied; changes to them take effect."""

    by_key: Mapping[str, Tensor]
    """Without weights that have had no step yet."""
    decay: float
    """Decay rate per step, beta_2."""
    without: frozenset[str] = frozenset()
    """Weights that never have any, the same on all replicas."""


class Optimizer(Protocol):
    """An optimizer over what one rank owns of the weights: each weight, or parts of it."""

    def step(self, step: int, how: LocalStep = PLAIN_STEP) -> None:
        """Update masters and parameters of step `step`, counted from 0, with the gradients of the masters."""
        ...

    def copy_trained(self, weight: Weight, out: Tensor) -> None:
        """Copy the values that a weight has in training to a tensor of its shape, cast to its dtype.

        They are those of the master, unless the optimizer `averages`.
        """
        ...

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return the second moments of some weights; none without the capability "second_moments"."""
        ...

    def state_of(self, weights: Sequence[Weight]) -> WeightState:
        """Return the state of some weights, not copied; empty before the first step."""
        ...

    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        """Load a copy of what `state_of` returned for a weight of the same key."""
        ...


class OptimizerSpec(Protocol):
    """An optimizer as chosen by optim.name; a frozen dataclass."""

    capabilities: ClassVar[frozenset[Capability]]
    averages: ClassVar[bool]
    """Whether masters are averages, which are evaluated and saved, and parameters have other values in training."""

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The state of a weight, complete from its first update on; a checkpoint without it is invalid."""
        ...

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> Optimizer:
        """Return the optimizer of these weights."""
        ...
