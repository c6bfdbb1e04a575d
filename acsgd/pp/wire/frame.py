"""The 48-byte header of every message between stages, with the checksum that its receiver verifies."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.io.files.checksum import checksum
from acsgd.layers.batch import Lengths

_MAGIC = b"ACS5"
_IDENTITY = struct.Struct("<4sBBHIIQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _IDENTITY.size + _CHECKSUM.size
"""A multiple of 16, so that the fields after the header are aligned."""
LENGTH_BYTES = slice(16, 24)
"""Where a header has the length of the message."""


class MessageKind(IntEnum):
    """Content of a message."""

    HANDSHAKE = 0
    ACTIVATION = 1
    GRADIENT = 2
    TIED_GRADIENT = 3
    """Whole gradient of a weight that several ranks have copies of."""
    TABLE_IDS = 4
    """Request for rows of a table."""
    TABLE_ROWS = 5
    TABLE_GRADIENTS = 6
    """Gradients of these rows."""
    CACHED_ACTIVATION = 7
    """Activations of which no cache hit is sent, since all are as cached."""

    @property
    def plural(self) -> str:
        """Several of these messages in words."""
        return self.name.lower().replace("_", " ").removesuffix("s") + "s"

    @property
    def is_of_weight(self) -> bool:
        """Whether the message is about a tied weight, not about the activations of a micro-batch."""
        return MessageKind.TIED_GRADIENT <= self <= MessageKind.TABLE_GRADIENTS


class Header(NamedTuple):
    """Identity and length of a message, and the lengths of its rows."""

    kind: int
    tensor: int
    """Index of the tensor among the named tensors of the channel."""
    boundary: int
    """Index of the stage before the boundary; of a tied weight, its number."""
    step: int
    """Number of optimizer steps done; printed as the number of the current step, which is one more."""
    micro: int
    """Index of the micro-batch in the step."""
    length: int
    """Bytes that follow the header."""
    sequence: int = 0
    """Tokens per row of the micro-batch: of its `Lengths`; of a table, number of rows. 0 = the message does not depend
    on them."""
    target: int = 0
    """Tokens per row for the decoder after an encoder; also of its `Lengths`."""

    @property
    def lengths(self) -> Lengths:
        """Tokens per row of the micro-batch."""
        return Lengths(self.sequence, self.target)

    def pack(self, payload: Tensor, context: bytes = b"") -> bytes:
        """Return the 48 bytes of the header of a message.

        payload: uint8[length] in host memory; context: covered by the checksum, but not sent.
        """
        identity = _IDENTITY.pack(_MAGIC, *self)
        return identity + _CHECKSUM.pack(checksum(identity + context, payload))

    def packed(self) -> Tensor:
        """Return the header of a message without payload, or of one whose payload is not verified, uint8[48]."""
        return torch.frombuffer(bytearray(self.pack(torch.empty(0, dtype=torch.uint8))), dtype=torch.uint8)

    @classmethod
    def unpack(cls, message: Tensor, context: bytes = b"") -> Header:
        """Return the header of a message, uint8[n] in host memory; bytes after its payload are ignored.

        Raises ValueError if the message does not start with a header, or if header, context and payload do not match
        their checksum.
        """
        raw = message[:HEADER_BYTES].numpy().tobytes()
        identity, (expected,) = raw[: _IDENTITY.size], _CHECKSUM.unpack(raw[_IDENTITY.size :])
        magic, *values = _IDENTITY.unpack(identity)
        if magic != _MAGIC:
            raise ValueError(f"it starts with {magic!r} instead of {_MAGIC!r}")
        header = cls(*values)
        end = min(HEADER_BYTES + header.length, len(message))  # a handshake has no payload; a corrupt length, any value
        if (actual := checksum(identity + context, message[HEADER_BYTES:end])) != expected:
            raise ValueError(f"its checksum is {actual:016x} instead of {expected:016x}")
        return header

    def __str__(self) -> str:
        kind = (
            MessageKind(self.kind).name.lower().replace("_", " ")
            if self.kind in list(MessageKind)
            else f"kind {self.kind}"
        )
        if self.kind in list(MessageKind) and MessageKind(self.kind).is_of_weight:
            rows = f", {self.sequence} rows" if self.sequence else ""
            return f"{kind} of tied weight {self.boundary}, step {self.step + 1}{rows}, {self.length} bytes"
        rows = f" with rows of {' and '.join(str(n) for n in self.lengths if n)} tokens" if self.sequence else ""
        return (
            f"{kind} {self.tensor} across boundary {self.boundary}-{self.boundary + 1}, step {self.step + 1}, "
            f"micro-batch {self.micro}{rows}, {self.length} bytes"
        )
