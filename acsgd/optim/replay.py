"""Repeat optimizer steps on weights whose state arrives later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from acsgd.optim.base import PLAIN_STEP, LocalStep, Optimizer, SecondMoments
from acsgd.shards.weights import Weight, WeightState


class _RecordedStep(NamedTuple):
    step: int
    how: LocalStep
    grads: Mapping[str, Tensor]
    """By the key of the weight, in host memory."""


class Recording:
    """The gradients of some weights in the steps since `ReplayOptimizer.record`."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = weights
        self.steps: list[_RecordedStep] = []

    @property
    def nbytes(self) -> int:
        """Size of the gradients, bytes."""
        return sum(grad.nbytes for step in self.steps for grad in step.grads.values())


class ReplayOptimizer:
    """An optimizer that also records the gradients of some weights, to repeat their steps from another state.

    open_optimizer: returns a new optimizer, of the same kind, of some weights.
    """

    def __init__(self, optimizer: Optimizer, open_optimizer: Callable[[Sequence[Weight]], Optimizer]) -> None:
        self._optimizer = optimizer
        self._open = open_optimizer
        self._recordings: list[Recording] = []

    @property
    def nbytes(self) -> int:
        """Size of all that is recorded, bytes."""
        return sum(recording.nbytes for recording in self._recordings)

    def step(self, step: int, how: LocalStep = PLAIN_STEP) -> None:
        for recording in self._recordings:
            masters = {weight.key: weight.master for weight in recording.weights}
            grads = {key: x.grad.to("cpu", copy=True) for key, x in masters.items() if x.grad is not None}
            recording.steps.append(_RecordedStep(step, how, grads))
        self._optimizer.step(step, how)

    def copy_trained(self, weight: Weight, out: Tensor) -> None:
        self._optimizer.copy_trained(weight, out)

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        return self._optimizer.second_moments(weights)

    def state_of(self, weights: Sequence[Weight]) -> WeightState:
        return self._optimizer.state_of(weights)

    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        self._optimizer.load_state_of(weight, state)

    def record(self, weights: Sequence[Weight]) -> Recording:
        """Record the gradients of some weights from the next step on, until `replay` or `discard`."""
        recording = Recording(weights)
        self._recordings.append(recording)
        return recording

    def discard(self, recording: Recording) -> None:
        """End a recording."""
        self._recordings.remove(recording)

    def replay(self, recording: Recording) -> None:
        """Repeat the recorded steps on the present state of their weights, in place, and end the recording."""
        self.discard(recording)
        weights = recording.weights
        optimizer, state = self._open(weights), self.state_of(weights)
        grads = [weight.master.grad for weight in weights]
        for weight in weights:
            optimizer.load_state_of(weight, state)
        for step in recording.steps:
            for weight in weights:
                grad = step.grads.get(weight.key)
                weight.master.grad = None if grad is None else grad.to(weight.master.device)
            optimizer.step(step.step, step.how)
        for weight, grad in zip(weights, grads, strict=True):
            weight.master.grad = grad
            self.load_state_of(weight, optimizer.state_of([weight]))
