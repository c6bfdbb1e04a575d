"""Laws of damaged messages: none is accepted, and what a quantizing codec decodes is finite whatever the bytes are."""

from __future__ import annotations

import random

import pytest
import torch
from lib.damage import flip_bit
from torch import Tensor

from acsgd import codecs
from acsgd.codecs.base import pack, unpack, wire_bytes
from acsgd.codecs.cache_update import decode_update
from acsgd.codecs.lossless import compress_
from acsgd.errors import RunError
from acsgd.pp.wire.channel import NOT_FINITE, check_header, read_header
from acsgd.pp.wire.frame import HEADER_BYTES, Header, MessageKind

SPECS = [
    *codecs.CODECS,
    "none:dtype=bf16",
    "none:dtype=fp16",
    "fixpoint:bits=1",
    "fixpoint:bits=4,scale=l2,centroids=true,entropy_coding=true",
    "lloyd:bits=3,dims=group,group=16",
]
SHAPE = (3, 5, 8)
PAYLOAD_FLIPS = 60


def message_of(spec: str) -> tuple[Header, Tensor]:
    """Return the header and the bytes of a message of some activations."""
    codec, x = codecs.parse(spec), torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    payload = torch.zeros(wire_bytes(codec.wire(SHAPE)), dtype=torch.uint8)
    pack(codec.encode(x), payload)
    if codec.entropy_coding:
        payload = payload[: compress_(payload)]
    header = Header(MessageKind.ACTIVATION, 0, 3, 41, 6, len(payload))
    return header, torch.cat([torch.frombuffer(bytearray(header.pack(payload)), dtype=torch.uint8), payload])


def assert_refused(message: Tensor, expected: Header, case: str) -> None:
    for allow_shorter in (False, True):
        with pytest.raises(RunError) as error:
            check_header(read_header(message, expected, 0), expected, 0, allow_shorter=allow_shorter)
        for text in ("boundary 3-4, step 42, micro-batch 6", "rank 0 sent a corrupt message", "start the run again"):
            assert text in str(error.value), (case, str(error.value))


@pytest.mark.parametrize("spec", SPECS)
def test_every_flip_of_a_header_and_of_a_sample_of_payload_bits_is_refused(spec: str) -> None:
    header, message = message_of(spec)
    assert check_header(read_header(message, header, 0), header, 0) == header
    payload_bits = range(8 * HEADER_BYTES, 8 * len(message))
    sample = random.Random(spec).sample(payload_bits, min(PAYLOAD_FLIPS, len(payload_bits)))
    for bit in [*range(8 * HEADER_BYTES), *sample, payload_bits[0], payload_bits[-1]]:
        assert_refused(flip_bit(message, bit), header, f"bit {bit}")


def test_messages_that_are_shortened_moved_or_mixed_are_refused() -> None:
    for spec in SPECS:
        header, message = message_of(spec)
        for kept in (0, 1, len(message) - HEADER_BYTES - 1):  # the rest of the buffer holds an older message
            shortened = torch.full_like(message, 0xA5)
            shortened[: HEADER_BYTES + kept] = message[: HEADER_BYTES + kept]
            assert_refused(shortened, header, f"{spec}: {kept} bytes of the payload")
        moved = torch.cat([message[:HEADER_BYTES], message[HEADER_BYTES:].roll(1)])
        assert_refused(moved, header, f"{spec}: moved by a byte")
        other = header._replace(micro=7).pack(message[HEADER_BYTES:])
        mixed, before_checksum = message.clone(), HEADER_BYTES - 8
        mixed[:before_checksum] = torch.frombuffer(bytearray(other[:before_checksum]), dtype=torch.uint8)
        assert_refused(mixed, header, f"{spec}: header of another message")


def test_the_mark_of_a_tensor_that_is_not_finite_has_a_checksum_too() -> None:
    header, message = message_of("fixpoint")
    empty = torch.empty(0, dtype=torch.uint8)
    mark = torch.frombuffer(bytearray(header._replace(length=NOT_FINITE).pack(empty)), dtype=torch.uint8)
    assert check_header(read_header(mark, header, 0), header, 0).length == NOT_FINITE
    length = message.clone()
    length[16:24] = 0  # a damaged length must not turn a tensor into NaN
    assert_refused(length, header, "length 0")


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("none")])
def test_whatever_a_payload_holds_it_decodes_to_finite_numbers(spec: str) -> None:
    codec, draw = codecs.parse(spec), torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wire = codec.wire(SHAPE, dtype)
        n = wire_bytes(wire)
        payloads = [torch.randint(0, 256, (n,), generator=draw).byte() for _ in range(50)]
        payloads += [torch.full((n,), byte, dtype=torch.uint8) for byte in (0x00, 0x7F, 0x80, 0xFF)]
        for number, payload in enumerate(payloads):
            y = codec.decode(unpack(payload, wire), SHAPE, dtype)
            assert y.isfinite().all(), (dtype, number)
            entry = torch.randn(SHAPE, generator=draw).half()
            got = decode_update(codec, unpack(payload, wire), entry, dtype)
            assert entry.isfinite().all(), (dtype, number)
            assert got.isfinite().all(), (dtype, number)


def test_finite_numbers_at_the_end_of_the_range_of_fp16_stay_finite() -> None:
    """Rounding to few bits, or to bf16, may round up."""
    x = torch.full(SHAPE, torch.finfo(torch.float16).max, dtype=torch.float16)
    x[..., ::3] *= -1
    for spec in SPECS:
        codec = codecs.parse(spec)
        y = codec.decode(codec.encode(x), SHAPE, torch.float16)
        assert y.isfinite().all(), spec
        if spec.startswith("none"):
            x_inf = x.clone()
            x_inf[1, 2, 3], x_inf[2, 0, 0] = torch.inf, torch.nan
            y = codec.decode(codec.encode(x_inf), SHAPE, torch.float16)
            assert torch.equal(y.isinf(), x_inf.isinf()), f"{spec}: the overflow of a gradient must stay visible"
            assert torch.equal(y.isnan(), x_inf.isnan()), spec
