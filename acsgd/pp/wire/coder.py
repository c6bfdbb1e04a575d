"""Coders: convert the tensors of a channel to message fields and back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acsgd.codecs.base import Codec, Wire, wire_bytes
from acsgd.codecs.identity import Identity
from acsgd.layers.description import BATCH, Dim
from acsgd.layers.lengths import Lengths

EXACT = Identity()
"""The lossless codec."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor before encoding and after decoding."""

    shape: tuple[int, ...]
    """Of a micro-batch of the longest rows. The first axis is that of the rows, if there are any."""
    dtype: torch.dtype
    dims: tuple[Dim, ...] | None = None
    """Sizes of the axes for rows of any length; None = the shape is always the same."""

    def shape_for(self, lengths: Lengths | None) -> tuple[int, ...]:
        """Return the shape for rows of some lengths; None = the longest."""
        if self.dims is None or lengths is None:
            return self.shape
        sizes = {BATCH: self.shape[0], **lengths._asdict()}
        return tuple(dim.resolve(sizes) for dim in self.dims)


class TransferInfo(NamedTuple):
    """What both ends know about the transfer of a micro-batch before it is sent."""

    step: int
    """Number of optimizer steps done."""
    micro: int
    """Index of the micro-batch in the step."""
    exact: bool = False
    """Whether to send the tensors losslessly."""
    samples: tuple[int, ...] = ()
    """Sample ids, the keys of the activation cache; empty = neither read nor update the cache. For rows of a table,
    their indices."""
    lengths: Lengths | None = None
    """Tokens per row; None = the receiver does not know them, or the tensors do not depend on them."""


class Coder(Protocol):
    """One end's conversion between a named tensor and message fields."""

    @property
    def spec(self) -> TensorSpec:
        """Largest shape, and dtype, of the tensor."""
        ...

    def shape(self, info: TransferInfo) -> tuple[int, ...]:
        """Return the shape of the tensor in a transfer."""
        ...

    @property
    def max_bytes(self) -> int:
        """Length of the longest message body, bytes."""
        ...

    def wire(self, info: TransferInfo) -> Wire:
        """Declare the fields of a message."""
        ...

    def cached_wire(self, info: TransferInfo) -> Wire | None:
        """Declare the fields of a message without the cache hits, if all of them are as cached; None = never sent."""
        ...

    def uses_entropy_coding(self, info: TransferInfo) -> bool:
        """Whether the message body is entropy-coded."""
        ...

    def context(self, info: TransferInfo) -> bytes:
        """Return the state that a message depends on, equal at both ends; the message's checksum covers it."""
        ...

    def encode(self, x: Tensor, info: TransferInfo) -> tuple[Tensor, ...]:
        """Return the fields of a tensor, in the order of `wire` or of `cached_wire`, on its device.

        May raise NotFiniteError.
        """
        ...

    def decode(self, fields: tuple[Tensor, ...], info: TransferInfo) -> Tensor:
        """Return the tensor that the fields encode."""
        ...


class StatelessCoder:
    """Coder that encodes every message independently of all others."""

    def __init__(self, codec: Codec, spec: TensorSpec) -> None:
        self._codec = codec
        self._spec = spec

    @property
    def spec(self) -> TensorSpec:
        return self._spec

    @property
    def max_bytes(self) -> int:
        return max(wire_bytes(codec.wire(self._spec.shape, self._spec.dtype)) for codec in (self._codec, EXACT))

    def shape(self, info: TransferInfo) -> tuple[int, ...]:
        return self._spec.shape_for(info.lengths)

    def wire(self, info: TransferInfo) -> Wire:
        return self._codec_of(info).wire(self.shape(info), self._spec.dtype)

    def cached_wire(self, info: TransferInfo) -> Wire | None:
        return None

    def uses_entropy_coding(self, info: TransferInfo) -> bool:
        return self._codec_of(info).entropy_coding

    def context(self, info: TransferInfo) -> bytes:
        return b""

    def encode(self, x: Tensor, info: TransferInfo) -> tuple[Tensor, ...]:
        return self._codec_of(info).encode(x)

    def decode(self, fields: tuple[Tensor, ...], info: TransferInfo) -> Tensor:
        return self._codec_of(info).decode(fields, self.shape(info), self._spec.dtype)

    def _codec_of(self, info: TransferInfo) -> Codec:
        return EXACT if info.exact else self._codec
