"""Files as sources of text: one JSON object per line, or plain text; read in bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from acsgd.errors import kind_of_file
from acsgd.io.sources.base import LineCounts, NamedSource, Piece
from acsgd.io.sources.text import LineError, excerpt, fraction_read, not_utf8, open_text, reading

PIECE_CHARS = 2**17
"""Minimum length of a piece of a long document, characters. A piece ends at a newline.

A longer line is cut at multiples of this length."""

MAX_RECORD_CHARS = 2**27
"""Maximum length of a line of JSON, characters. Such a line takes 4 to 12 bytes of memory per character."""

WHOLE_BYTES = 2**20
"""Maximum size of a file whose fingerprint covers every byte, bytes."""
END_BYTES = 2**16
"""Bytes at each end of a larger file that its fingerprint covers."""
SAMPLES = 16
"""Number of samples between the ends, evenly spaced, that the fingerprint of a larger file covers."""
SAMPLE_BYTES = 2**12


@dataclass(frozen=True)
class _File(NamedSource):
    """One file. A relative name is relative to the current working directory."""

    @property
    def path(self) -> Path:
        """Path with ~ expanded."""
        return Path(self.name).expanduser()

    @property
    def fingerprint(self) -> str:
        """Absolute path, size in bytes, modification time, data.on_error and a hash of both ends and of samples.

        Raises ValueError if the file cannot be read.
        """
        with reading(self.path, key=self.key), self.path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            digest = _sampled_hash(file.fileno(), status.st_size)
        return f"{self.path.resolve()} {status.st_size} {status.st_mtime_ns} {self.on_error} {digest}"

    def check(self) -> None:
        """Raise ValueError unless the path is a readable, non-empty file."""
        try:
            self.name.encode()
            status = self.path.stat()
        except UnicodeEncodeError:
            raise ValueError(f"{self.name!a} is not a UTF-8 name; rename the file") from None
        except FileNotFoundError:
            target = f", a link to {os.readlink(self.path)}," if self.path.is_symlink() else ""
            raise ValueError(
                f"{self.name}{target} does not exist in {Path.cwd()}; give the path of an existing file"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:  # ~user of an unknown user, a null byte
            cause = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{self.name} cannot be opened ({cause}); give the path of an existing file") from None
        if stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{self.name} is not a file; give a file inside it, {self.name.rstrip('/')}/...")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{self.name} is a {kind_of_file(status.st_mode)}; its text is read more than once: write it to a file"
            )
        if not os.access(self.path, os.R_OK):
            raise ValueError(f"{self.name} is not readable by this user; type: chmod +r {self.name}")
        if not status.st_size:
            raise ValueError(f"{self.name} is empty; give a file with text")

    def _handle(self, error: LineError, line: int, counts: LineCounts) -> None:
        """Count an unreadable line as skipped, or raise ValueError, as data.on_error says."""
        if self.on_error == "stop":
            raise ValueError(
                f"{self.key}: {self.name}, line {line} {error.reason}; {error.remedy}, or skip such lines with "
                "--data.on_error skip"
            )
        counts.skip(line, error.reason)


class JsonLines(_File):
    """One JSON object per line, whose "text" is a document. Blank lines are ignored."""

    def pieces(self, counts: LineCounts | None = None) -> Iterator[Piece]:
        """Yield the text of each line, a long one in pieces of at least PIECE_CHARS characters."""
        counts = counts or LineCounts()
        with open_text(self.path, key=self.key) as file:
            counts.fraction = partial(fraction_read, file)
            for number, line in enumerate(_records(file), start=1):
                counts.lines = number
                text = _text_of(line) if isinstance(line, str) else line
                if isinstance(text, LineError):
                    self._handle(text, number, counts)
                elif text is not None:
                    yield from _joined(_lines(text))


class PlainText(_File):
    """A file that is one document. A line is unreadable if it is not UTF-8."""

    def pieces(self, counts: LineCounts | None = None) -> Iterator[Piece]:
        """Yield the text in pieces of at least PIECE_CHARS characters."""
        # in a pass of its own, since a line may be longer than a piece and unreadable at its end
        counts = counts or LineCounts()
        unreadable = self._unreadable_lines(counts)
        with open_text(self.path, key=self.key) as file:
            counts.fraction = partial(fraction_read, file)
            yield from _joined(part for line, part in _parts(file) if line not in unreadable)

    def _unreadable_lines(self, counts: LineCounts) -> set[int]:
        found: set[int] = set()
        with open_text(self.path, key=self.key) as file:
            counts.fraction = partial(fraction_read, file)
            for number, part in _parts(file):
                counts.lines = number
                if number not in found and (error := not_utf8(part)):
                    self._handle(error, number, counts)
                    found.add(number)
        return found


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


def _records(file: TextIO) -> Iterator[str | LineError]:
    """Yield each line, or an error in place of a line of more than MAX_RECORD_CHARS characters."""
    while line := file.readline(MAX_RECORD_CHARS + 1):
        if len(line) <= MAX_RECORD_CHARS or line.endswith("\n"):
            yield line
            continue
        yield LineError(
            f"has more than {MAX_RECORD_CHARS} characters: {excerpt(line)}",
            "split the record or write its text to a *.txt file",
        )
        while (line := file.readline(PIECE_CHARS)) and not line.endswith("\n"):
            pass


def _text_of(line: str) -> str | LineError | None:
    """Return "text" of a JSON object, or why there is none; None for a blank line."""
    if line.isspace():
        return None
    if error := not_utf8(line):
        return error
    remedy = 'write {"text": "..."}'
    try:
        record = json.loads(line.rstrip("\n"))
    except json.JSONDecodeError as invalid:
        return LineError(f"is not JSON ({invalid.msg} at column {invalid.colno}): {excerpt(line)}", remedy)
    except (ValueError, RecursionError):  # a number of 5000 digits, a thousand brackets
        return LineError(f"exceeds the limits of the JSON parser: {excerpt(line)}", remedy)
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        return LineError(f'has no string under "text": {excerpt(line)}', remedy)
    try:
        text.encode()
    except UnicodeEncodeError:
        return LineError(f"has a lone surrogate, which is not valid text: {excerpt(line)}", "write the whole pair")
    return text


def _parts(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield (line number, part of the line), parts of at most PIECE_CHARS characters."""
    line = 1
    while part := file.readline(PIECE_CHARS):
        yield line, part
        line += part.endswith("\n")


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, in parts of at most PIECE_CHARS characters; a short text as a whole."""
    if len(text) <= PIECE_CHARS:
        yield text
        return
    start = 0
    while start < len(text):
        newline = text.find("\n", start, start + PIECE_CHARS)
        end = newline + 1 if newline >= 0 else start + PIECE_CHARS
        yield text[start:end]
        start = end


def _joined(parts: Iterable[str]) -> Iterator[Piece]:
    """Join the parts of a document into pieces of at least PIECE_CHARS and less than 2 PIECE_CHARS characters."""
    held: list[str] = []
    chars = 0
    for part in parts:
        if chars >= PIECE_CHARS:
            yield Piece("".join(held), ends_document=False)
            held, chars = [], 0
        held.append(part)
        chars += len(part)
    if held:
        yield Piece("".join(held), ends_document=True)
