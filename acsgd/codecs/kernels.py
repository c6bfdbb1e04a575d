"""Launches of the fused CUDA kernels in kernels.cu, each of which takes one pass over memory once scales are known.

They compute the same as the torch operations in fixpoint.py, which are used without a CUDA device or without CuPy.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from importlib import resources
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from acsgd.codecs.bits import packed_bytes, stream_slice
from acsgd.codecs.layout import ScaleLayout
from acsgd.codecs.scales import as_divisors

log = logging.getLogger(__name__)

THREADS = 256
"""Threads per block."""
LAUNCH = 1 << 26
"""Elements per launch. Kernels need no memory besides their results, so only 32-bit indices limit it."""
MAX_WIDTH = 1 << 26
"""Largest row, elements: a launch, of whole rows, then has less than 2**30 elements, which 32-bit indices can count."""
_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16", None: "None"}


class KernelLaunch(Protocol):
    """Function that runs a kernel on the current stream of a device.

    kernel: C++ name, such as "encode<4, Half, None>"; arguments: addresses and numbers, all of 64 bits.
    """

    def __call__(self, device: torch.device, kernel: str, blocks: int, arguments: tuple[int, ...]) -> None: ...


def kernels_for(layout: ScaleLayout, device: torch.device, *dtypes: torch.dtype) -> Kernels | None:
    """Return the kernels if they support tensors of this layout, device and dtypes, else None."""
    if device.type != "cuda" or layout.width > MAX_WIDTH or not _TYPES.keys() >= set(dtypes):
        return None
    return Kernels(_launch) if _cupy() else None


class UniformQuantization(NamedTuple):
    """Uniform quantization of a tensor [numel]."""

    bits: int
    layout: ScaleLayout
    steps: Tensor
    """Quantization steps, fp32[scales]."""
    shift: Tensor | None = None
    """Shift of decoded values from their levels towards 0 (centroids), steps, fp32[1]; None = 0."""


class Kernels:
    """The kernels, for flat tensors [numel] of fp32, bf16 or fp16.

    entry: Cache entry [numel], contiguous, fp32, bf16 or fp16.
    """

    def __init__(self, launch: KernelLaunch) -> None:
        self._launch = launch

    def encode(self, x: Tensor, quantization: UniformQuantization, entry: Tensor | None = None) -> Tensor:
        """Return the bit stream of x. With `entry`, that of x - entry, whose decoded value is added to it in place."""
        stream = torch.empty(packed_bytes(x.numel(), quantization.bits), dtype=torch.uint8, device=x.device)
        kernel = f"encode<{quantization.bits}, {_type(x.dtype)}, {_type(entry)}>"
        by_divisors = quantization._replace(steps=as_divisors(quantization.steps))
        self._run(kernel, 8, (x.contiguous(), entry), stream, by_divisors)
        return stream

    def decode(
        self, stream: Tensor, quantization: UniformQuantization, dtype: torch.dtype, entry: Tensor | None = None
    ) -> Tensor:
        """Return the decoded bit stream. With `entry`, add it in place, and return the sum before it is rounded."""
        y = torch.empty(quantization.layout.numel, dtype=dtype, device=stream.device)
        widest = max(dtype.itemsize, entry.itemsize if entry is not None else 0)
        kernel = f"decode<{quantization.bits}, {_type(entry)}, {_type(dtype)}>"
        self._run(kernel, 16 // widest, (entry, y), stream, quantization)
        return y

    def decoded_blocks(self, stream: Tensor, quantization: UniformQuantization) -> Iterator[tuple[slice, Tensor]]:
        """Yield the decoded bit stream, fp32, in blocks; see `BlockDecoder`."""
        for block in quantization.layout.blocks(stream):
            yield block, self._decode_block(stream, quantization, block)  # not kept here while it is used

    def _decode_block(self, stream: Tensor, quantization: UniformQuantization, block: slice) -> Tensor:
        y = torch.empty(block.stop - block.start, dtype=torch.float32, device=stream.device)
        kernel = f"decode<{quantization.bits}, None, float>"
        self._run_block(kernel, 4, (None, y), stream, quantization, block)
        return y

    def _run(
        self,
        kernel: str,
        per_thread: int,
        tensors: tuple[Tensor | None, ...],
        stream: Tensor,
        quantization: UniformQuantization,
    ) -> None:
        """Launch a kernel for each `LAUNCH` elements, in whole rows. per_thread: Elements per thread."""
        for block in quantization.layout.split(LAUNCH):
            parts = tuple(None if whole is None else whole[block] for whole in tensors)
            self._run_block(kernel, per_thread, parts, stream, quantization, block)

    def _run_block(
        self,
        kernel: str,
        per_thread: int,
        parts: tuple[Tensor | None, ...],
        stream: Tensor,
        quantization: UniformQuantization,
        block: slice,
    ) -> None:
        """Launch a kernel for a block. parts: those of the tensors that are in it."""
        bits, layout, steps, shift = quantization
        numel = block.stop - block.start
        coded, scales = stream_slice(stream, block.start, numel, bits), layout.scales_of(steps, block)
        arguments = (*map(_address, (*parts, coded, scales)), numel, *_indexing(layout, numel), _address(shift))
        self._launch(stream.device, kernel, -(-numel // (per_thread * THREADS)), arguments)


def _type(of: torch.dtype | Tensor | None) -> str:
    """Return the name of a dtype in kernels.cu."""
    return _TYPES[of.dtype if isinstance(of, Tensor) else of]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _indexing(layout: ScaleLayout, numel: int) -> tuple[int, int, int]:
    """Return the width, 2**62 / width rounded up (for division by it), and whether scales belong to columns."""
    one_scale = layout.by_column and layout.width == 1
    width = numel if one_scale else layout.width
    return width, -(-(1 << 62) // width), int(layout.by_column and not one_scale)


def _launch(device: torch.device, kernel: str, blocks: int, arguments: tuple[int, ...]) -> None:
    cuda = _cupy().cuda
    with cuda.Device(device.index), cuda.Stream.from_external(torch.cuda.current_stream(device)):
        _compiled(kernel)((blocks,), (THREADS,), arguments)


@functools.cache
def _compiled(kernel: str) -> Any:
    """Return a kernel. CuPy compiles it for each kind of device at first use, and caches it on disk."""
    options = ("-std=c++17", f"-DTHREADS={THREADS}")
    module = _cupy().RawModule(code=source(), options=options, name_expressions=(kernel,))
    return module.get_function(kernel)


def source() -> str:
    """Return the text of kernels.cu."""
    return resources.files(__package__).joinpath("kernels.cu").read_text()


@functools.cache
def _cupy() -> Any:
    """Return CuPy, or None if it is not installed, with one warning."""
    try:
        cupy = importlib.import_module("cupy")
        _ = cupy.cuda.Stream.from_external  # CuPy 14 or later
    except (ImportError, AttributeError) as error:
        log.warning(
            "CuPy >= 14 is not installed (%s): codecs run unfused torch operations on this GPU; for fused kernels: "
            "pip install 'acsgd[cuda]'",
            error,
        )
        return None
    return cupy
