"""Gradients of weights whose masters are in host memory (optim.offload=cpu).

They travel to the host behind the backward, as in ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.shards.weights import Weight
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
