"""Which elements of a tensor have a scale in common, and the walk over them in blocks that fit into a cache.

A tensor of N elements is seen flat, in C order, as rows of `width` elements. Every column, or every row, has a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from acsgd.codecs.bits import block_codes, pack_bits, packed_bytes, stream_of, unpack_bits

Dims = Literal["channel", "token", "tensor", "group"]

SAMPLE = 1 << 16
"""Elements that are looked at, at least, or all there are, where a part of a tensor tells enough of it."""


class Layout(NamedTuple):
    """Which elements share a scale."""

    numel: int
    width: int
    """Elements of a row, at least 1; the last row may be shorter where scales belong to rows."""
    by_column: bool

    @property
    def scales(self) -> int:
        """How many scales there are; an empty tensor has none."""
        if not self.numel:
            return 0
        return self.width if self.by_column else -(-self.numel // self.width)

    def blocks(self, device: torch.device) -> Iterator[slice]:
        """Cut the elements into blocks of whole rows; every block starts at a multiple of 8."""
        step = max(1, block_codes(device) // (8 * self.width)) * 8 * self.width
        for start in range(0, self.numel, step):
            yield slice(start, min(start + step, self.numel))

    def rows(self, part: Tensor) -> Tensor:
        """View neighbours [n], from the start of a row on, as [rows, width]; a short row is filled up with zeros."""
        missing = -len(part) % self.width
        return (functional.pad(part, (0, missing)) if missing else part).view(-1, self.width)

    def beside(self, scales: Tensor, block: slice) -> Tensor:
        """View the scales [scales] of a block so that they fit beside its rows."""
        if self.by_column:
            return scales
        return scales[block.start // self.width : -(-block.stop // self.width), None]

    @property
    def sample_stride(self) -> int:
        """Of how many rows `sample` takes one, to leave SAMPLE elements. Odd, as rows repeat in powers of two."""
        return self.numel // SAMPLE | 1

    def sample(self, flat: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        """Return every so-manieth whole row of a tensor [numel], fp32 [rows, width], and each of `scales` beside it."""
        whole = slice(0, self.numel // self.width * self.width or self.numel)
        every = self.sample_stride
        beside = (self.beside(each, whole) for each in scales)
        rows = self.rows(flat[whole])[::every].float()
        return rows, *(each if self.by_column else each[::every] for each in beside)


def layout_of(shape: tuple[int, ...], dims: Dims, group: int) -> Layout:
    """Return the layout of a tensor: one scale per index of the last dimension ("channel"), per vector along it
    ("token"), per `group` neighbours in C order ("group"), or one for all ("tensor").
    """
    last = max(1, shape[-1]) if shape else 1
    width = {"channel": last, "token": last, "group": group, "tensor": 1}[dims]
    return Layout(torch.Size(shape).numel(), width, by_column=dims in ("channel", "tensor"))


def check_dims(bits: int, dims: Dims, group: int) -> None:
    """Raise ValueError unless `bits` is 1 to 8, and `group` a size where dims is "group" and absent elsewhere."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits} is outside 1 to 8; use 4 or 8 if in doubt")
    if dims == "group" and group < 1:
        raise ValueError(f"dims=group with group={group}: give the elements that share a scale, for example group=128")
    if dims != "group" and group:
        raise ValueError(f"group={group} has no meaning with dims={dims}; write dims=group, or leave group out")


def encode_blocks(
    flat: Tensor, layout: Layout, bits: int, scales: Tensor, codes_of: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the bit stream of a tensor [numel].

    codes_of: (fp32 [rows, width], the scales [scales] that belong to them) -> codes uint8, as many.
    """
    stream = torch.empty(packed_bytes(layout.numel, bits), dtype=torch.uint8, device=flat.device)
    for block in layout.blocks(flat.device):
        codes = codes_of(layout.rows(flat[block]).float(), layout.beside(scales, block))
        count = block.stop - block.start
        pack_bits(codes.view(-1)[:count], bits, stream_of(stream, block.start, count, bits))
    return stream


def decode_blocks(
    stream: Tensor, layout: Layout, bits: int, scales: Tensor, dtype: torch.dtype, values_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the tensor [numel] of a bit stream: values_of(codes [rows, width]) -> fp32, times the scales."""
    y = torch.empty(layout.numel, dtype=dtype, device=stream.device)
    for block in layout.blocks(y.device):
        count = block.stop - block.start
        codes = unpack_bits(stream_of(stream, block.start, count, bits), bits, count)
        y[block] = values_of(layout.rows(codes)).mul_(layout.beside(scales, block)).view(-1)[:count]
    return y
