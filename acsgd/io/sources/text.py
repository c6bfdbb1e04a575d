"""UTF-8 text in files, plain or *.zst, read in bounded memory; whatever is no text is told, and nothing is guessed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TextIO

import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ZST_BYTES = 2**10
"""Compressed bytes read at a time; a block of 4 may hold 128 KiB, so this bounds what is held to 32 MiB."""
SHOWN_CHARS = 80
"""Characters of a bad line that its message shows."""


class Bad(NamedTuple):
    """What is wrong with a line, to be written after the line's number, and what to do about it."""

    reason: str
    remedy: str


@contextlib.contextmanager
def open_text(path: Path, *, key: str) -> Iterator[TextIO]:
    """Open text, decompressing *.zst; bytes that are not UTF-8 become what `not_utf8` finds.

    key: the configuration key that the file came from. Raises ValueError if a zstd stream is damaged or torn:
    nothing after that can be read.
    """
    try:
        with (
            path.open("rb") as file,
            io.TextIOWrapper(_decompressed(file, path), encoding="utf-8-sig", errors="surrogateescape") as text,
        ):
            yield text
    except zstandard.ZstdError as error:
        raise ValueError(
            f"{key}: {path} is not sound zstd ({error}); test it with zstd -t {path}, and fetch it again"
        ) from None


def not_utf8(line: str) -> Bad | None:
    """Return what is wrong with a line of `open_text` if some of its bytes are not UTF-8."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        first = error.start
        byte = line[first].encode(errors="surrogateescape").hex()
        before = max(0, first - SHOWN_CHARS // 2)
        return Bad(
            f"is not UTF-8 (byte 0x{byte}): {'...' if before else ''}{shown(line[before:])}",
            "convert the file, say with iconv -f LATIN1 -t UTF-8",
        )
    return None


def shown(line: str) -> str:
    """Return the beginning of a line for a message, with the bytes of what cannot be printed escaped."""
    start = line.strip()[: SHOWN_CHARS + 1]
    text = "".join(char if char.isprintable() else _escaped(char) for char in start)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def _escaped(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors="surrogateescape"))


def _decompressed(file: BinaryIO, path: Path) -> BinaryIO:
    return io.BufferedReader(_Stream(_frames(file))) if path.suffix == ".zst" else file


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """Yield what zstd frames hold. zstandard's own stream reader does not tell when the last one is torn."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)  # what zstd --long=31 needs
    frame, unread = None, b""
    while unread or (unread := file.read(ZST_BYTES)):
        frame = frame or decompressor.decompressobj()
        yield frame.decompress(unread)
        unread = frame.unused_data
        if frame.eof:
            frame = None
    if frame:
        raise zstandard.ZstdError("its end is missing")


class _Stream(io.RawIOBase):
    """Chunks of bytes as a file to read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

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
