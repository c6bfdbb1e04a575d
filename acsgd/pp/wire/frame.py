"""The header of every message between stages: 32 bytes that say what the message is."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

_MAGIC = b"ACS1"
_HEADER = struct.Struct("<4sBBHIIQ8x")  # 8 bytes to spare: fields after it start at a multiple of 16
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """What a message carries."""

    HELLO = 0
    ACTIVATION = 1
    GRADIENT = 2
    TIED_GRADIENT = 3


class Header(NamedTuple):
    """The first bytes of every message."""

    kind: int
    tensor: int
    """Which of the named tensors that travel together."""
    boundary: int
    """The stage before the cut."""
    step: int
    """Optimizer steps done; people count the one under way, which is one more."""
    micro: int
    length: int
    """Bytes that follow."""

    def pack(self) -> bytes:
        """Return the header's 32 bytes."""
        return _HEADER.pack(_MAGIC, *self)

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """Read 32 bytes. Raises ValueError if they are no header."""
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
