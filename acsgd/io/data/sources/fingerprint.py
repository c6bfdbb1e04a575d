"""Fingerprints of files: cache keys that change when a file may have changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WHOLE_BYTES = 2**20
"""Maximum size of a file whose fingerprint covers every byte, bytes."""
END_BYTES = 2**16
"""Bytes at each end of a larger file that its fingerprint covers."""
SAMPLES = 16
"""Number of samples between the ends, evenly spaced, that the fingerprint of a larger file covers."""
SAMPLE_BYTES = 2**12


def fingerprint_of(path: Path) -> str:
    """Return absolute path, size in bytes, modification time and a hash of both ends and of samples of a file."""
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        digest = _sampled_hash(file.fileno(), status.st_size)
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {digest}"


def version_of(path: Path) -> str:
    """Return size and hash of a file, as `fingerprint_of` does: equal for copies of it on several hosts."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return f"{size} {_sampled_hash(file.fileno(), size)}"


def _sampled_hash(file: int, size: int) -> str:
    """Hash a file of `size` bytes, or parts of it if it is large."""
    digest = hashlib.sha256()
    if size <= WHOLE_BYTES:
        spans = [(0, size)]
    else:
        step = (size - 2 * END_BYTES) // (SAMPLES + 1)
        samples = [(END_BYTES + step * n, SAMPLE_BYTES) for n in range(1, SAMPLES + 1)]
        spans = [(0, END_BYTES), *samples, (size - END_BYTES, END_BYTES)]
    for start, length in spans:
        digest.update(os.pread(file, length, start))
    return digest.hexdigest()
