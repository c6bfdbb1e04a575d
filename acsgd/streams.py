"""Ordering of work on a device; the only file of the core that names torch.cuda.

On the CPU everything has happened when its function returns, so every mark is ready and there is no side
stream. The callers read the same on both.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the order of work on a device."""

    def ready(self) -> bool:
        """Whether all work before the mark is done."""
        ...

    def wait(self) -> None:
        """Block this process until all work before the mark is done."""
        ...


class Streams:
    """The CPU: work is done when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_buffer(self, nbytes: int) -> Tensor:
        """Return uint8[nbytes] in host memory that the device can copy to and from without waiting."""
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextlib.contextmanager
    def beside(self, *inputs: Tensor) -> Iterator[None]:
        """Run the body beside the main stream, after all that made `inputs` (device tensors)."""
        yield

    def mark(self) -> Mark:
        """Mark the present point of the current stream."""
        return DONE

    def peak_memory_bytes(self) -> int:
        """Largest memory this process has held: resident on the CPU, allocated by torch on a GPU."""
        return _peak_resident_bytes()


class CudaStreams(Streams):
    """One GPU with one side stream, on which codecs run and messages leave."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)
        self._side = torch.cuda.Stream(device)

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextlib.contextmanager
    def beside(self, *inputs: Tensor) -> Iterator[None]:
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in inputs:
            tensor.record_stream(self._side)  # or the allocator reuses its memory too early
        with torch.cuda.stream(self._side):
            yield

    def mark(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self.device))

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


def open_streams(device: str, local_rank: int) -> Streams:
    """Return the streams of this rank's device.

    device: "cpu", "cuda", or "auto" for a GPU per local rank where there is one. Raises ValueError.
    """
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if local_rank < gpus:
        return CudaStreams(torch.device("cuda", local_rank))
    if device == "cuda" or gpus:
        raise ValueError(
            f"run.device={device}: local rank {local_rank} has no GPU of its own, this host has {gpus}; "
            f"launch {gpus} processes here (torchrun --nproc-per-node {gpus}), or use --run.device cpu"
        )
    return Streams(torch.device("cpu"))


def available_memory_bytes() -> int | None:
    """Return how much memory of this host a program may still take; None where the system does not tell."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where ru_maxrss starts at the size of the process that forked this one
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Done:
    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def ready(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


DONE = _Done()
