"""The bit stream is that of numpy.packbits, and codes come back from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from acsgd.codecs import bits as bits_module
from acsgd.codecs.bits import pack_bits, packed_bytes, stream_slice, unpack_bits

BITS = range(1, 9)
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 1001)


def codes(count: int, bits: int) -> Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 2**bits, (count,), dtype=torch.uint8, generator=draw)


def one_bit_per_byte(codes: Tensor, bits: int) -> Tensor:
    """The definition of the stream."""
    spread = np.unpackbits(codes.numpy()).reshape(-1, 8)[:, 8 - bits :]
    return torch.from_numpy(np.packbits(spread.reshape(-1)))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", LENGTHS)
def test_the_stream_is_that_of_packbits_and_returns(count: int, bits: int) -> None:
    sent = codes(count, bits)
    stream = pack_bits(sent, bits)
    assert torch.equal(stream, one_bit_per_byte(sent, bits))
    assert len(stream) == packed_bytes(count, bits)
    assert torch.equal(unpack_bits(stream, bits, count), sent)


@pytest.mark.parametrize("bits", BITS)
def test_blocks_leave_no_trace(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = codes(1001, bits)
    monkeypatch.setattr(bits_module, "BLOCK", 64)
    assert torch.equal(pack_bits(sent, bits), one_bit_per_byte(sent, bits))
    assert torch.equal(unpack_bits(one_bit_per_byte(sent, bits), bits, 1001), sent)


@pytest.mark.parametrize("bits", BITS)
def test_neither_codes_nor_stream_need_be_aligned(bits: int) -> None:
    sent = codes(1003, bits)
    room = torch.full((3 + packed_bytes(1000, bits),), 255, dtype=torch.uint8)
    pack_bits(sent[3:], bits, room[3:])
    assert torch.equal(room[3:], one_bit_per_byte(sent[3:], bits))
    assert torch.equal(unpack_bits(room[3:], bits, 1000), sent[3:])


@pytest.mark.parametrize("bits", BITS)
def test_part_of_a_stream_is_the_stream_of_a_part(bits: int) -> None:
    sent = codes(1001, bits)
    part = stream_slice(pack_bits(sent, bits), 24, 80, bits)
    assert torch.equal(part, pack_bits(sent[24:104], bits))
