"""Checksums of messages and of files: XXH3.

They find damage, not an attack: who can change a file can change its checksum as well. That of a message has 64 bits:
TCP's own 16-bit checksum misses one damaged segment in 65,536, and nothing else covers the memory of the hosts and what
lies between them. That of a file has 128 bits. Both take little of the time in which memory is copied; cryptographic
hashes take several times as long.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest, xxh3_128

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUM_BYTES = 8
REMEDY = (
    "check the network and the memory of both hosts, and that they have the same acsgd; then start the run again, it "
    "resumes from the newest checkpoint"
)
"""What to do about a message that does not match its checksum."""


def checksum(header: bytes, payload: Tensor) -> int:
    """Return the checksum of a header and of the payload that follows it, uint8[n] in host memory. Releases the GIL."""
    return xxh3_64_intdigest(payload.numpy().data, seed=xxh3_64_intdigest(header))


new_file_checksum = xxh3_128
"""Constructor of a hash object as of hashlib, whose hexdigest is the checksum of a file."""


def file_checksum(path: Path) -> str:
    """Return the checksum of a file, hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_file_checksum).hexdigest()


def check_file_checksum(text: str) -> None:
    """Raise ValueError if a text is not the checksum of a file."""
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise ValueError(f"{text[:70]!r} is not a checksum: 32 hexadecimal digits")
