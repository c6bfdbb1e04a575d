"""Launches the fused CUDA kernels of kernels.cu: one pass over memory each, once the scales are known.

The torch operations of fixpoint.py say what they compute, and compute it where there is no CUDA device or no CuPy.
"""

from __future__ import annotations

import functools
import importlib
import logging
from importlib import resources
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from acsgd.codecs.bits import packed_bytes, stream_of
from acsgd.codecs.layout import Layout
from acsgd.codecs.scales import divisor

log = logging.getLogger(__name__)

THREADS = 256
"""Of a block."""
MAX_WIDTH = 1 << 26
"""Elements of a row; then no launch, of whole rows, gets 2**30 elements, and the kernels count them in 32 bits."""
_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16", None: "None"}


class Launch(Protocol):
    """Runs a kernel on the current stream of a device.

    kernel: a C++ name such as "encode<4, Half>"; arguments: addresses and numbers, all of 64 bits.
    """

    def __call__(self, device: torch.device, kernel: str, blocks: int, arguments: tuple[int, ...]) -> None: ...


def kernels_for(layout: Layout, device: torch.device, *dtypes: torch.dtype) -> Kernels | None:
    """Return the kernels, if they can work on tensors of this layout, device and dtypes."""
    if device.type != "cuda" or layout.width > MAX_WIDTH or not _TYPES.keys() >= set(dtypes):
        return None
    return Kernels(_launch) if _cupy() else None


class Levels(NamedTuple):
    """What the codes of a tensor [numel] stand for."""

    bits: int
    layout: Layout
    steps: Tensor
    """Distances between levels, fp32[scales]."""
    inwards: Tensor | None = None
    """By how many steps what a code decodes to is nearer to 0 than its level, fp32[1]; None = not at all."""


class Kernels:
    """The kernels, on flat tensors [numel] of fp32, bf16 or fp16. m: a memory [numel], contiguous, of fp32 or fp16."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def encode(self, x: Tensor, levels: Levels, m: Tensor | None = None) -> Tensor:
        """Return the bit stream of x; or that of x - m, and add to `m`, in place, what it stands for."""
        stream = torch.empty(packed_bytes(x.numel(), levels.bits), dtype=torch.uint8, device=x.device)
        kernel = f"encode<{levels.bits}, {_type(x.dtype)}, {_type(m)}>"
        self._run(kernel, 8, (x.contiguous(), m), stream, levels._replace(steps=divisor(levels.steps)))
        return stream

    def decode(self, stream: Tensor, levels: Levels, dtype: torch.dtype, m: Tensor | None = None) -> Tensor:
        """Return what a bit stream stands for; or add it to `m`, in place, and return the sum before it is rounded."""
        y = torch.empty(levels.layout.numel, dtype=dtype, device=stream.device)
        widest = max(dtype.itemsize, m.itemsize if m is not None else 0)
        kernel = f"decode<{levels.bits}, {_type(m)}, {_type(dtype)}>"
        self._run(kernel, 16 // widest, (m, y), stream, levels)
        return y

    def _run(
        self, kernel: str, per_thread: int, tensors: tuple[Tensor | None, ...], stream: Tensor, levels: Levels
    ) -> None:
        """Launch a kernel on one block of whole rows after another; per_thread: elements."""
        bits, layout, steps, inwards = levels
        for block in layout.blocks(stream.device):
            numel = block.stop - block.start
            parts = [None if whole is None else whole[block] for whole in tensors]
            parts += [stream_of(stream, block.start, numel, bits), layout.beside(steps, block)]
            arguments = (*map(_address, parts), numel, *_walk(layout, numel), _address(inwards))
            self._launch(stream.device, kernel, -(-numel // (per_thread * THREADS)), arguments)


def _type(of: torch.dtype | Tensor | None) -> str:
    """Return the name in kernels.cu."""
    return _TYPES[of.dtype if isinstance(of, Tensor) else of]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _walk(layout: Layout, numel: int) -> tuple[int, int, int]:
    """Return width, 2**62 / width rounded up, by which the kernels divide, and whether scales belong to columns."""
    one_scale = layout.by_column and layout.width == 1
    width = numel if one_scale else layout.width
    return width, -(-(1 << 62) // width), int(layout.by_column and not one_scale)


def _launch(device: torch.device, kernel: str, blocks: int, arguments: tuple[int, ...]) -> None:
    cuda = _cupy().cuda
    with cuda.Device(device.index), cuda.Stream.from_external(torch.cuda.current_stream(device)):
        _compiled(kernel)((blocks,), (THREADS,), arguments)


@functools.cache
def _compiled(kernel: str) -> Any:
    """Return a kernel, which CuPy compiles for each device that it meets, and keeps on disk."""
    options = ("-std=c++17", f"-DTHREADS={THREADS}")
    module = _cupy().RawModule(code=source(), options=options, name_expressions=(kernel,))
    return module.get_function(kernel)


def source() -> str:
    """Return the text of kernels.cu."""
    return resources.files(__package__).joinpath("kernels.cu").read_text()


@functools.cache
def _cupy() -> Any:
    """Return CuPy, or None, and say so once."""
    try:
        cupy = importlib.import_module("cupy")
        _ = cupy.cuda.Stream.from_external  # CuPy 14 or later
    except (ImportError, AttributeError) as error:
        log.warning(
            "codecs take separate torch operations on this GPU, as there is no CuPy >= 14 (%s); for fused "
            "kernels: pip install 'acsgd[cuda]'",
            error,
        )
        return None
    return cupy
