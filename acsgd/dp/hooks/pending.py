"""DDP buckets whose exchange is pending, and the streams that exchanges run in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class SideStream:
    """Stream of the peers' thread on one device; the CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self.devices: list[int | str | torch.device] | None = None if device.type == "cpu" else [device]
        """Devices of a future's value, for torch.futures.Future."""

    def mark(self) -> torch.Event | None:
        """Record an event in the current stream of the caller; None on the CPU."""
        if self._stream is None:
            return None
        return torch.accelerator.current_stream(self._stream.device).record_event()

    @contextlib.contextmanager
    def after(self, events: Iterable[torch.Event | None]) -> Iterator[None]:
        """Run the body in this stream, after some events."""
        if self._stream is None:
            yield
            return
        with self._stream:
            for event in events:
                if event is not None:
                    self._stream.wait_event(event)
            yield


class PendingBucket:
    """A DDP bucket whose gradients wait for their exchange."""

    def __init__(self, bucket: dist.GradBucket, stream: SideStream) -> None:
        self._buffer = bucket.buffer()
        self._missing = len(bucket.parameters())
        self._failure: Exception | None = None
        self.ready = stream.mark()
        """Event after the computation of the gradients."""
        self._done: Future[Tensor] = Future(devices=stream.devices)
        self.future: Future[Tensor] = self._done.then(self._result)

    def count_down(self, failure: Exception | None) -> None:
        """Count one of the parameters as exchanged, or as failed."""
        self._missing -= 1
        self._failure = failure
        if not self._missing:
            self._done.set_result(self._buffer)

    def _result(self, done: Future[Tensor]) -> Tensor:
        if self._failure is not None:  # reaches backward as a RuntimeError with the same text
            raise self._failure
        return done.value()
