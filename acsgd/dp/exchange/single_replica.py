"""Gradient sync for a run with a single replica."""

from __future__ import annotations

from collections.abc import Sequence

from acsgd.dp.resize import ReplicaState, check_names, fold
from acsgd.meter import Meter
from acsgd.optim.base import SecondMoments
from acsgd.shards.weights import Weight, WeightState


class SingleReplicaSync:
    """Gradient sync for a single replica: no communication.

    Restores the states of several replicas by folding them into its weights and into its next gradients.
    """

    def __init__(self, weights: Sequence[Weight], states: Sequence[ReplicaState] = ()) -> None:
        """states: those of the mode with several replicas."""
        self.meter = Meter()
        self._states = states
        self._weights = tuple(weights)
        self._residuals: WeightState = {}
        """Residuals of restored replicas, until the next step has added them to its gradients."""

    def local_step(self, step: int) -> None:
        pass

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        self._scale = scale
        for weight in self._weights:
            weight.master.grad = None

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        pass

    def reduce(self) -> None:
        for by_key in self._residuals.values():
            for weight in self._weights:
                if weight.key in by_key:
                    residual, grad = by_key[weight.key].view_as(weight.master) * self._scale, weight.master.grad
                    weight.master.grad = residual if grad is None else grad + residual

    def wait(self) -> None:
        pass

    def commit(self) -> None:
        pass

    def exchanges_after(self, step: int) -> bool:
        return False

    def exchange(self, step: int, moments: SecondMoments) -> None:
        pass

    def after_step(self, step: int, moments: SecondMoments) -> None:
        self._residuals = {}

    def global_weights(self) -> None:
        pass

    def state_dict(self) -> WeightState:
        return {name: dict(by_key) for name, by_key in self._residuals.items()}

    def take_state(self) -> WeightState:
        return self.state_dict()

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        check_names(self._states, saved)
        self._residuals = fold(self._states, saved, self._weights)
