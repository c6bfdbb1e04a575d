"""Derivation of seeds."""

from __future__ import annotations

import hashlib
import struct


def mix_seed(*parts: int) -> int:
    """Hash integers to a 63-bit seed, so that similar arguments give independent random streams."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
