"""The elements of a tensor that share a scale, and the traversal of a tensor in cache-sized blocks.

A tensor of N elements is viewed flat, in C order, as rows of `width` elements. Each column, or each row, has a scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from acsgd.codecs.base import saturate_
from acsgd.codecs.bits import block_size, has_values, pack_bits, packed_bytes, stream_slice

Dims = Literal["channel", "token", "tensor", "group"]
ValuesOf = Callable[[Tensor, int], Tensor]
"""Values of the codes of a block: (their bit stream, number n of codes) -> fp32 [n], which may be overwritten."""

SAMPLE = 1 << 16
"""Minimum number of elements that a statistic is estimated from; all of them in smaller tensors."""


class ScaleLayout(NamedTuple):
    """The elements of a tensor that share a scale."""

    numel: int
    width: int
    """Elements per row, at least 1. The last row may be shorter if scales belong to rows."""
    by_column: bool

    @property
    def scales(self) -> int:
        """Number of scales; 0 for an empty tensor."""
        if not self.numel:
            return 0
        return self.width if self.by_column else -(-self.numel // self.width)

    def blocks(self, x: Tensor) -> Iterator[slice]:
        """Split the elements of a tensor, or of what it encodes, into blocks of about `block_size`, see `split`.

        Without values, there is the first block alone: the others need no more memory.
        """
        blocks = self.split(block_size(x.device))
        return blocks if has_values(x) else itertools.islice(blocks, 1)

    def split(self, size: int) -> Iterator[slice]:
        """Split the elements into blocks of whole rows, of at most `size` elements unless 8 rows have more.

        Each block starts at a multiple of 8.
        """
        step = max(1, size // (8 * self.width)) * 8 * self.width
        for start in range(0, self.numel, step):
            yield slice(start, min(start + step, self.numel))

    def rows(self, part: Tensor) -> Tensor:
        """Return consecutive elements [n], from the start of a row, as [rows, width]; pad a short row with zeros."""
        missing = -len(part) % self.width
        return (functional.pad(part, (0, missing)) if missing else part).view(-1, self.width)

    def scales_of(self, scales: Tensor, block: slice) -> Tensor:
        """Return a view of the scales [scales] of a block that broadcasts against its rows."""
        if self.by_column:
            return scales
        return scales[block.start // self.width : -(-block.stop // self.width), None]

    def per_element(self, scales: Tensor) -> Tensor:
        """Return the scale of each element, [numel]."""
        if not self.numel:
            return scales
        whole = slice(0, self.numel)
        return self.scales_of(scales, whole).expand(-(-self.numel // self.width), self.width).reshape(-1)[whole]

    @property
    def sample_stride(self) -> int:
        """Stride of the rows that `sample` returns, which leaves SAMPLE elements. Odd: rows repeat in powers of two."""
        return self.numel // SAMPLE | 1

    def sample(self, flat: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        """Return every `sample_stride`-th whole row of a tensor [numel], fp32, and its scales, broadcastable to it."""
        whole = slice(0, self.numel // self.width * self.width or self.numel)
        stride = self.sample_stride
        row_scales = (self.scales_of(each, whole) for each in scales)
        rows = self.rows(flat[whole])[::stride].float()
        return rows, *(each if self.by_column else each[::stride] for each in row_scales)


def layout_of(shape: tuple[int, ...], dims: Dims, group: int) -> ScaleLayout:
    """Return the layout of a tensor: one scale per index of the last dimension ("channel"), per vector along it
    ("token"), per `group` neighbours in C order ("group"), or for the whole tensor ("tensor").
    """
    last = max(1, shape[-1]) if shape else 1
    width = {"channel": last, "token": last, "group": group, "tensor": 1}[dims]
    return ScaleLayout(torch.Size(shape).numel(), width, by_column=dims in ("channel", "tensor"))


def check_dims(bits: int, dims: Dims, group: int) -> None:
    """Raise ValueError unless `bits` is 1 to 8, and `group` is positive with dims=group and 0 otherwise."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits} is outside 1 to 8; use 4 or 8 if in doubt")
    if dims == "group" and group < 1:
        raise ValueError(f"dims=group needs a positive group size, not group={group}; for example group=128")
    if dims != "group" and group:
        raise ValueError(f"group={group} needs dims=group, not dims={dims}; write dims=group or leave group out")


def encode_blocks(
    flat: Tensor, layout: ScaleLayout, bits: int, scales: Tensor, codes_of: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the bit stream of a tensor [numel].

    codes_of: Quantizer of a block: (fp32 [rows, width], scales that broadcast against it) -> codes, uint8.
    """
    stream = torch.empty(packed_bytes(layout.numel, bits), dtype=torch.uint8, device=flat.device)
    for block in layout.blocks(flat):
        codes = codes_of(layout.rows(flat[block]).float(), layout.scales_of(scales, block))
        count = block.stop - block.start
        pack_bits(codes.view(-1)[:count], bits, stream_slice(stream, block.start, count, bits))
    return stream


class CodedStream(NamedTuple):
    """Bit stream of a tensor [numel], and how to decode it."""

    stream: Tensor
    layout: ScaleLayout
    bits: int
    scales: Tensor
    values_of: ValuesOf

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the elements, values times scales, in blocks: their range, and fp32 [n], which may be overwritten."""
        for block in self.layout.blocks(self.stream):
            yield block, self._decode_block(block)  # not kept here while it is used

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor [numel]. Numbers outside of the range of fp16 saturate."""
        y = torch.empty(self.layout.numel, dtype=dtype, device=self.stream.device)
        for block, values in self.blocks():
            y[block] = saturate_(values, dtype)
        return y

    def _decode_block(self, block: slice) -> Tensor:
        count = block.stop - block.start
        coded = stream_slice(self.stream, block.start, count, self.bits)
        values = self.layout.rows(self.values_of(coded, count)).mul_(self.layout.scales_of(self.scales, block))
        return values.view(-1)[:count]
