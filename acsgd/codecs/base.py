"""What a codec is, and how its fields become one message.

n = bytes of a message. A codec is pure: no rank, no state, no torch.distributed.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; every field of a message starts at a multiple, so that it can be viewed in its own dtype."""


class NotFiniteError(ValueError):
    """A tensor with NaN or inf, which a codec cannot encode."""


class Field(NamedTuple):
    """One tensor of a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Wire = tuple[Field, ...]


class Codec(Protocol):
    """Turns a tensor into the fields that travel, and back. Implemented by frozen dataclasses."""

    @property
    def entropy_coding(self) -> bool:
        """Whether messages are entropy-coded after packing."""
        ...

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        """Declare what travels for a tensor of this shape and dtype."""
        ...

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the fields of `x`, in wire order, on its device. May raise NotFiniteError."""
        ...

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that the fields stand for. May alias the fields."""
        ...


def wire_bytes(wire: Wire) -> int:
    """Length of the message that carries these fields."""
    return sum(_aligned(field.nbytes) for field in wire)


def pack(fields: tuple[Tensor, ...], buffer: Tensor) -> None:
    """Copy the fields into `buffer`, uint8[n] with n = wire_bytes; on a GPU without waiting for the copy."""
    offset = 0
    for tensor in fields:
        field = Field(tensor.dtype, tuple(tensor.shape))
        _view(buffer, offset, field).copy_(tensor, non_blocking=True)
        offset += _aligned(field.nbytes)


def unpack(buffer: Tensor, wire: Wire) -> tuple[Tensor, ...]:
    """Return views into `buffer`, uint8[n], one per field of the wire."""
    fields, offset = [], 0
    for field in wire:
        fields.append(_view(buffer, offset, field))
        offset += _aligned(field.nbytes)
    return tuple(fields)


def _view(buffer: Tensor, offset: int, field: Field) -> Tensor:
    return buffer[offset : offset + field.nbytes].view(field.dtype).view(field.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
