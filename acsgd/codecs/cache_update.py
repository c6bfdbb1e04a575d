"""Updates of an activation cache: the encoded difference to the cache entry is sent and added to the entry.

Sender and receiver compute the same update from the same fields, so their entries stay equal bit for bit.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from acsgd.codecs.base import Codec, check_finite, saturate_


@runtime_checkable
class FusedUpdate(Protocol):
    """A codec with faster versions of the functions below, for a contiguous entry and with equal results."""

    def encode_update(self, x: Tensor, entry: Tensor) -> tuple[Tensor, ...]: ...

    def decode_update(self, fields: tuple[Tensor, ...], entry: Tensor, dtype: torch.dtype) -> Tensor: ...


def encode_update(codec: Codec, x: Tensor, entry: Tensor) -> tuple[Tensor, ...]:
    """Encode the difference x - entry, and add its decoded value to `entry`, in place. Return the fields.

    Difference and sum are computed in fp32. Entries saturate instead of overflowing.

    Args:
        x: Activations of any float dtype.
        entry: Cache entry, fp32, bf16 or fp16, of the same shape.

    Raises:
        NotFiniteError: The difference is not finite. `entry` is then unchanged.
    """
    if isinstance(codec, FusedUpdate) and entry.is_contiguous():
        return codec.encode_update(x, entry)
    difference = x.detach().float() - entry.float()
    fields = codec.encode(difference)
    check_finite(fields, difference)
    add_saturated(entry, codec.decode(fields, tuple(entry.shape), torch.float32))
    return fields


def decode_update(codec: Codec, fields: tuple[Tensor, ...], entry: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the decoded difference to `entry`, in place. Return the sum before it is rounded for `entry`, as `dtype`.

    Both saturate: they are finite, whatever the fields hold.
    """
    if isinstance(codec, FusedUpdate) and entry.is_contiguous():
        return codec.decode_update(fields, entry, dtype)
    return saturate_(add_saturated(entry, codec.decode(fields, tuple(entry.shape), torch.float32)), dtype).to(dtype)


def add_saturated(entry: Tensor, values: Tensor) -> Tensor:
    """Add fp32 values to `entry`, fp32, bf16 or fp16, in place, clamped to its range. Return the exact fp32 sum."""
    total = entry.float() + values
    largest = torch.finfo(entry.dtype).max
    entry.copy_(total.clamp(-largest, largest))
    return total
