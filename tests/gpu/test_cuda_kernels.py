"""The CUDA kernels equal the torch operations of the CPU bit for bit, on a GPU with CuPy."""

from __future__ import annotations

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
)

from acsgd.codecs.cache_update import decode_update, encode_update
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.kernels import Kernels, kernels_for
from acsgd.codecs.layout import ScaleLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def kernels(device: torch.device) -> Kernels:
    found = kernels_for(ScaleLayout(8, 8, by_column=True), device, torch.float32)
    return found or pytest.skip("no CuPy")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_codes_and_values_equal_those_of_torch(
    bits: int, dtype: torch.dtype, kernels: Kernels, device: torch.device
) -> None:
    for codec, shape in codecs_and_shapes(bits):
        check_codec(kernels, device, codec, data(shape, bits, dtype))
    check_alignment(kernels, device, bits, dtype)


@pytest.mark.parametrize("entry_dtype", ENTRY_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_cache_updates_equal_those_of_torch(
    bits: int, dtype: torch.dtype, entry_dtype: torch.dtype, kernels: Kernels, device: torch.device
) -> None:
    for codec, shape in codecs_and_shapes(bits):
        check_update(kernels, device, codec, data(shape, bits, dtype), data(shape, bits, entry_dtype, seed=1))


@pytest.mark.parametrize("bits", [3, 4])
def test_large_tensors_take_several_launches(bits: int, kernels: Kernels, device: torch.device) -> None:
    check_codec(kernels, device, FixPoint(bits, dims="group", group=96), data(((1 << 27) + 5,), bits, torch.bfloat16))


@pytest.mark.parametrize("bits", BITS)
def test_cache_entries_stay_equal_on_a_side_stream(bits: int, kernels: Kernels, device: torch.device) -> None:
    """The sender runs on a side stream of a GPU, the receiver on a CPU."""
    codec, shape = FixPoint(bits), (513, 768)
    at_sender = torch.zeros(shape, dtype=torch.float16, device=device)
    at_receiver, side = at_sender.cpu(), torch.cuda.Stream(device)
    for step in range(5):
        with torch.cuda.stream(side):
            x = torch.randn(shape, device=device, dtype=torch.bfloat16) + step
            fields = encode_update(codec, x, at_sender)
        side.synchronize()
        decode_update(codec, tuple(field.cpu() for field in fields), at_receiver, torch.bfloat16)
        assert torch.equal(at_sender.cpu(), at_receiver)
