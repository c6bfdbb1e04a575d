"""A replica that joins others which exchange updates: it follows the global weights until it takes part.

It receives what the others exchange, and sends nothing. Its weights are the global ones. While the state of a layer is
on its way, it keeps the updates since the step after which the layer was copied. Once the layer has arrived, it applies
them, by the code by which the others have applied them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from acsgd.dp.exchange.local_weights import LocalWeightsSync
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync
from acsgd.optim.base import PLAIN_STEP, LocalStep, Optimizer, SecondMoments
from acsgd.optim.replay import Recording, ReplayOptimizer
from acsgd.shards.weights import Weight, WeightState


class FollowingOptimizer(ReplayOptimizer):
    """An optimizer that makes no local steps while its replica is an observer, and the queue of that replica's updates.

    weights: all that it steps. exact_steps: number of initial steps that use exact all-reduce.
    """

    def __init__(self, optimizer: Optimizer, weights: Sequence[Weight], peers: Peers, exact_steps: int) -> None:
        super().__init__(optimizer, lambda _: optimizer)
        self._weights = weights
        self._peers = peers
        self._exact_steps = exact_steps
        self._waiting = deque[tuple[Callable[[], None], int] | Recording]()
        """The layers that are on their way, and the updates after they were copied, with their size in bytes."""

    @property
    def followed(self) -> Optimizer:
        """The optimizer of its replica once this is no observer."""
        return self._optimizer

    @property
    def nbytes(self) -> int:
        return sum(each[1] for each in self._waiting if not isinstance(each, Recording))

    def step(self, step: int, how: LocalStep = PLAIN_STEP) -> None:
        if not self._peers.is_observer:
            self._optimizer.step(step, how)
        elif step < self._exact_steps:
            grads = [None if weight.master.grad is None else weight.master.grad.clone() for weight in self._weights]
            self.follow(partial(self._exact_step, step, how, grads), grads)

    def follow(self, apply: Callable[[], None], received: object) -> None:
        """Apply an update, once the layers on their way have arrived. received: its tensors."""
        if self._waiting:
            self._waiting.append((apply, _nbytes(received)))
        else:
            apply()

    def record(self, weights: Sequence[Weight]) -> Recording:
        recording = Recording(weights)
        self._waiting.append(recording)
        return recording

    def discard(self, recording: Recording) -> None:
        self._waiting.remove(recording)
        if not any(isinstance(each, Recording) for each in self._waiting):
            self._waiting.clear()

    def replay(self, recording: Recording) -> None:
        """Apply the updates up to the copy of the next layer. The layer of `recording` is the first on its way."""
        layer = self._waiting.popleft()
        assert layer is recording
        while self._waiting and not isinstance(first := self._waiting[0], Recording):
            self._waiting.popleft()
            first[0]()

    def _exact_step(self, step: int, how: LocalStep, grads: Sequence[Tensor | None]) -> None:
        for weight, grad in zip(self._weights, grads, strict=True):
            weight.master.grad = grad
        self._optimizer.step(step, how)


class FollowingSync(GradSync):
    """Sync of an observer. optimizer: of its rank; weights: of the stage."""

    def __init__(self, sync: LocalWeightsSync, optimizer: FollowingOptimizer, weights: Sequence[Weight]) -> None:
        super().__init__()
        self._sync = sync
        self._optimizer = optimizer
        self._weights = weights
        self.meter = sync.meter

    def local_step(self, step: int) -> LocalStep | None:
        return self._sync.local_step(step)

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        self._sync.begin_step(step, scale)

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        self._sync.grad_ready(weight, is_final=is_final)

    def reduce(self) -> None:
        self._sync.reduce()

    def wait(self) -> None:
        self._sync.wait()

    def commit(self) -> None:
        self._follow(self._sync.commit)

    def exchanges_after(self, step: int) -> bool:
        return self._sync.exchanges_after(step)

    def exchanges_without_update(self, step: int) -> bool:
        return self._sync.exchanges_without_update(step)

    def exchange(self, step: int, moments: SecondMoments) -> None:
        self._sync.exchange(step, moments)

    def after_step(self, step: int, moments: SecondMoments) -> None:
        # moments: those of the time at which it is applied
        self._follow(lambda: self._sync.after_step(step, self._optimizer.second_moments(self._weights)))

    def global_weights(self) -> Mapping[str, Tensor] | None:
        return self._sync.global_weights()

    def state_dict(self) -> WeightState:
        return self._sync.state_dict()

    def take_state(self) -> WeightState:
        return self._sync.take_state()

    def load_layer(self, weights: Sequence[Weight], common: WeightState) -> None:
        self._sync.load_layer(weights, common)

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Restore what the replicas that saved have in common."""
        self._sync.load_common(saved)

    def _follow(self, apply: Callable[[], None]) -> None:
        sync = self._sync
        received, measured = sync.received, sync.measured
        sync.received, sync.measured = [], None

        def update() -> None:
            sync.received, sync.measured = received, measured
            apply()
            sync.load_global()

        self._optimizer.follow(update, [received, measured])


def _nbytes(received: Any) -> int:
    """Return the size of the tensors in nested sequences, bytes."""
    if isinstance(received, Tensor):
        return received.nbytes
    return sum(map(_nbytes, received)) if isinstance(received, list | tuple) else 0
