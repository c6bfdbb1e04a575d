"""Optimizers that step one weight after the other: with masters in host memory (optim.offload=cpu), with masters that
are averages, and without masters (optim.masters=none)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from acsgd.config.options import OptimConfig
from acsgd.optim.base import PLAIN_STEP, LocalStep, Optimizer, OptimizerSpec, SecondMoments
from acsgd.optim.rounding import random_bits, round_stochastically
from acsgd.shards.weights import Weight, WeightState
from acsgd.streams import Streams


class PerWeightOptimizer(ABC):
    """Steps each weight with an optimizer of its own.

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

    def copy_trained(self, weight: Weight, out: Tensor) -> None:
        """Copy the values that a weight has in training to a tensor of its shape, rounded."""
        self._optimizers[weight.key].copy_trained(self._stand_ins[weight.key], out)

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return the second moments of some weights, not copied; none without the capability "second_moments"."""
        stand_ins = [self._stand_ins[weight.key] for weight in weights if weight.key in self._stand_ins]
        found = [self._optimizers[each.key].second_moments([each]) for each in stand_ins]
        by_key = {key: moment for each in found for key, moment in each.by_key.items()}
        without = frozenset[str]().union(*(each.without for each in found))
        return SecondMoments(by_key, found[0].decay if found else 0.0, without)

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
    """An optimizer of masters, each copied to its parameter while the next one is updated.

    For masters in host memory, and for masters that are averages. Parameters are on the device, or on the host with
    model.offload.
    """

    def __init__(self, spec: OptimizerSpec, weights: Sequence[Weight], config: OptimConfig, streams: Streams) -> None:
        super().__init__(spec, weights, [weight._replace(param=weight.master) for weight in weights], config)
        self._streams = streams

    def _step_weight(self, weight: Weight, step: int, how: LocalStep) -> None:
        self._optimizers[weight.key].step(step, how)
        self._set_param(weight)

    @torch.no_grad()
    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        """Load a copy of what `state_of` returned for a weight of the same key, and set its parameter."""
        super().load_state_of(weight, state)
        self._set_param(weight)

    def _set_param(self, weight: Weight) -> None:
        """Set the parameter of a weight, which may lie in host memory, too."""
        param, device = weight.param.detach(), weight.master.device
        if weight.param is weight.master:
            return
        if param.device == device:
            self.copy_trained(weight, param)
            return
        self.copy_trained(weight, rounded := torch.empty_like(param, device=device))
        param.copy_(self._streams.load(rounded))


class RoundedOptimizer(PerWeightOptimizer):
    """An optimizer of bf16 weights without masters: steps an fp32 copy of each, and rounds that stochastically.

    The copy exists during the step of its weight. Equal weights with equal gradients are rounded alike on all ranks,
    on all devices, and if replicas own parts of them.
    """

    def __init__(self, spec: OptimizerSpec, weights: Sequence[Weight], config: OptimConfig) -> None:
        masters = [nn.Parameter(_without_values(weight.param)) for weight in weights]
        pairs = zip(weights, masters, strict=True)
        super().__init__(spec, weights, [each._replace(param=master, master=master) for each, master in pairs], config)
        self._largest = max((weight.param.numel() for weight in weights), default=0)
        self._device = weights[0].param.device if weights else None

    def step(self, step: int, how: LocalStep = PLAIN_STEP) -> None:
        """Update parameters of step `step`, counted from 0, with their gradients."""
        self._copy = torch.empty(self._largest, device=self._device)  # for all: on a CPU, new memory takes longer
        super().step(step, how)
        del self._copy

    def _step_weight(self, weight: Weight, step: int, how: LocalStep) -> None:
        master, values = self._stand_ins[weight.key].master, weight.param.detach()
        master.data = self._copy[: values.numel()].view(values.shape).copy_(values)
        master.grad = weight.param.grad
        self._optimizers[weight.key].step(step, how)
        round_stochastically(master.detach(), random_bits(weight, step), out=values)
        master.data, master.grad = _without_values(values), None

    def copy_trained(self, weight: Weight, out: Tensor) -> None:
        """Copy the values of the parameter."""
        out.copy_(weight.param.detach())


def _without_values(weight: Tensor) -> Tensor:
    """Return an fp32 tensor of the shape and device of a weight that takes no memory."""
    return torch.zeros((), device=weight.device).expand(weight.shape)


def open_optimizer(spec: OptimizerSpec, weights: Sequence[Weight], config: OptimConfig, streams: Streams) -> Optimizer:
    """Return the optimizer of some weights, with masters as optim.offload and optim.masters say."""
    if config.offload == "cpu" or spec.averages:
        return CopyingOptimizer(spec, weights, config, streams)
    return RoundedOptimizer(spec, weights, config) if config.masters == "none" else spec.open(weights, config)
