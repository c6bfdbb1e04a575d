"""Files as sources: one JSON object per line, or plain text; read in bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from acsgd.errors import kind_of_file
from acsgd.io.sources.base import TEXT, BadRecord, NamedSource, Record, RecordCounts
from acsgd.io.sources.pieces import joined, parts_of
from acsgd.io.sources.text import LineError, excerpt, fraction_read, not_utf8, open_text, reading

MAX_RECORD_CHARS = 2**27
"""Maximum length of a line of JSON, characters. Such a line takes 4 to 12 bytes of memory per character."""
SKIPPED_CHARS = 2**17
"""Characters of a longer line that are read at a time."""
REMEDY = 'write one JSON object per line, such as {"text": "..."}'

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

    def _line(self, number: int) -> str:
        """Return file and line, for messages."""
        return f"{self.name}, line {number}"

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


class JsonLines(_File):
    """One JSON object per line. Blank lines are ignored."""

    def records(self, counts: RecordCounts) -> Iterator[Record | BadRecord]:
        """Yield the object of each line."""
        with open_text(self.path, key=self.key) as file:
            counts.fraction = partial(fraction_read, file)
            for number, line in enumerate(_lines(file), start=1):
                counts.records = number
                fields = _object(line) if isinstance(line, str) else line
                if isinstance(fields, LineError):
                    yield BadRecord(self._line(number), *fields)
                elif fields is not None:
                    yield Record(fields, self._line(number))


class PlainText(_File):
    """A file that is one document. A line is unreadable if it is not UTF-8."""

    def records(self, counts: RecordCounts) -> Iterator[Record | BadRecord]:
        """Yield the unreadable lines, then the text without them in pieces of at least PIECE_CHARS characters."""
        # in a pass of its own, since a line may be longer than a piece and unreadable at its end
        unreadable: set[int] = set()
        with open_text(self.path, key=self.key) as file:
            counts.fraction = partial(fraction_read, file)
            for number, part in parts_of(file):
                counts.records = number
                if number not in unreadable and (error := not_utf8(part)):
                    yield BadRecord(self._line(number), *error)
                    unreadable.add(number)
        with open_text(self.path, key=self.key) as file:
            counts.fraction = partial(fraction_read, file)
            pieces = joined(part for line, part in parts_of(file) if line not in unreadable)
            piece = next(pieces, None)
            while piece is not None:
                following = next(pieces, None)
                yield Record({TEXT: piece}, self.name, ends_document=following is None)
                piece = following


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


def _lines(file: TextIO) -> Iterator[str | LineError]:
    """Yield each line, or an error in place of a line of more than MAX_RECORD_CHARS characters."""
    while line := file.readline(MAX_RECORD_CHARS + 1):
        if len(line) <= MAX_RECORD_CHARS or line.endswith("\n"):
            yield line
            continue
        yield LineError(
            f"has more than {MAX_RECORD_CHARS} characters: {excerpt(line)}",
            "split the record or write its text to a *.txt file",
        )
        while (line := file.readline(SKIPPED_CHARS)) and not line.endswith("\n"):
            pass


def _object(line: str) -> Mapping[str, Any] | LineError | None:
    """Return the JSON object in a line, or why there is none; None for a blank line."""
    if line.isspace():
        return None
    if error := not_utf8(line):
        return error
    try:
        fields = json.loads(line.rstrip("\n"))
    except json.JSONDecodeError as invalid:
        return LineError(f"is not JSON ({invalid.msg} at column {invalid.colno}): {excerpt(line)}", REMEDY)
    except (ValueError, RecursionError):  # a number of 5000 digits, a thousand brackets
        return LineError(f"exceeds the limits of the JSON parser: {excerpt(line)}", REMEDY)
    if not isinstance(fields, dict):
        return LineError(f"is not a JSON object: {excerpt(line)}", REMEDY)
    return fields
