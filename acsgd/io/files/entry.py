"""Cache entries: directories whose files have a checksum per block, verified when a block is first read.

    checksums      CRC-32 of the rest, newline, then JSON: of each file its size in bytes and the CRC-32 of every block
    any files      of any number, such as tokens.npy

To open an entry, its checksums are read, an 8192th of the size of its files. A directory without checksums is not an
entry; an entry that turned out to be corrupt loses them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import weakref
import zlib
from pathlib import Path

import numpy as np

from acsgd.errors import CorruptFileError

CHECKSUMS = "checksums"
BLOCK_BYTES = 2**16
"""Bytes per checksum. A read of a few kilobytes verifies one block, sometimes two."""
MAX_CHECKSUMS_BYTES = 2**30
"""Maximum size of the checksums: those of 8 TiB."""


def seal(directory: Path) -> None:
    """Write the checksums of all files in a directory, which makes it an entry."""
    files = {path.name: _describe(path) for path in sorted(directory.iterdir())}
    raw = json.dumps(files).encode()
    (directory / CHECKSUMS).write_bytes(b"%08x\n" % zlib.crc32(raw) + raw)


class Entry:
    """An entry, opened for reading.

    Raises CorruptFileError if the checksums are missing or corrupt, or a file has changed its size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        checksum, _, raw = _read_checksums(path / CHECKSUMS).partition(b"\n")
        if checksum != b"%08x" % zlib.crc32(raw):
            raise CorruptFileError(path / CHECKSUMS, "is corrupt: its content differs from its checksum")
        self._files = {name: VerifiedFile(path / name, **fields) for name, fields in json.loads(raw).items()}

    def __contains__(self, name: str) -> bool:
        """Whether the entry has a file."""
        return name in self._files

    def file(self, name: str) -> VerifiedFile:
        """Return a file of the entry."""
        return self._files[name]

    def invalidate(self) -> bool:
        """Remove the checksums, so that the entry is not opened again. Return whether that was possible."""
        with contextlib.suppress(OSError):
            (self.path / CHECKSUMS).unlink(missing_ok=True)
            return True
        return False


class VerifiedFile:
    """A file of an entry. Each block is verified before its first use by this object; may be read by several threads.

    Read with pread rather than mapped into memory, where a file that another process truncates would be a SIGBUS.
    size: bytes; crc32: checksums of the blocks, 4 bytes each, as hexadecimal digits.
    """

    def __init__(self, path: Path, size: int, crc32: str) -> None:
        self.path = path
        self.size = size
        self._checksums = np.frombuffer(bytes.fromhex(crc32), dtype="<u4")
        self._is_verified = np.zeros(len(self._checksums), dtype=bool)
        self._file = _open_regular(path)
        weakref.finalize(self, os.close, self._file)
        actual = os.fstat(self._file).st_size
        if actual != size:
            raise CorruptFileError(path, f"is corrupt: it has {actual} bytes, not {size}")

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer at its end. Raises CorruptFileError if they are not as they were written."""
        nbytes = min(nbytes, self.size - start)
        if nbytes <= 0:
            return b""
        for block in range(start // BLOCK_BYTES, -(-(start + nbytes) // BLOCK_BYTES)):
            if not self._is_verified[block]:
                self._verify(block)
        return self._pread(start, nbytes)

    def _verify(self, block: int) -> None:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self.size)
        if zlib.crc32(self._pread(start, end - start)) != self._checksums[block]:
            raise CorruptFileError(self.path, f"is corrupt: bytes {start} to {end} are not as they were written")
        self._is_verified[block] = True

    def _pread(self, start: int, nbytes: int) -> bytes:
        try:
            data = os.pread(self._file, nbytes, start)
        except OSError as error:
            raise CorruptFileError(self.path, f"cannot be read ({error.strerror})") from None
        if len(data) < nbytes:
            actual = os.fstat(self._file).st_size
            raise CorruptFileError(self.path, f"is corrupt: it was cut from {self.size} to {actual} bytes")
        return data


def _open_regular(path: Path) -> int:
    """Open a regular file for reading. Raises CorruptFileError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block
    except OSError as error:
        raise CorruptFileError(path, f"cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CorruptFileError(path, "is corrupt: it is not a file")
    return file


def _read_checksums(path: Path) -> bytes:
    with open(_open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_CHECKSUMS_BYTES:
            raise CorruptFileError(path, f"is corrupt: it has {size} bytes")
        try:
            return file.read()
        except OSError as error:
            raise CorruptFileError(path, f"cannot be read ({error.strerror})") from None


def _describe(path: Path) -> dict[str, int | str]:
    """Return the fields of VerifiedFile for a file."""
    checksums = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksums.append(zlib.crc32(block))
    return {"size": path.stat().st_size, "crc32": np.array(checksums, dtype="<u4").tobytes().hex()}
