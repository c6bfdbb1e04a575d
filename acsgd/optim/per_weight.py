"""Optimizers that step one weight after the other: with masters in host memory (optim.offload=cpu)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from acsgd.config.options import OptimConfig
from acsgd.optim.base import PLAIN_STEP, LocalStep, Optimizer, OptimizerSpec, SecondMoments
from acsgd.shards.weights import Weight, WeightState
from acsgd.streams import Streams


class PerWeightOptimizer(ABC):
    """An optimizer of which each weight has one of its own.

    stand_ins: the weights as these optimizers get them, in the order of `weights`.
    """

    def __init__(
        self, spec: OptimizerSpec, weights: Sequence[Weight], stand_ins: Sequence[Weight], config: OptimConfig
    ) -> None:
        self._weights = tuple(weights)
        self._stand_ins: Mapping[str, Weight] = {weight.key: weight for weight in stand_ins}
        self._optimizers: Mapping[str, Optimizer] = {weight.key: spec.open([weight], config) for weight in stand_ins}

    @torch.no_grad()
    def step(self, step: int, how: LocalStep = PLAIN_STEP) -> None:
        """Update masters and parameters of step `step`, counted from 0, with the gradients of the masters."""
        stateless = self._stateless() if how.frozen else set[str]()
        for weight in self._weights:
            if weight.master.grad is not None and weight.key not in stateless:
                self._step_weight(weight, step, how)

    @abstractmethod
    def _step_weight(self, weight: Weight, step: int, how: LocalStep) -> None:
        """Update one weight, which has a gradient."""

    def _stateless(self) -> set[str]:
        """Return the weights that have had no step, if others have: a step with frozen second moments omits them."""
        keys = {weight.key for weight in self._weights if not self.state_of([weight])}
        return keys if len(keys) < len(self._weights) else set()

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return the second moments of some weights, not copied; none without the capability "second_moments"."""
        stand_ins = [self._stand_ins[weight.key] for weight in weights if weight.key in self._stand_ins]
        found = [self._optimizers[each.key].second_moments([each]) for each in stand_ins]
        by_key = {key: moment for each in found for key, moment in each.by_key.items()}
        return SecondMoments(by_key, found[0].decay if found else 0.0)

    def state_of(self, weights: Sequence[Weight]) -> WeightState:
        """Return the state of some weights, not copied; empty before the first step."""
        state: WeightState = {}
        for weight in weights:
            for name, by_key in self._optimizers[weight.key].state_of([self._stand_ins[weight.key]]).items():
                state.setdefault(name, {}).update(by_key)
        return state

    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        """Load a copy of what `state_of` returned for a weight of the same key."""
        self._optimizers[weight.key].load_state_of(self._stand_ins[weight.key], state)


class CopyingOptimizer(PerWeightOptimizer):
    """An optimizer of masters in host memory, each copied to its parameter while the next one is updated.

    Parameters are on the device, or on the host with model.offload.
    """

    def __init__(self, spec: OptimizerSpec, weights: Sequence[Weight], config: OptimConfig, streams: Streams) -> None:
        super().__init__(spec, weights, [weight._replace(param=weight.master) for weight in weights], config)
        self._streams = streams

    def _step_weight(self, weight: Weight, step: int, how: LocalStep) -> None:
        self._optimizers[weight.key].step(step, how)
        self._set_param(weight)

    def _set_param(self, weight: Weight) -> None:
        """Copy a master to its parameter, which may lie in host memory, too."""
        master, param = weight.master.detach(), weight.param
        if param is not weight.master:
            param.copy_(master if param.device == master.device else self._streams.load(master.to(param.dtype)))


def open_optimizer(spec: OptimizerSpec, weights: Sequence[Weight], config: OptimConfig, streams: Streams) -> Optimizer:
    """Return the optimizer of some weights, whose masters are in host memory with optim.offload=cpu."""
    return CopyingOptimizer(spec, weights, config, streams) if config.offload == "cpu" else spec.open(weights, config)
