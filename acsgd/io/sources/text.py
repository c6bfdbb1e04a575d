"""UTF-8 text files, plain or zstd-compressed, read in bounded memory. Invalid bytes are reported, never replaced."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TextIO

import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ZST_BYTES = 2**10
"""Compressed bytes read at a time. 4 bytes may expand to a block of 128 KiB, so at most 32 MiB are held."""
EXCERPT_CHARS = 80
"""Maximum length of the excerpt in the message about a line, characters."""


class LineError(NamedTuple):
    """Why a line cannot be read."""

    reason: str
    """Predicate of a sentence whose subject is the line: "is not JSON"."""
    remedy: str
    """Imperative: what to change in the file."""


@contextlib.contextmanager
def open_text(path: Path, *, key: str) -> Iterator[TextIO]:
    """Open a text file for reading, decompressing *.zst. Bytes that are not UTF-8 become lone surrogates: `not_utf8`.

    key: configuration key to name in errors. Raises ValueError if the file cannot be read, or if a zstd stream is
    corrupt or truncated: nothing after that can be read.
    """
    try:
        with (
            reading(path, key=key),
            path.open("rb") as file,
            io.TextIOWrapper(_decompressed(file, path), encoding="utf-8-sig", errors="surrogateescape") as text,
        ):
            yield text
    except zstandard.ZstdError as error:
        raise ValueError(
            f"{key}: {path} is not valid zstd ({error}); check it with zstd -t {path} and fetch it again"
        ) from None


@contextlib.contextmanager
def reading(path: Path, *, key: str) -> Iterator[None]:
    """Turn an OSError of reading a file into a ValueError that names the file and the configuration key."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{key}: {path} cannot be read ({error.strerror}); check the file and its disk") from None


def fraction_read(file: TextIO) -> float:
    """Return the fraction of the bytes of a file of `open_text` that has been read. May be called by any thread."""
    with contextlib.suppress(ValueError, OSError):  # closed
        return os.lseek(file.fileno(), 0, os.SEEK_CUR) / os.fstat(file.fileno()).st_size
    return 1.0


def not_utf8(line: str) -> LineError | None:
    """Return an error if a line of `open_text` has bytes that are not UTF-8."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        first = error.start
        byte = line[first].encode(errors="surrogateescape").hex()
        before = max(0, first - EXCERPT_CHARS // 2)
        return LineError(
            f"is not UTF-8 (byte 0x{byte}): {'...' if before else ''}{excerpt(line[before:])}",
            "convert the file, for example with iconv -f LATIN1 -t UTF-8",
        )
    return None


def excerpt(line: str) -> str:
    """Return the beginning of a line for a message; bytes that cannot be printed are escaped."""
    start = line[: 10 * EXCERPT_CHARS].strip()[: EXCERPT_CHARS + 1]  # without a copy of a long line
    text = "".join(char if char.isprintable() else _escaped(char) for char in start)
    return text if len(text) <= EXCERPT_CHARS else f"{text[: EXCERPT_CHARS - 3]}..."


def _escaped(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors="surrogateescape"))


def _decompressed(file: BinaryIO, path: Path) -> BinaryIO:
    return io.BufferedReader(_Stream(_frames(file), file.fileno())) if path.suffix == ".zst" else file


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """Yield decompressed zstd frames. Unlike zstandard's stream reader, this detects a truncated last frame."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)  # what zstd --long=31 needs
    frame, unread = None, b""
    while unread or (unread := file.read(ZST_BYTES)):
        frame = frame or decompressor.decompressobj()
        yield frame.decompress(unread)
        unread = frame.unused_data
        if frame.eof:
            frame = None
    if frame:
        raise zstandard.ZstdError("the last frame is truncated")


class _Stream(io.RawIOBase):
    """Readable raw stream over an iterator of byte chunks, made from the file with a descriptor."""

    def __init__(self, chunks: Iterator[bytes], descriptor: int) -> None:
        self._chunks = chunks
        self._descriptor = descriptor
        self._rest = memoryview(b"")

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        target = memoryview(buffer)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
