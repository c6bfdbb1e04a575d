"""The CUDA kernels, compiled for the host, equal the torch operations bit for bit. NVRTC compiles them for GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path

import pytest
import torch
from lib.kernel_laws import (
    BITS,
    DTYPES,
    ENTRY_DTYPES,
    check_alignment,
    check_codec,
    check_update,
    codecs_and_shapes,
    data,
    every_kernel,
    same_bits,
)
from torch import Tensor

from acsgd.codecs import bits as bits_module
from acsgd.codecs import kernels as kernels_module
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.kernels import MAX_WIDTH, THREADS, Kernels, UniformQuantization, kernels_for, source
from acsgd.codecs.layout import ScaleLayout, layout_of

CPU = torch.device("cpu")
FLAGS = ("-std=c++17", f"-DTHREADS={THREADS}")


class HostLaunch:
    """Launches kernels of a library built from kernels_on_host.h."""

    def __init__(self, library: ctypes.CDLL, *, backwards: bool = False) -> None:
        self._library = library
        self._backwards = backwards

    def __call__(self, device: torch.device, kernel: str, blocks: int, arguments: tuple[int, ...]) -> None:
        packed = (ctypes.c_longlong * len(arguments))(*arguments)
        self._library[symbol(kernel)](blocks, self._backwards, packed)


def symbol(kernel: str) -> str:
    return re.sub(r"\W+", "_", kernel)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or pytest.skip("no g++")
    build = tmp_path_factory.mktemp("kernels")
    exports = [f"EXPORT({symbol(kernel)}, {kernel})" for kernel in every_kernel()]
    (build / "kernels.cu").write_text(source())
    (build / "host.cpp").write_text("\n".join(['#include "kernels_on_host.h"', *exports, ""]))
    include = f"-I{Path(__file__).parents[1] / 'lib'}"
    strict = ("-ffp-contract=off", "-fsanitize=alignment,bounds,shift", "-fsanitize-undefined-trap-on-error")
    command = [compiler, *FLAGS, *strict, "-I.", include, "-fPIC", "-shared", "-o", "host.so", "host.cpp"]
    subprocess.run(command, cwd=build, check=True)
    return ctypes.CDLL(str(build / "host.so"))


@pytest.fixture
def on_host(library: ctypes.CDLL) -> Kernels:
    return Kernels(HostLaunch(library))


@pytest.mark.parametrize("bits", BITS)
def test_codes_and_values_equal_those_of_torch(bits: int, on_host: Kernels) -> None:
    for dtype in DTYPES:
        for codec, shape in codecs_and_shapes(bits):
            check_codec(on_host, CPU, codec, data(shape, bits, dtype))


@pytest.mark.parametrize("bits", BITS)
def test_cache_updates_equal_those_of_torch(bits: int, on_host: Kernels) -> None:
    """Each codec and shape with two of the six pairs of dtypes."""
    pairs = [*product(DTYPES, ENTRY_DTYPES)]
    for i, (codec, shape) in enumerate(codecs_and_shapes(bits)):
        for dtype, entry_dtype in (pairs[i % 6], pairs[(i + 3) % 6]):
            check_update(on_host, CPU, codec, data(shape, bits, dtype), data(shape, bits, entry_dtype, seed=1))


def test_entries_may_be_bf16_as_those_of_gradients(on_host: Kernels) -> None:
    """Of fp32 gradients in 4 bits only: these kernels take long to compile."""
    for size in (1e-9, 1.0, torch.finfo(torch.bfloat16).max / 100):
        x, entry = data((64, 24), 4, torch.float32) * size, data((64, 24), 4, torch.float32, seed=1) * size
        check_update(on_host, CPU, FixPoint(4), x, entry.bfloat16())


@pytest.mark.parametrize("bits", BITS)
def test_large_tensors_take_several_launches(bits: int, on_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits_module, "BLOCK", 1 << 9)
    monkeypatch.setattr(kernels_module, "LAUNCH", 1 << 10)
    for codec, shape in codecs_and_shapes(bits):
        check_codec(on_host, CPU, codec, data(shape, bits, torch.float32))
        check_update(on_host, CPU, codec, data(shape, bits, torch.bfloat16), data(shape, bits, torch.float16, seed=1))


def test_more_elements_than_a_block_of_the_default_size(on_host: Kernels) -> None:
    assert bits_module.BLOCK < 300_003
    check_codec(on_host, CPU, FixPoint(3, dims="group", group=96), data((300_003,), 3, torch.bfloat16))


def test_cache_entries_saturate(on_host: Kernels) -> None:
    for bits, dtype in product(BITS, ENTRY_DTYPES):
        largest = torch.finfo(dtype).max
        x, entry = data((64, 8), bits, torch.float32) * (largest / 8), data((64, 8), bits, torch.float32, seed=1)
        entry = (entry.sign() * largest).to(dtype)
        x = entry.float() + x.clamp(
            -largest / 2, largest / 2
        )  # beyond the range of the entry, or of fp32: then clamped
        check_update(on_host, CPU, FixPoint(bits), x.clamp(-torch.finfo().max, torch.finfo().max), entry)


def test_any_magnitude(on_host: Kernels) -> None:
    for bits, power in product(BITS, (-149, -126, -110, -60, 100, 126)):
        x = data((64, 24), bits, torch.float32)
        x[:, ::5] *= 2.0**-20
        x = (x * 0.25).clamp(-1, 1) * 2.0**power
        check_codec(on_host, CPU, FixPoint(bits), x)
        check_codec(on_host, CPU, FixPoint(bits, "l2", clip=2.0**-16), x)


@pytest.mark.parametrize("bits", BITS)
def test_quotients_near_the_midpoint_of_two_codes(bits: int, on_host: Kernels) -> None:
    """A product with a reciprocal, instead of the division, would give other codes here."""
    steps = torch.linspace(1, 2, 1025)[:-1].half().float()  # all fp16 numbers in [1, 2)
    middles = (torch.arange(-(2 ** (bits - 1)) - 1, 2 ** (bits - 1) + 1) + 0.5)[:, None] * steps
    x = torch.cat([middles, middles.nextafter(torch.tensor(9e9)), middles.nextafter(torch.tensor(-9e9))])
    layout = layout_of(tuple(x.shape), "channel", 0)
    expected = torch_stream(x, bits, steps)
    assert torch.equal(on_host.encode(x.view(-1), UniformQuantization(bits, layout, steps)), expected)


def torch_stream(x: Tensor, bits: int, steps: Tensor) -> Tensor:
    """Return the stream of x from FixPoint with these steps, which an additional first row determines."""
    if bits == 1:
        return FixPoint(1).encode(x)[0]
    peak = -steps * 2 ** (bits - 1)
    fields = FixPoint(bits).encode(torch.cat([peak[None], x.clamp(peak, -peak)]))
    return fields[0][len(steps) * bits // 8 :]


def test_results_do_not_depend_on_the_order_of_threads(library: ctypes.CDLL) -> None:
    kernels = Kernels(HostLaunch(library, backwards=True))
    for bits in BITS:
        x, entry = data((61, 71), bits, torch.float16), data((61, 71), bits, torch.float16, seed=1)
        check_codec(kernels, CPU, FixPoint(bits), x)
        check_update(kernels, CPU, FixPoint(bits), x, entry)


def test_nothing_is_written_beyond_a_tensor(on_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[tuple[Tensor, int]] = []

    def guarded(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = shape[0] * dtype.itemsize
        buffers.append((torch.full((64 + nbytes,), 165, dtype=torch.uint8), nbytes))
        return buffers[-1][0][32 : 32 + nbytes].view(dtype)

    monkeypatch.setattr(kernels_module.torch, "empty", guarded)
    for bits, count in product(BITS, (1, 8, 13, 255, 2047, 2056)):
        buffers.clear()
        x, steps = data((count,), bits, torch.float32), torch.ones(1)
        entry = torch.zeros(count + 16, dtype=torch.float16)
        quantization = UniformQuantization(bits, layout_of((count,), "tensor", 0), steps)
        stream = on_host.encode(x, quantization, entry[8:-8])
        on_host.encode(x, quantization)
        on_host.decode(stream, quantization, torch.bfloat16)
        on_host.decode(stream, quantization, torch.float32, entry[8:-8])
        assert len(buffers) == 4
        for buffer, nbytes in buffers:
            assert torch.cat([buffer[:32], buffer[32 + nbytes :]]).eq(165).all(), (bits, count)
        assert not torch.cat([entry[:8], entry[-8:]]).any(), (bits, count)


def test_tensors_may_start_at_any_address(on_host: Kernels) -> None:
    """The library stops the process at an access that is not aligned as its type needs."""
    for bits, dtype in product(BITS, DTYPES):
        check_alignment(on_host, CPU, bits, dtype)


@pytest.mark.parametrize(
    "layout",
    [
        ScaleLayout(0, 8, by_column=True),
        ScaleLayout(3 * MAX_WIDTH, MAX_WIDTH, by_column=True),
        ScaleLayout(MAX_WIDTH * 8 + 1, MAX_WIDTH, by_column=False),
        ScaleLayout(1 << 33, 768, by_column=True),
        ScaleLayout((1 << 32) + 5, 1, by_column=True),
        ScaleLayout((1 << 32) + 5, 3, by_column=False),
    ],
)
def test_launches_cover_every_element_once_and_divide_exactly(layout: ScaleLayout) -> None:
    launches: list[tuple[int, int, int, int]] = []

    def launch(device: torch.device, kernel: str, blocks: int, arguments: tuple[int, ...]) -> None:
        numel, width, per_width = arguments[-5:-2]
        launches.append((blocks, numel, width, per_width))

    x = torch.empty(layout.numel, dtype=torch.bfloat16, device="meta")
    Kernels(launch).encode(x, UniformQuantization(4, layout, torch.empty(layout.scales, device="meta")))
    assert sum(numel for _, numel, _, _ in launches) == layout.numel
    for blocks, numel, width, per_width in launches:
        assert numel < 1 << 30
        assert numel <= blocks * THREADS * 8 < numel + THREADS * 8
        for place in {0, 1, width - 1, width, numel - 1, *(min(k * width, numel) - 1 for k in (2, 3, numel // width))}:
            assert (place * 4 * per_width) >> 64 == place // width


def test_without_cupy_torch_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # makes its import fail
    kernels_module._cupy.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert kernels_for(ScaleLayout(8, 8, by_column=True), torch.device("cuda", 0), torch.float16) is None
    kernels_module._cupy.cache_clear()
    assert len(caplog.records) == 1
    assert "acsgd[cuda]" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_never_import_cupy(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "_cupy", lambda: pytest.fail("imported"))
    assert kernels_for(ScaleLayout(8, 8, by_column=True), torch.device(device), torch.float32) is None
    assert kernels_for(ScaleLayout(8, 8, by_column=True), torch.device("cuda", 0), torch.float64) is None
    assert kernels_for(ScaleLayout(8, 2 * MAX_WIDTH, by_column=False), torch.device("cuda", 0), torch.float32) is None


def test_codecs_use_available_kernels(on_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    x, entry = data((64, 24), 4, torch.bfloat16), data((64, 24), 4, torch.float16, seed=1)
    codec = FixPoint(4, centroids=True)

    def results() -> list[Tensor]:
        at_sender, at_receiver, fields = entry.clone(), entry.clone(), codec.encode(x)
        sent = codec.encode_update(x, at_sender)
        arrived = codec.decode_update(sent, at_receiver, torch.bfloat16)
        decoded = codec.decode(fields, (64, 24), torch.float32)
        drawn = FixPoint(4, rounding="stochastic").encode(x)  # never uses kernels
        return [*fields, *sent, arrived, at_sender, at_receiver, decoded, *drawn]

    by_torch, requested = results(), []
    monkeypatch.setattr("acsgd.codecs.fixpoint.kernels_for", lambda *given: requested.append(given[2:]) or on_host)
    assert all(map(same_bits, results(), by_torch))
    fp32, fp16, bf16 = DTYPES
    assert requested == [(bf16,), (bf16, fp16), (fp16, bf16), (fp32,)]


def nvrtc() -> ctypes.CDLL:
    """Load the compiler that CuPy uses, which needs no GPU and no driver."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(PackageNotFoundError):
            files = {file.name: file.locate() for file in distribution(package).files or ()}
            library, builtins = (
                next(str(files[name]) for name in files if re.fullmatch(rf"lib{stem}\.so\.[\d.]+", name))
                for stem in ("nvrtc", "nvrtc-builtins")
            )
            ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)  # which the library would look for elsewhere
            return ctypes.CDLL(library)
    pytest.skip("no nvidia-cuda-nvrtc, of which there is a wheel for Linux")


WITH_ASSEMBLY = [kernel for kernel in every_kernel() if re.search(r"<3,.*(Half|BFloat16)", kernel)]
"""Kernels with all inline assembly, which converts 16-bit numbers."""


@pytest.mark.parametrize(
    ("architecture", "kernels"),
    [("compute_90", every_kernel()), ("sm_75", WITH_ASSEMBLY), ("sm_90", WITH_ASSEMBLY)],
    ids=["all, to PTX", "assembly for sm_75", "assembly for sm_90"],
)
def test_nvrtc_compiles_the_kernels(architecture: str, kernels: list[str]) -> None:
    """Inline assembly is read only where machine code is made, which takes longer."""
    compiler, program, nbytes = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert compiler.nvrtcCreateProgram(ctypes.byref(program), source().encode(), b"kernels.cu", 0, None, None) == 0
    for kernel in kernels:
        assert compiler.nvrtcAddNameExpression(program, kernel.encode()) == 0
    options = [flag.encode() for flag in (*FLAGS, f"--gpu-architecture={architecture}")]
    code = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(nbytes))
    log = ctypes.create_string_buffer(nbytes.value)
    compiler.nvrtcGetProgramLog(program, log)
    assert code == 0, log.value.decode()
    compiler.nvrtcGetPTXSize(program, ctypes.byref(nbytes))
    text = ctypes.create_string_buffer(nbytes.value)
    compiler.nvrtcGetPTX(program, text)
    assert text.value.count(b".entry") == len(kernels)
