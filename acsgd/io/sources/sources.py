"""The sources of text a run trains on. To add one, write its class and one line in SOURCES.

A source string lists sources with optional weights: "demo:0.3,path/a.jsonl:0.7". A weight is a share of the
sequences, and so of the tokens. Parsing is cheap and finds every mistake that can be seen without reading.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TextIO

from acsgd.config.spec import suggest
from acsgd.io.sources.text import Bad, not_utf8, open_text, shown

OnBad = Literal["stop", "skip"]
"""What a line that cannot be read does: end the run, or be left out and counted."""

PIECE_CHARS = 2**17
"""Characters after which a text file is cut, at the next newline, to be tokenised in bounded memory.

A line that is longer is cut too, at multiples of as many characters."""


class Piece(NamedTuple):
    """A document, or a part of one that is too long to be held whole."""

    text: str
    ends_document: bool


@dataclass
class Tally:
    """The lines of a source, and those that were left out since they cannot be read."""

    lines: int = 0
    """Lines read so far, blank ones too."""
    skipped: int = 0
    first: int = 0
    """Number of the first line left out, counted from 1."""
    reason: str = ""
    """What is wrong with it."""

    def skip(self, line: int, reason: str) -> None:
        """Count a line that is left out; of the first one, keep what is wrong with it."""
        if not self.skipped:
            self.first, self.reason = line, reason
        self.skipped += 1

    def told(self) -> str | None:
        """Say what was left out, in half a sentence; None if nothing was."""
        if not self.skipped:
            return None
        return f"left out {self.skipped} of {self.lines} lines, the first of which, line {self.first}, {self.reason}"


class Source(Protocol):
    """One source of text. Made from the name the user typed, without reading anything."""

    @property
    def name(self) -> str:
        """As the user typed it."""
        ...

    @property
    def key(self) -> str:
        """The configuration key it was typed for."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the text, or what is left out of it, may have changed."""
        ...

    def check(self) -> None:
        """Raise ValueError, without reading the text, if it cannot be read."""
        ...

    def pieces(self, tally: Tally | None = None) -> Iterator[Piece]:
        """Yield the documents in order, in bounded memory; count in `tally` lines read and lines left out.

        Raises ValueError that names file and line of what cannot be read, unless such lines are to be left out.
        """
        ...


class WeightedSource(NamedTuple):
    """A source, and its share of the sequences; the shares of a mixture sum to 1."""

    source: Source
    weight: float


@dataclass(frozen=True)
class _NamedSource:
    """A source as the user asked for it."""

    name: str
    key: str = "data.sources"
    bad: OnBad = "stop"


@dataclass(frozen=True)
class Demo(_NamedSource):
    """The reference texts of Python's own help(), which every CPython carries: 450 KB of English or more."""

    @property
    def fingerprint(self) -> str:
        """The interpreter's version and a hash of the texts."""
        texts = "\0".join(text for text, _ in self.pieces())
        return f"demo {platform.python_version()} {hashlib.sha256(texts.encode()).hexdigest()}"

    def check(self) -> None:
        """Nothing can be missing."""

    def pieces(self, tally: Tally | None = None) -> Iterator[Piece]:
        """Yield one document per topic, in alphabetical order of the topics."""
        from pydoc_data.topics import topics  # large, and only this source needs it

        for _, text in sorted(topics.items()):
            yield Piece(text, ends_document=True)


@dataclass(frozen=True)
class _File(_NamedSource):
    """A source that is one file. A relative name is relative to the current working directory."""

    @property
    def path(self) -> Path:
        """The file, with ~ expanded."""
        return Path(self.name).expanduser()

    @property
    def fingerprint(self) -> str:
        """Absolute path, size in bytes, time of change, and what bad lines do."""
        status = self.path.stat()
        return f"{self.path.resolve()} {status.st_size} {status.st_mtime_ns} {self.bad}"

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

    def _meet(self, bad: Bad, line: int, tally: Tally) -> None:
        """Count a line that cannot be read, or raise ValueError that names it."""
        if self.bad == "stop":
            raise ValueError(
                f"{self.key}: {self.name}, line {line} {bad.reason}; {bad.remedy}, or leave such lines out with "
                "--data.on_error skip"
            )
        tally.skip(line, bad.reason)


class JsonLines(_File):
    """One document per line, under "text" of a JSON object; blank lines are nothing."""

    def pieces(self, tally: Tally | None = None) -> Iterator[Piece]:
        """Yield each line's text. Raises ValueError that names the file and the line."""
        tally = tally or Tally()
        with open_text(self.path, key=self.key) as file:
            for number, line in enumerate(file, start=1):
                tally.lines = number
                text = _text_of(line) if line.strip() else None
                if isinstance(text, Bad):
                    self._meet(text, number, tally)
                elif text is not None:
                    yield Piece(text, ends_document=True)


class PlainText(_File):
    """A file that is one document. Only bytes that are not UTF-8 make a line bad."""

    def pieces(self, tally: Tally | None = None) -> Iterator[Piece]:
        """Yield the text, cut at newlines where it has them. Raises ValueError that names the file and the line."""
        # first, since a line may be longer than a piece, and bad at its end
        bad_lines = self._bad_lines(tally or Tally())
        with open_text(self.path, key=self.key) as file:
            yield from _joined(part for line, part in _parts(file) if line not in bad_lines)

    def _bad_lines(self, tally: Tally) -> set[int]:
        found: set[int] = set()
        with open_text(self.path, key=self.key) as file:
            for number, part in _parts(file):
                tally.lines = number
                if number not in found and (bad := not_utf8(part)):
                    self._meet(bad, number, tally)
                    found.add(number)
        return found


SOURCES: dict[str, Callable[[str, str, OnBad], Source]] = {
    "demo": Demo,
    "*.jsonl": JsonLines,
    "*.jsonl.zst": JsonLines,
    "*.txt": PlainText,
}
"""Pattern of a source's name -> its class, made from the name, the key it was typed for, and what bad lines do."""


def parse_sources(spec: str, *, key: str = "data.sources", bad: OnBad = "stop") -> tuple[WeightedSource, ...]:
    """Return the sources of a source string, checked to exist, with weights that sum to 1. Reads no text.

    spec: comma-separated "name" or "name:weight"; a weight left out is 1. key: the configuration key it came from,
    for messages; bad: what a line that cannot be read does. Raises ValueError.
    """
    try:
        parts = [_parse(part.strip(), key, bad) for part in spec.split(",")]
    except ValueError as error:
        raise ValueError(f'{key}="{spec}": {error}') from None
    total = math.fsum(part.weight for part in parts)
    return tuple(WeightedSource(part.source, part.weight / total) for part in parts)


def _parse(part: str, key: str, bad: OnBad) -> WeightedSource:
    name, weight = part, "1"
    if ":" in part and _kind(part) is None:
        name, _, weight = (text.strip() for text in part.rpartition(":"))
    kind = _kind(name)
    if kind is None:
        ending = "*" + "".join(Path(name).suffixes) if "." in name else name
        raise ValueError(f'unknown source "{name}"{suggest(ending, SOURCES)}')
    source = kind(name, key, bad)
    source.check()
    return WeightedSource(source, _weight(weight, name))


def _kind(name: str) -> Callable[[str, str, OnBad], Source] | None:
    return next((kind for pattern, kind in SOURCES.items() if fnmatchcase(name, pattern)), None)


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f'weight "{text}" of {name} is not a number greater than 0; write {name}:0.5, say')
    return weight


def _text_of(line: str) -> str | Bad:
    """Return "text" of a JSON object, or what is wrong with the line."""
    if bad := not_utf8(line):
        return bad
    remedy = 'write {"text": "..."}'
    try:
        record = json.loads(line.rstrip("\n"))
    except json.JSONDecodeError as error:
        return Bad(f"is not JSON ({error.msg} at column {error.colno}): {shown(line)}", remedy)
    except (ValueError, RecursionError):  # a number of 5000 digits, a thousand brackets
        return Bad(f"is JSON beyond what Python reads: {shown(line)}", remedy)
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        return Bad(f'has no string under "text": {shown(line)}', remedy)
    try:
        text.encode()
    except UnicodeEncodeError:
        return Bad(f"holds half of a surrogate pair, which is no text: {shown(line)}", "write the whole pair")
    return text


def _parts(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield each line's number and the line, in parts of at most PIECE_CHARS characters."""
    line = 1
    while part := file.readline(PIECE_CHARS):
        yield line, part
        line += part.endswith("\n")


def _joined(parts: Iterable[str]) -> Iterator[Piece]:
    """Join the parts of a document into pieces of PIECE_CHARS characters or more, but less than twice as many."""
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
