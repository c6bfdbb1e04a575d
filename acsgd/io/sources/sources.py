"""Sources of text. To add one, write a class that satisfies `Source` and add one line to SOURCES.

data.sources lists sources with optional weights: "demo:0.3,path/a.jsonl:0.7". A weight is a fraction of the
sequences, and so of the tokens. Parsing is cheap: it finds every error that can be found without reading the text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TextIO

from acsgd.config.spec import suggest
from acsgd.errors import kind_of_file
from acsgd.io.sources.text import LineError, excerpt, fraction_read, not_utf8, open_text, reading

OnError = Literal["stop", "skip"]
"""What an unreadable line does: end the run, or be skipped and counted (data.on_error)."""

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


class Piece(NamedTuple):
    """A document, or a part of a document that is too long to be tokenized at once."""

    text: str
    ends_document: bool


@dataclass
class LineCounts:
    """Number of lines read from a source and number of lines skipped as unreadable."""

    lines: int = 0
    """Lines read so far, including blank lines."""
    skipped: int = 0
    first: int = 0
    """Number of the first skipped line, counted from 1."""
    reason: str = ""
    """Why the first skipped line cannot be read."""
    fraction: Callable[[], float] | None = field(default=None, compare=False)
    """Returns the fraction of the file that has been read; may be called by any thread. None = unknown."""

    def skip(self, line: int, reason: str) -> None:
        """Count a skipped line."""
        if not self.skipped:
            self.first, self.reason = line, reason
        self.skipped += 1

    def summary(self) -> str | None:
        """Return a clause that describes the skipped lines, None if there are none."""
        if not self.skipped:
            return None
        return f"skipped {self.skipped} of {self.lines} lines; the first, line {self.first}, {self.reason}"


class Source(Protocol):
    """One source of text. Creating it reads nothing."""

    @property
    def name(self) -> str:
        """Name, as given in the configuration."""
        ...

    @property
    def key(self) -> str:
        """Configuration key the source was given for, such as data.sources."""
        ...

    @property
    def fingerprint(self) -> str:
        """Cache key of the text: changes when the text, or the lines skipped from it, may have changed."""
        ...

    def check(self) -> None:
        """Raise ValueError if the source cannot be opened. Does not read the text."""
        ...

    def pieces(self, counts: LineCounts | None = None) -> Iterator[Piece]:
        """Yield the documents in order, in bounded memory.

        counts: updated in place. Raises ValueError that names file and line if a line cannot be read and
        data.on_error is "stop".
        """
        ...


class WeightedSource(NamedTuple):
    """A source and its fraction of the sequences. The weights of a mixture sum to 1."""

    source: Source
    weight: float


@dataclass(frozen=True)
class _NamedSource:
    """Fields common to all sources."""

    name: str
    key: str = "data.sources"
    on_error: OnError = "stop"


@dataclass(frozen=True)
class Demo(_NamedSource):
    """Reference texts of Python's help(), part of every CPython: at least 450 KB of English, for demonstrations."""

    @property
    def fingerprint(self) -> str:
        """Version of the interpreter and hash of the texts."""
        texts = "\0".join(text for text, _ in self.pieces())
        return f"demo {platform.python_version()} {hashlib.sha256(texts.encode()).hexdigest()}"

    def check(self) -> None:
        """Do nothing: the texts are part of Python."""

    def pieces(self, counts: LineCounts | None = None) -> Iterator[Piece]:
        """Yield one document per topic, in alphabetical order of the topics."""
        from pydoc_data.topics import topics  # large; only this source needs it

        for _, text in sorted(topics.items()):
            yield Piece(text, ends_document=True)


@dataclass(frozen=True)
class _File(_NamedSource):
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


SOURCES: dict[str, Callable[[str, str, OnError], Source]] = {
    "demo": Demo,
    "*.jsonl": JsonLines,
    "*.jsonl.zst": JsonLines,
    "*.txt": PlainText,
}
"""Pattern of a source name -> constructor, called with (name, configuration key, on_error)."""


def parse_sources(spec: str, *, key: str = "data.sources", on_error: OnError = "stop") -> tuple[WeightedSource, ...]:
    """Return the sources that a string lists, with weights that sum to 1. Checks that they exist; reads no text.

    spec: comma-separated "name" or "name:weight"; the default weight is 1. key: configuration key to name in errors.
    Raises ValueError.
    """
    try:
        parts = [_parse(part.strip(), key, on_error) for part in spec.split(",")]
    except ValueError as error:
        raise ValueError(f'{key}="{spec}": {error}') from None
    total = math.fsum(part.weight for part in parts)
    return tuple(WeightedSource(part.source, part.weight / total) for part in parts)


def _parse(part: str, key: str, on_error: OnError) -> WeightedSource:
    name, weight = part, "1"
    if ":" in part and _kind(part) is None:
        name, _, weight = (text.strip() for text in part.rpartition(":"))
    kind = _kind(name)
    if kind is None:
        ending = "*" + "".join(Path(name).suffixes) if "." in name else name
        raise ValueError(f'unknown source "{name}"{suggest(ending, SOURCES)}')
    source = kind(name, key, on_error)
    source.check()
    return WeightedSource(source, _weight(weight, name))


def _kind(name: str) -> Callable[[str, str, OnError], Source] | None:
    return next((kind for pattern, kind in SOURCES.items() if fnmatchcase(name, pattern)), None)


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f'weight "{text}" of {name} is not a number greater than 0; write, for example, {name}:0.5')
    return weight


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
