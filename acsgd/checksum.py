"""The checksum of a message: XXH3, 64 bits.

A message takes less than a hundredth of the time of its encoding to 4 bits, at 60 GB/s. TCP's own 16-bit checksum
misses one damaged segment in 65,536, and nothing else covers the memory of the hosts and what lies between them.
"""

from __future__ import annotations

from torch import Tensor
from xxhash import xxh3_64_intdigest

CHECKSUM_BYTES = 8
REMEDY = (
    "check the network and the memory of both hosts, and that they have the same acsgd; then start the run again, it "
    "resumes from the newest checkpoint"
)
"""What to do about a message that does not match its checksum."""


def checksum(header: bytes, payload: Tensor) -> int:
    """Return the checksum of a header and of the payload that follows it, uint8[n] in host memory. Releases the GIL."""
    return xxh3_64_intdigest(payload.numpy().data, seed=xxh3_64_intdigest(header))
