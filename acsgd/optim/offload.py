"""Masters, gradients and optimizer state in host memory; on the device are the parameters alone (optim.offload=cpu).

Gradients travel to the host behind the backward, and each weight to the device behind the update of the next one, as in
ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.config.options import OptimConfig
from acsgd.optim.base import PLAIN_STEP, LocalStep, Optimizer, OptimizerSpec, SecondMoments
from acsgd.shards.weights import Weight, WeightState
from acsgd.streams import StreamEvent, Streams

MAX_IN_FLIGHT = 16
"""Gradients on their way to the host, after which the oldest is waited for: about those of two blocks."""
CAST_AT_ONCE = 1 << 18
"""Numbers that each thread of a CPU casts to fp32 at once."""


class _Pending(NamedTuple):
    """A gradient that is copied to the host."""

    buffer: Tensor
    copied: StreamEvent
    weight: Weight
    then: Callable[[], None]


class GradientOffload:
    """Adds the gradients of parameters on the device to those of their masters in host memory, behind the backward."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pending = deque[_Pending]()
        self._free: dict[int, list[Tensor]] = {}
        """Host buffers that are not in use, by size, bytes."""

    def start(self, weight: Weight, then: Callable[[], None]) -> None:
        """Take the gradient of a parameter, and start to copy it to the host.

        then: called in this order once the gradient is added to the master's, at the latest in `finish`.
        """
        grad, weight.param.grad = weight.param.grad, None
        assert grad is not None
        buffer = self._buffer(grad)
        with self._streams.side_stream(grad):
            buffer.copy_(grad, non_blocking=True)
            copied = self._streams.record_event()
        self._pending.append(_Pending(buffer, copied, weight, then))
        while len(self._pending) > MAX_IN_FLIGHT or (self._pending and self._pending[0].copied.query()):
            self._finish_oldest()

    def finish(self) -> None:
        """Wait until all gradients are added."""
        while self._pending:
            self._finish_oldest()

    def clear(self) -> None:
        """Forget the gradients that are not added yet."""
        self._pending.clear()

    def _buffer(self, grad: Tensor) -> Tensor:
        """Return a host buffer for a gradient, of its shape and dtype."""
        free = self._free.get(grad.nbytes)
        raw = free.pop() if free else self._streams.host_buffer(grad.nbytes)
        return raw.view(grad.dtype).view(grad.shape)

    @torch.no_grad()
    def _finish_oldest(self) -> None:
        buffer, copied, weight, then = self._pending.popleft()
        if not copied.query():
            copied.synchronize()
        master = weight.master
        if master.grad is None:
            master.grad = buffer.to(master.dtype, copy=True)
        else:
            add_in_fp32(master.grad, buffer)
        self._free.setdefault(buffer.nbytes, []).append(buffer.view(-1).view(torch.uint8))
        then()


def add_in_fp32(total: Tensor, part: Tensor) -> None:
    """Add a tensor to an fp32 one of its shape, in place.

    On a CPU, contiguous ones in parts whose fp32 values stay in a cache: torch casts a whole tensor to new memory
    before it adds it.
    """
    if part.device.type != "cpu" or not (total.is_contiguous() and part.is_contiguous()):
        total += part
        return
    length = CAST_AT_ONCE * torch.get_num_threads()
    for sums, values in zip(total.view(-1).split(length), part.view(-1).split(length), strict=True):
        sums += values.float()


class OffloadedOptimizer:
    """An optimizer in host memory, of weights whose parameters are on the device, or on the host with model.offload.

    Updates one weight after the other, each copied to its parameter while the next one is updated.
    """

    def __init__(self, spec: OptimizerSpec, weights: Sequence[Weight], config: OptimConfig, streams: Streams) -> None:
        self._weights = tuple(weights)
        self._streams = streams
        self._optimizers: Mapping[str, Optimizer] = {
            weight.key: spec.open([weight._replace(param=weight.master)], config) for weight in weights
        }

    @torch.no_grad()
    def step(self, step: int, how: LocalStep = PLAIN_STEP) -> None:
        """Update masters and parameters of step `step`, counted from 0, with the gradients of the masters."""
        stateless = self._stateless() if how.frozen else set[str]()
        for weight in self._weights:
            if weight.master.grad is None or weight.key in stateless:
                continue
            self._optimizers[weight.key].step(step, how)
            self._round(weight)

    def _round(self, weight: Weight) -> None:
        """Copy a master to its parameter, which may lie in host memory, too."""
        master, param = weight.master.detach(), weight.param
        if param is not weight.master:
            param.copy_(master if param.device == master.device else self._streams.load(master.to(param.dtype)))

    def _stateless(self) -> set[str]:
        """Return the weights that have had no step, if others have: a step with frozen second moments omits them."""
        keys = {weight.key for weight in self._weights if not self.state_of([weight])}
        return keys if len(keys) < len(self._weights) else set()

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return the second moments of some weights, not copied; none without the capability "second_moments"."""
        owned = [weight for weight in weights if weight.key in self._optimizers]
        found = [self._optimizers[weight.key].second_moments([weight]) for weight in owned]
        by_key = {key: moment for each in found for key, moment in each.by_key.items()}
        return SecondMoments(by_key, found[0].decay if found else 0.0)

    def state_of(self, weights: Sequence[Weight]) -> WeightState:
        """Return the state of some weights, not copied; empty before the first step."""
        state: WeightState = {}
        for weight in weights:
            for name, by_key in self._optimizers[weight.key].state_of([weight]).items():
                state.setdefault(name, {}).update(by_key)
        return state

    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        """Load a copy of what `state_of` returned for a weight of the same key."""
        self._optimizers[weight.key].load_state_of(weight, state)


def open_optimizer(spec: OptimizerSpec, weights: Sequence[Weight], config: OptimConfig, streams: Streams) -> Optimizer:
    """Return the optimizer of some weights, whose masters are in host memory with optim.offload=cpu."""
    return OffloadedOptimizer(spec, weights, config, streams) if config.offload == "cpu" else spec.open(weights, config)
