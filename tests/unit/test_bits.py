"""Bit packing equals numpy.packbits, and is inverted by unpacking."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from acsgd.codecs import bits as bits_module
from acsgd.codecs.bits import pack_bits, packed_bytes, stream_slice, unpack_bits

BITS = range(1, 9)
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 1001)


def random_codes(count: int, bits: int) -> Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 2**bits, (count,), dtype=torch.uint8, generator=draw)


def packed_by_numpy(codes: Tensor, bits: int) -> Tensor:
    """The definition of the stream."""
    one_bit_per_byte = np.unpackbits(codes.numpy()).reshape(-1, 8)[:, 8 - bits :]
    return torch.from_numpy(np.packbits(one_bit_per_byte.reshape(-1)))


def test_the_stream_is_that_of_packbits() -> None:
    for bits, count in product(BITS, LENGTHS):
        codes = random_codes(count, bits)
        stream = pack_bits(codes, bits)
        assert torch.equal(stream, packed_by_numpy(codes, bits)), (bits, count)
        assert len(stream) == packed_bytes(count, bits), (bits, count)
        assert torch.equal(unpack_bits(stream, bits, count), codes), (bits, count)


def test_the_stream_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits_module, "BLOCK", 64)
    for bits in BITS:
        codes = random_codes(1001, bits)
        assert torch.equal(pack_bits(codes, bits), packed_by_numpy(codes, bits)), bits
        assert torch.equal(unpack_bits(packed_by_numpy(codes, bits), bits, 1001), codes), bits


def test_codes_and_stream_may_start_at_any_address() -> None:
    for bits in BITS:
        codes = random_codes(1003, bits)
        stream = torch.full((3 + packed_bytes(1000, bits),), 255, dtype=torch.uint8)
        pack_bits(codes[3:], bits, stream[3:])
        assert torch.equal(stream[3:], packed_by_numpy(codes[3:], bits)), bits
        assert torch.equal(unpack_bits(stream[3:], bits, 1000), codes[3:]), bits


def test_a_slice_of_a_stream_is_the_stream_of_a_slice() -> None:
    for bits in BITS:
        codes = random_codes(1001, bits)
        part = stream_slice(pack_bits(codes, bits), 24, 80, bits)
        assert torch.equal(part, pack_bits(codes[24:104], bits)), bits
