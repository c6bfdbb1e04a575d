"""The sources of text a run trains on. To add one, write its class and one line in TASKS.

A task string lists sources with optional weights: "demo:0.3,path/a.jsonl:0.7". A weight is a share of the
sequences, and so of the tokens. Parsing is cheap and finds every mistake that can be seen without reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TextIO, cast

import zstandard

from acsgd.registry import suggest

PIECE_CHARS = 2**17
"""Characters after which a text file is cut, at the next newline, to be tokenised in bounded memory."""


class Piece(NamedTuple):
    """A document, or a part of one that is too long to be held whole."""

    text: str
    ends_document: bool


class Task(Protocol):
    """One source of text. Made from the name the user typed, without reading anything."""

    @property
    def name(self) -> str:
        """As the user typed it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the text may have changed."""
        ...

    def check(self) -> None:
        """Raise ValueError, without reading the text, if it cannot be read."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Yield the documents in order, in bounded memory. Raises ValueError that names file and line."""
        ...


class WeightedTask(NamedTuple):
    """A source, and its share of the sequences; the shares of a mixture sum to 1."""

    task: Task
    weight: float


@dataclass(frozen=True)
class Demo:
    """The reference texts of Python's own help(), which every CPython carries: 450 KB of English or more."""

    name: str

    @property
    def fingerprint(self) -> str:
        """The interpreter's version and a hash of the texts."""
        texts = "\0".join(text for text, _ in self.pieces())
        return f"demo {platform.python_version()} {hashlib.sha256(texts.encode()).hexdigest()}"

    def check(self) -> None:
        """Nothing can be missing."""

    def pieces(self) -> Iterator[Piece]:
        """Yield one document per topic, in alphabetical order of the topics."""
        from pydoc_data.topics import topics  # large, and only this task needs it

        for _, text in sorted(topics.items()):
            yield Piece(text, ends_document=True)


@dataclass(frozen=True)
class _File:
    """A task that is one file. A relative name is relative to the current working directory."""

    name: str

    @property
    def path(self) -> Path:
        """The file, with ~ expanded."""
        return Path(self.name).expanduser()

    @property
    def fingerprint(self) -> str:
        """Absolute path, size in bytes and time of change."""
        status = self.path.stat()
        return f"{self.path.resolve()} {status.st_size} {status.st_mtime_ns}"

    def check(self) -> None:
        """Raise ValueError unless it is a readable file that is not empty."""
        if not self.path.exists():
            raise ValueError(f"{self.name} does not exist in {Path.cwd()}; give the path of an existing file")
        if not self.path.is_file():
            raise ValueError(f"{self.name} is not a file; give a file in it, as {self.name.rstrip('/')}/...")
        if not os.access(self.path, os.R_OK):
            raise ValueError(f"{self.name} may not be read by this user; type: chmod +r {self.name}")
        if not self.path.stat().st_size:
            raise ValueError(f"{self.name} is empty; give a file with text")


class JsonLines(_File):
    """One document per line, under "text" of a JSON object; blank lines are skipped."""

    def pieces(self) -> Iterator[Piece]:
        """Yield each line's text. Raises ValueError that names the file and the line."""
        with _open_text(self.path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    text = _text_of(line, where=f"data.task: {self.name}, line {number}")
                    yield Piece(text, ends_document=True)


class PlainText(_File):
    """A file that is one document."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the text, cut at newlines."""
        with _open_text(self.path) as file:
            text = _read_lines(file)
            while text:
                following = _read_lines(file)
                yield Piece(text, ends_document=not following)
                text = following


TASKS: dict[str, Callable[[str], Task]] = {
    "demo": Demo,
    "*.jsonl": JsonLines,
    "*.jsonl.zst": JsonLines,
    "*.txt": PlainText,
}
"""Pattern of a source's name -> its class, made from the name."""


def parse_tasks(spec: str) -> tuple[WeightedTask, ...]:
    """Return the sources of `data.task`, checked to exist, with weights that sum to 1. Reads no text.

    spec: comma-separated "name" or "name:weight"; a weight left out is 1. Raises ValueError.
    """
    try:
        parts = [_parse(part.strip()) for part in spec.split(",")]
    except ValueError as error:
        raise ValueError(f'data.task="{spec}": {error}') from None
    total = math.fsum(part.weight for part in parts)
    return tuple(WeightedTask(part.task, part.weight / total) for part in parts)


def _parse(part: str) -> WeightedTask:
    name, weight = part, "1"
    if ":" in part and _kind(part) is None:
        name, _, weight = (text.strip() for text in part.rpartition(":"))
    kind = _kind(name)
    if kind is None:
        ending = "*" + "".join(Path(name).suffixes) if "." in name else name
        raise ValueError(f'unknown source "{name}"{suggest(ending, TASKS)}')
    task = kind(name)
    task.check()
    return WeightedTask(task, _weight(weight, name))


def _kind(name: str) -> Callable[[str], Task] | None:
    return next((kind for pattern, kind in TASKS.items() if fnmatchcase(name, pattern)), None)


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f'weight "{text}" of {name} is not a number greater than 0; write {name}:0.5, say')
    return weight


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """Open UTF-8 text, decompressing *.zst. Raises ValueError where it is not what it should be."""
    try:
        with (
            path.open("rb") as file,
            io.TextIOWrapper(_decompressed(file, path), encoding="utf-8-sig") as text,
        ):
            yield text
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.task: {path} is not UTF-8 ({error.reason}); convert it, say with iconv -f LATIN1 -t UTF-8"
        ) from None
    except zstandard.ZstdError as error:
        raise ValueError(f"data.task: {path} is not sound zstd ({error}); test it: zstd -t {path}") from None


def _decompressed(file: BinaryIO, path: Path) -> BinaryIO:
    if path.suffix != ".zst":
        return file
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)  # what zstd --long=31 needs
    return cast(BinaryIO, decompressor.stream_reader(file, read_across_frames=True))


def _read_lines(file: TextIO) -> str:
    """Read PIECE_CHARS and on to the end of the line, but never more than twice as much."""
    return file.read(PIECE_CHARS) + file.readline(PIECE_CHARS)


def _text_of(line: str, *, where: str) -> str:
    """Return "text" of a JSON object."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f'{where} is not JSON ({error}): {_cut(line)}; write {{"text": "..."}}') from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{where} has no string under "text": {_cut(line)}; write {{"text": "..."}}')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} holds half of a surrogate pair, which is no text: {_cut(line)}") from None
    return text


def _cut(line: str) -> str:
    """Return at most 80 characters of a line, for an error message."""
    line = line.strip()
    return line if len(line) <= 80 else f"{line[:77]}..."
