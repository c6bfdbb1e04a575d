"""The update of a delta memory: what travels is the encoded difference to what both ends remember.

Sender and receiver do the same arithmetic with the same fields, so their memories stay equal bit for bit.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from acsgd.codecs.base import Codec


@runtime_checkable
class Updater(Protocol):
    """A codec with a faster way to do what the functions below do, with equal results; `m` is contiguous."""

    def encode_update(self, x: Tensor, m: Tensor) -> tuple[Tensor, ...]: ...

    def decode_update(self, fields: tuple[Tensor, ...], m: Tensor, dtype: torch.dtype) -> Tensor: ...


def encode_update(codec: Codec, x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Return the fields of `codec` for x - m, and add to `m`, in place, what they decode to.

    x: of any float dtype; m: fp32 or fp16, of the same shape. The difference and the sum are taken in fp32; a memory
    saturates instead of overflowing. Raises NotFiniteError, and then leaves `m` as it was.
    """
    if isinstance(codec, Updater) and m.is_contiguous():
        return codec.encode_update(x, m)
    fields = codec.encode(x.detach().float() - m.float())
    add_saturated(m, codec.decode(fields, tuple(m.shape), torch.float32))
    return fields


def decode_update(codec: Codec, fields: tuple[Tensor, ...], m: Tensor, dtype: torch.dtype) -> Tensor:
    """Add to `m`, in place, what the fields decode to; return the sum before it is rounded for `m`, as `dtype`."""
    if isinstance(codec, Updater) and m.is_contiguous():
        return codec.decode_update(fields, m, dtype)
    return add_saturated(m, codec.decode(fields, tuple(m.shape), torch.float32)).to(dtype)


def add_saturated(m: Tensor, values: Tensor) -> Tensor:
    """Add fp32 values to `m`, fp32 or fp16, in place and without overflow; return the fp32 sum as it was before."""
    total = m.float() + values
    largest = torch.finfo(m.dtype).max
    m.copy_(total.clamp(-largest, largest))
    return total
