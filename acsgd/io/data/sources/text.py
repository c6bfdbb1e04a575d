"""Text files as a source: pieces of a text, one document per file or per line."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TextIO

import zstandard

from acsgd.io.data.sources.base import TEXT, BadRecord, RecordCounts, SourceRecord

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PIECE_CHARS = 2**17
"""Minimum length of a piece of a long text, characters. A piece ends at a newline.

A longer line is cut at multiples of this length."""


def pieces_of(text: str) -> Iterator[str]:
    """Yield a text in pieces of at least PIECE_CHARS and less than 2 PIECE_CHARS characters, an empty text as one."""
    yield from [text] if len(text) <= PIECE_CHARS else joined(_lines(text))


def parts_of(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield (line number, part of the line) of a file, parts of at most PIECE_CHARS characters."""
    line = 1
    while part := file.readline(PIECE_CHARS):
        yield line, part
        line += part.endswith("\n")


def joined(parts: Iterable[str]) -> Iterator[str]:
    """Join parts of at most PIECE_CHARS characters into pieces, as `pieces_of` cuts the whole text."""
    held: list[str] = []
    chars = 0
    for part in parts:
        if chars >= PIECE_CHARS:
            yield "".join(held)
            held, chars = [], 0
        held.append(part)
        chars += len(part)
    if held:
        yield "".join(held)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, in parts of at most PIECE_CHARS characters."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start, start + PIECE_CHARS)
        end = newline + 1 if newline >= 0 else start + PIECE_CHARS
        yield text[start:end]
        start = end


def read_text(path: Path, name: str, key: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
    """Yield the lines that are not UTF-8, then the text without them in pieces of at least PIECE_CHARS characters."""
    # in a separate pass, since a line may be longer than a piece and unreadable at its end
    unreadable: set[int] = set()
    with open_text(path, key=key) as file:
        counts.fraction = partial(fraction_read, file)
        for number, part in parts_of(file):
            counts.records = number
            if number not in unreadable and (error := not_utf8(part)):
                yield BadRecord(f"{name}, line {number}", *error)
                unreadable.add(number)
    with open_text(path, key=key) as file:
        counts.fraction = partial(fraction_read, file)
        pieces = joined(part for line, part in parts_of(file) if line not in unreadable)
        piece = next(pieces, None)
        while piece is not None:
            following = next(pieces, None)
            yield SourceRecord({TEXT: piece}, name, ends_document=following is None)
            piece = following


COMPRESSED_BYTES = 2**10
"""Compressed bytes read at a time. 4 bytes of zstd may expand to a block of 128 KiB, so at most 32 MiB are held."""
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
    """Open a text file for reading, decompressing *.zst and *.gz.

    Bytes that are not UTF-8 become lone surrogates: `not_utf8`. key: configuration key to name in errors.
    Raises ValueError if the file cannot be read, or if a compressed stream is corrupt or truncated: nothing after that
    can be read.
    """
    with (
        decompression_errors(str(path), key=key),
        reading(path, key=key),
        path.open("rb") as file,
        io.TextIOWrapper(decompressed(file, path.name), encoding="utf-8-sig", errors="surrogateescape") as text,
    ):
        yield text


@contextlib.contextmanager
def decompression_errors(name: str, *, key: str) -> Iterator[None]:
    """Turn an error of decompressing a file into a ValueError that names the file and the configuration key."""
    try:
        yield
    except (zstandard.ZstdError, zlib.error) as error:
        kind = "gzip" if isinstance(error, zlib.error) else "zstd"
        raise ValueError(
            f"{key}: {name} is not valid {kind} ({error}); check it with {kind} -t {name} and fetch it again"
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
        encoding = "UTF-16" if "\0" in line else "LATIN1"
        return LineError(
            f"is not UTF-8 (byte 0x{byte}): {'...' if before else ''}{excerpt(line[before:])}",
            f"convert the file, for example with iconv -f {encoding} -t UTF-8",
        )
    return None


def excerpt(line: str) -> str:
    """Return the beginning of a line for a message; bytes that cannot be printed are escaped."""
    start = line[: 10 * EXCERPT_CHARS].strip()[: EXCERPT_CHARS + 1]  # without a copy of a long line
    text = "".join(char if char.isprintable() else _escaped(char) for char in start)
    return text if len(text) <= EXCERPT_CHARS else f"{text[: EXCERPT_CHARS - 3]}..."


def _escaped(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors="surrogateescape"))


def decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """Return a file, decompressed if its name ends with .zst or .gz. Reading may raise the errors of the libraries."""
    if not name.endswith((".zst", ".gz")):
        return file
    is_zstd = name.endswith(".zst")
    frames = _frames(file, _new_zstd, zstandard.ZstdError) if is_zstd else _frames(file, _new_gzip, zlib.error)
    return io.BufferedReader(_Stream(frames, file))


def _new_zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()  # what zstd --long=31 needs


def _new_gzip() -> Any:
    return zlib.decompressobj(wbits=31)


def _frames(file: BinaryIO, new: Callable[[], Any], error: type[Exception]) -> Iterator[bytes]:
    """Yield decompressed frames. Unlike the stream readers of the libraries, this detects a truncated last frame.

    new: creates the decompressor of a frame; error: class of its errors.
    """
    frame, unread = None, b""
    while unread or (unread := file.read(COMPRESSED_BYTES)):
        frame = frame or new()
        yield frame.decompress(unread)
        unread = frame.unused_data
        if frame.eof:
            frame = None
    if frame:
        raise error("the last frame is truncated")


class _Stream(io.RawIOBase):
    """Readable raw stream over an iterator of byte chunks, made from a file."""

    def __init__(self, chunks: Iterator[bytes], file: BinaryIO) -> None:
        self._chunks = chunks
        self._file = file
        self._rest = memoryview(b"")

    def fileno(self) -> int:
        return self._file.fileno()

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
