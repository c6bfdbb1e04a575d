"""The codec protocol, and the layout of an encoded tensor's fields in one message.

n = length of a message, bytes. Codecs are pure functions: no rank, no state, no torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Each field of a message starts at a multiple of this, so that it can be viewed in its own dtype."""


class NotFiniteError(ValueError):
    """A tensor contains NaN or infinity, which its codec cannot encode."""


class Field(NamedTuple):
    """Dtype and shape of one encoded tensor in a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_rows: bool = False
    """Whether an entropy coder codes each row by itself: codes of signed levels, uint8 [rows, columns], whose rows
    differ in magnitude. At most one field of a message."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Wire = tuple[Field, ...]
"""The fields of a message, in order."""


class Codec(Protocol):
    """Encodes a tensor into fields of known dtype and shape. Implemented by frozen dataclasses."""

    @property
    def entropy_coding(self) -> bool:
        """Whether messages are entropy-coded after packing."""
        ...

    @property
    def encodes_nan(self) -> bool:
        """Whether NaN and infinity are encoded as they are. Codecs that quantize mark their tensor: see `holds_nan`."""
        ...

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        """Return the fields that encode a tensor of this shape and dtype."""
        ...

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the fields of `x`, in wire order, on its device: fields that can be packed and coded, also of NaN."""
        ...

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the decoded tensor. It may share memory with the fields.

        Unless `encodes_nan`, it is finite, whatever the fields hold.
        """
        ...

    def error_bound(self, x: Tensor) -> Tensor:
        """Return an upper bound of |decode(encode(x)) - x| for each element, fp64, in the shape of `x`.

        Holds for finite `x` if no decoded value exceeds the range of its dtype.
        """
        ...


class SlicedVector(Protocol):
    """A vector [n], fp32, that is read in slices: a tensor, or one that is computed where it is read."""

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Tensor: ...


@runtime_checkable
class BlockDecoder(Protocol):
    """A codec that decodes in blocks of `block_size`; on a CPU, each stays in the cache while it is used."""

    def decoded_blocks(self, fields: tuple[Tensor, ...], shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
        """Yield the elements that `decode` returns, in C order: their range, and fp32 [n], which may be overwritten.

        The iterator keeps no block that it has yielded.
        """
        ...


def holds_nan(fields: tuple[Tensor, ...]) -> Tensor:
    """Return whether fields of a codec without `encodes_nan` are those of a tensor with NaN or infinity, bool.

    It is marked by NaN in a field, such as a scale. The result is on the fields' device: no host waits for it.
    """
    marks = [field.isnan().any() for field in fields if field.is_floating_point()]
    return torch.stack(marks).any()


def check_finite(fields: tuple[Tensor, ...], x: Tensor | SlicedVector) -> None:
    """Raise NotFiniteError if fields of `x` mark it, see `holds_nan`. The host waits for the device."""
    if holds_nan(fields):
        x = x if isinstance(x, Tensor) else x[:]
        place = torch.unravel_index(x.abs().argmax(), x.shape)  # that of NaN, else infinity
        index = tuple(int(i) for i in place)
        raise NotFiniteError(f"cannot encode {x[index].item()} at index {index} of a tensor of shape {tuple(x.shape)}")


def rounding_bound(x: Tensor, bound: Tensor) -> Tensor:
    """Widen an error bound of exact arithmetic by the rounding of fp32 arithmetic and of the result to `x.dtype`."""
    info = torch.finfo(x.dtype)
    unit = info.eps / 2 + 8 * torch.finfo(torch.float32).eps
    return bound + unit * (x.double().abs() + bound) + info.tiny * info.eps / 2


def saturate_(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp fp32 values, in place, to the range of `dtype`: fp16, or a type with the range of fp32."""
    largest = torch.finfo(dtype).max
    return values.clamp_(-largest, largest) if dtype == torch.float16 else values


def wire_bytes(wire: Wire) -> int:
    """Return the length of a message, including the padding that aligns its fields."""
    return sum(_aligned(field.nbytes) for field in wire)


def pack(fields: tuple[Tensor, ...], buffer: Tensor) -> None:
    """Copy fields into `buffer`, uint8[n] with n = wire_bytes, and zero the padding. Asynchronous for GPU fields."""
    offset = 0
    for tensor in fields:
        field = Field(tensor.dtype, tuple(tensor.shape))
        _view(buffer, offset, field).copy_(tensor, non_blocking=True)
        end, offset = offset + field.nbytes, offset + _aligned(field.nbytes)
        if end < offset:
            buffer[end:offset] = 0


def unpack(buffer: Tensor, wire: Wire) -> tuple[Tensor, ...]:
    """Return views of the fields in `buffer`, uint8[n]."""
    fields, offset = [], 0
    for field in wire:
        fields.append(_view(buffer, offset, field))
        offset += _aligned(field.nbytes)
    return tuple(fields)


def _view(buffer: Tensor, offset: int, field: Field) -> Tensor:
    return buffer[offset : offset + field.nbytes].view(field.dtype).view(field.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
