"""CUDA streams and events, and the seeds of random generators; training names torch.cuda only here and in codecs."""

from __future__ import annotations

import contextlib
import hashlib
import re
import resource
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from acsgd.host_memory import host_memory


class StreamEvent(Protocol):
    """A point in the work of a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether all work before the event is done."""
        ...

    def synchronize(self) -> None:
        """Block this thread until all work before the event is done."""
        ...


LOGITS_AT_ONCE = 2**25
"""Logits that a CPU computes at a time for the loss: 128 MiB in fp32."""

PEAK_TFLOPS = {
    "H200": (989.0, 67.0),
    "H100 80GB HBM3": (989.0, 67.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "B200": (2250.0, 75.0),
    "A100": (312.0, 19.5),
    "A100 80GB PCIe": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "GeForce RTX 4090": (165.2, 82.6),
    "GeForce RTX 3090": (71.0, 35.6),
}
"""By the name of a GPU after "NVIDIA ": peak rates of dense matrix products in bf16 and fp16,
and in fp32 without TF32, which torch does not use by default, TFLOP/s; from NVIDIA's data sheets."""

PEAK_TB_PER_S = {
    "H200": 4.8,
    "H100 80GB HBM3": 3.35,
    "H100 NVL": 3.9,
    "H100 PCIe": 2.0,
    "B200": 8.0,
    "A100": 1.555,
    "A100 80GB PCIe": 1.935,
    "L40S": 0.864,
    "L4": 0.3,
    "GeForce RTX 4090": 1.008,
    "GeForce RTX 3090": 0.936,
}
"""By the same names: peak rates of the memory, from the same data sheets."""


class Streams:
    """Streams of the CPU, which has none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def gpu(self) -> str:
        """Identity of the GPU, different from those of all others of the host; empty = the CPU."""
        return ""

    def nccl_version(self) -> str:
        """Return the version of NCCL; empty without a GPU."""
        return ""

    @property
    def logits_at_once(self) -> int:
        """Logits that the last stage computes at a time: more on a GPU, where each chunk costs launches of kernels."""
        return LOGITS_AT_ONCE if self.device.type == "cpu" else 4 * LOGITS_AT_ONCE

    def host_buffer(self, nbytes: int) -> Tensor:
        """Return uint8[nbytes] in host memory, pinned if the device is a GPU."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def load(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device. The host does not wait for the copy, and may change the tensor."""
        return load_onto(self.device, tensor)

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """Wait for the device once, and return scalars of it. Those of the host are copied on the way."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        numbers: list[float] = torch.stack([zero + value for value in values]).cpu().tolist()
        return numbers

    @contextlib.contextmanager
    def side_stream(self, *inputs: Tensor) -> Iterator[None]:
        """Run the body on the side stream, after all work on the current stream. inputs: tensors it reads."""
        yield

    def record_event(self) -> StreamEvent:
        """Record an event on the current stream."""
        return DONE

    def wait_for(self, event: StreamEvent) -> None:
        """Let later work on the current stream wait for an event. The host does not wait."""

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Return the peak rate of dense matrix products, floating-point operations per second; 0 = unknown."""
        return 0.0

    def memory_bytes(self) -> int:
        """Return the memory of the device, free or not: what `host_memory` gives, with swap, or that of the GPU."""
        memory = host_memory()
        return memory.total + memory.swap

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of this process: resident on the CPU, allocated by torch on a GPU."""
        return _peak_resident_bytes()


class CudaStreams(Streams):
    """The current stream of one GPU, and a side stream on which codecs run and messages are copied to the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)
        self._side = torch.cuda.Stream(device)

    @property
    def gpu(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def nccl_version(self) -> str:
        return ".".join(map(str, torch.cuda.nccl.version())) if hasattr(torch._C, "_nccl_version") else ""

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextlib.contextmanager
    def side_stream(self, *inputs: Tensor) -> Iterator[None]:
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in inputs:
            if tensor.device == self.device:  # the allocator must not reuse its memory before the side stream is done
                tensor.record_stream(self._side)
        with torch.cuda.stream(self._side):
            yield

    def peak_flops(self, dtype: torch.dtype) -> float:
        return peak_of_gpu(torch.cuda.get_device_name(self.device), dtype)

    def memory_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory

    def record_event(self) -> StreamEvent:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_for(self, event: StreamEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(event)

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


def load_onto(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor on a device.

    A copy from host to device does not block, and the source may change at once. A copy to the host blocks.
    """
    if tensor.device.type == "cpu" and device.type not in ("cpu", "meta"):
        tensor = tensor.pin_memory()  # a copy, which torch keeps until the device has read it
    return tensor.to(device, non_blocking=device.type != "cpu")


def peak_of_gpu(name: str, dtype: torch.dtype) -> float:
    """Return the peak rate of a GPU for dense matrix products, floating-point operations per second; 0 = unknown."""
    model = name.removeprefix("NVIDIA ")
    if board := re.fullmatch(r"(A100)-(SXM4|PCIE)-\d+GB", model):  # a part of a GPU (MIG, vGPU) has a longer name
        model = board[1]
    peaks = PEAK_TFLOPS.get(model, (0.0, 0.0))
    return peaks[dtype == torch.float32] * 1e12


def seed_generators(seed: int) -> None:
    """Seed torch's global generators, as torch.manual_seed does, on the CPU and on the GPUs in use.

    In a process that uses no GPU, torch.manual_seed formats and keeps several stack traces per call.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def generator_states() -> list[Tensor]:
    """Return the states of torch's global generators on the CPU and on the GPUs in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def restore_generators(states: Sequence[Tensor]) -> None:
    """Restore the states that `generator_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def open_streams(device: str, local_rank: int) -> Streams:
    """Return the streams of this rank's device.

    device: "cpu", "cuda", or "auto" for one GPU per local rank where there are GPUs, else the CPU. Raises ValueError.
    """
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if local_rank < gpus:
        return CudaStreams(torch.device("cuda", local_rank))
    if device == "cuda" and not gpus:
        raise ValueError(
            "run.device=cuda: torch finds no GPU on this host; acsgd doctor prints why; use --run.device cpu"
        )
    if gpus:
        raise ValueError(
            f"run.device={device}: local rank {local_rank} has no GPU of its own, this host has {gpus}; "
            f"launch {gpus} processes here (torchrun --nproc-per-node {gpus}), or use --run.device cpu"
        )
    return Streams(torch.device("cpu"))


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where ru_maxrss of a forked process starts at its parent's peak; psutil has no peak
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


DONE = _Done()
"""The event of work that is done."""


def mix_seed(*parts: int) -> int:
    """Hash integers to a 63-bit seed, so that similar arguments give independent random streams."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
