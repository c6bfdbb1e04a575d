"""Interface of sources of text, and the documents that they yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

OnError = Literal["stop", "skip"]
"""What an unreadable line does: end the run, or be skipped and counted (data.on_error)."""


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


@dataclass(frozen=True)
class NamedSource:
    """Fields common to all sources."""

    name: str
    key: str = "data.sources"
    on_error: OnError = "stop"
