"""How the tensors of one wire become fields of messages and tensors again, at either of its ends."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acsgd.codecs.base import Codec, Wire, wire_bytes
from acsgd.codecs.identity import Identity

EXACT = Identity()
"""The codec of what must arrive as it was."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor before encoding and after decoding."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TransferInfo(NamedTuple):
    """What both ends of a wire know of a message before it travels."""

    step: int
    micro: int
    exact: bool = False
    """Whether it is to arrive as it was."""
    samples: tuple[int, ...] = ()
    """Ids of the sequences of a micro-batch that is trained on; without them nothing is remembered of it."""


class Coder(Protocol):
    """The way of one tensor into messages, or out of them."""

    @property
    def capacity(self) -> int:
        """Bytes of the longest message."""
        ...

    def wire(self, visit: TransferInfo) -> Wire:
        """Declare the fields of a message."""
        ...

    def is_squeezed(self, visit: TransferInfo) -> bool:
        """Whether the message then passes the entropy coder."""
        ...

    def encode(self, x: Tensor, visit: TransferInfo) -> tuple[Tensor, ...]:
        """Return the fields of a tensor, in wire order, on its device. May raise NotFiniteError."""
        ...

    def decode(self, fields: tuple[Tensor, ...], visit: TransferInfo) -> Tensor:
        """Return the tensor of the fields."""
        ...


class StatelessCoder:
    """Encodes every message for itself."""

    def __init__(self, codec: Codec, spec: TensorSpec) -> None:
        self._codec = codec
        self._spec = spec

    @property
    def capacity(self) -> int:
        return max(wire_bytes(codec.wire(*self._spec)) for codec in (self._codec, EXACT))

    def wire(self, visit: TransferInfo) -> Wire:
        return self._for(visit).wire(*self._spec)

    def is_squeezed(self, visit: TransferInfo) -> bool:
        return self._for(visit).entropy_coding

    def encode(self, x: Tensor, visit: TransferInfo) -> tuple[Tensor, ...]:
        return self._for(visit).encode(x)

    def decode(self, fields: tuple[Tensor, ...], visit: TransferInfo) -> Tensor:
        return self._for(visit).decode(fields, *self._spec)

    def _for(self, visit: TransferInfo) -> Codec:
        return EXACT if visit.exact else self._codec
