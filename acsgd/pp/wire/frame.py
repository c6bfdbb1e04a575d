"""The 32-byte header of every message between stages."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

_MAGIC = b"ACS1"
_HEADER = struct.Struct("<4sBBHIIQ8x")  # 8 spare bytes: the fields after the header start at a multiple of 16
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """Content of a message."""

    HANDSHAKE = 0
    ACTIVATION = 1
    GRADIENT = 2
    TIED_GRADIENT = 3


class Header(NamedTuple):
    """Identity and length of a message."""

    kind: int
    tensor: int
    """Index of the tensor among the named tensors of the channel."""
    boundary: int
    """Index of the stage before the boundary."""
    step: int
    """Number of optimizer steps done; printed as the number of the current step, which is one more."""
    micro: int
    """Index of the micro-batch in the step."""
    length: int
    """Bytes that follow the header."""

    def pack(self) -> bytes:
        """Return the 32 bytes of the header."""
        return _HEADER.pack(_MAGIC, *self)

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """Parse 32 bytes. Raises ValueError if they are not a header."""
        magic, *values = _HEADER.unpack(raw)
        if magic != _MAGIC:
            raise ValueError(f"{raw[:4]!r} instead of {_MAGIC!r}")
        return cls(*values)

    def __str__(self) -> str:
        kind = Kind(self.kind).name.lower().replace("_", " ") if self.kind in list(Kind) else f"kind {self.kind}"
        return (
            f"{kind} {self.tensor} across boundary {self.boundary}-{self.boundary + 1}, step {self.step + 1}, "
            f"micro-batch {self.micro}, {self.length} bytes"
        )
