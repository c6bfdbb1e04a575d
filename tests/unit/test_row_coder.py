"""Laws of the lossless coder of rows: the bits that arrive are those that were sent, in fewer bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acsgd.codecs.base import pack, unpack, wire_bytes
from acsgd.codecs.lossless import BytePlanes, compress_, from_planes, to_planes
from acsgd.layers.batch import Lengths
from acsgd.layers.description import Dim
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.row_coder import RowDifferenceCoder

WIDTH = 64


def coders(dtype: torch.dtype = torch.float32) -> tuple[RowDifferenceCoder, RowDifferenceCoder]:
    """Return both ends."""
    spec = TensorSpec((400, WIDTH), dtype, (Dim("sequence", 0), Dim(None, WIDTH)))
    return RowDifferenceCoder([BytePlanes()], spec), RowDifferenceCoder([BytePlanes()], spec)


def describe(step: int, ids: Tensor, *, exact: bool = False) -> TransferInfo:
    return TransferInfo(step, 0, int(not exact), tuple(ids.tolist()), Lengths(len(ids)))


def send(ends: tuple[RowDifferenceCoder, RowDifferenceCoder], table: Tensor, info: TransferInfo) -> int:
    """Send rows of a table, check what arrives, and return the length of the entropy-coded message."""
    sender, receiver = ends
    rows = table[list(info.samples)]
    assert sender.context(info) == receiver.context(info)
    message = torch.empty(wire_bytes(sender.wire(info)), dtype=torch.uint8)
    pack(sender.encode(rows, info), message)
    received = receiver.decode(unpack(message.clone(), receiver.wire(info)), info)
    assert (received.dtype, received.shape) == (rows.dtype, rows.shape)
    assert torch.equal(received.view(torch.uint8), rows.view(torch.uint8)), "not lossless"
    return compress_(message) if sender.uses_entropy_coding(info) else len(message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_bits_arrive(dtype: torch.dtype) -> None:
    """Random bits, NaN among them, in several messages per step; steps share rows; some steps are exact."""
    ends, draw = coders(dtype), torch.Generator().manual_seed(0)
    for step in range(6):
        table = torch.randint(256, (1000, WIDTH * dtype.itemsize), generator=draw, dtype=torch.uint8).view(dtype)
        ids = torch.randperm(1000, generator=draw)[:300]
        for part in (ids[:150], ids[150:299], ids[299:], ids[:0]):
            send(ends, table, describe(step, part, exact=step == 3))


def test_extreme_integers_have_planes() -> None:
    for dtype in (torch.int16, torch.int32):
        info = torch.iinfo(dtype)
        values = torch.tensor([0, -1, 1, info.min, info.max], dtype=dtype)
        assert torch.equal(from_planes(to_planes(values)), values)


def test_rows_that_a_step_changes_little_take_half_of_the_bytes() -> None:
    """A change below 2**14 units in the last place: two of four bytes are 0, and take a bit each."""
    ends, draw = coders(), torch.Generator().manual_seed(0)
    table = torch.randn(400, WIDTH, generator=draw)
    ids = torch.randperm(400, generator=draw)
    first = send(ends, table, describe(0, ids))
    bits = table.view(torch.int32)
    changed = (bits + torch.randint(-(2**14), 2**14, bits.shape, generator=draw, dtype=torch.int32)).view(torch.float32)
    overhead = 0.01  # the Huffman codes
    assert send(ends, changed, describe(1, ids.flip(0))) <= ((8 + 8 + 1 + 1) / 32 + overhead) * table.nbytes
    assert first > 0.7 * table.nbytes, "nothing was there to subtract"


def test_the_checksum_covers_which_rows_an_end_has() -> None:
    (sender, receiver), table, ids = coders(), torch.randn(400, WIDTH), torch.arange(9)
    send((sender, receiver), table, describe(0, ids))
    sender.encode(table[ids], describe(1, ids))  # is lost
    assert sender.context(describe(2, ids)) != receiver.context(describe(2, ids))
