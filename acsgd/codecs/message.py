"""Whole messages: a tensor <-> one uint8 buffer of at most a known length."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from acsgd.codecs.base import Codec, pack, unpack, wire_bytes


class MessageCodec(Protocol):
    """Turns a vector into a message, and back."""

    def max_bytes(self, n: int) -> int:
        """Return the length of the longest message of a vector [n]."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """Return the message uint8[m] of x, fp32 [n], on its device. Raises NotFiniteError."""
        ...

    def decode(self, message: Tensor, n: int) -> Tensor:
        """Return the vector that a message stands for, fp32 [n], on the message's device."""
        ...


class PackedCodec:
    """A codec as a compressor."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def max_bytes(self, n: int) -> int:
        return wire_bytes(self._codec.wire((n,)))

    def encode(self, x: Tensor) -> Tensor:
        message = x.new_empty(self.max_bytes(len(x)), dtype=torch.uint8)
        pack(self._codec.encode(x), message)
        return message

    def decode(self, message: Tensor, n: int) -> Tensor:
        return self._codec.decode(unpack(message, self._codec.wire((n,))), (n,), torch.float32)
