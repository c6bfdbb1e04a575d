"""Interface of sources, and the records that they yield."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

OnError = Literal["stop", "skip"]
"""What an unreadable record does: end the run, or be skipped and counted (data.on_error)."""

Label = int | float | str
"""Class, by its number or name, or value of a regression."""

TEXT = "text"
"""Field of a record that holds a plain text."""

MAX_FIELDS = 20
"""Number of fields without effect that are named."""


@dataclass(frozen=True)
class ReadOptions:
    """How the records of a source are read."""

    on_error: OnError = "stop"
    format: str = "auto"
    """Name of a format; "auto" detects it from the first record (data.format)."""
    fields: tuple[tuple[str, str], ...] = ()
    """Names of fields as the format has them, each with its name in the records (data.fields)."""
    targets: Literal["answers", "all"] = "answers"
    """Which tokens are learned (data.targets)."""
    input_format: str = "__input__"
    output_format: str = "__output__"
    max_prompt: int = 0
    """Maximum number of tokens of a prompt; 0 = no limit (data.max_prompt)."""
    max_answer: int = 0
    split_special_tokens: bool = True
    """Whether special tokens in the text of a message are ordinary text (data.split_special_tokens)."""


class SourceRecord(NamedTuple):
    """One record of a source: a line of JSON, a row of a table, or a piece of a text file."""

    fields: Mapping[str, Any]
    """Values by the names that they have in the source. A text file has one field, TEXT."""
    where: str
    """File and line, for messages."""
    ends_document: bool = True
    """False for a piece of a text file that is too long to be tokenized at once, unless it is the last one."""
    line: str | None = None
    """Line of a file of JSON lines, without its end."""


class BadRecord(NamedTuple):
    """A record that cannot be read."""

    where: str
    reason: str
    """Predicate of a sentence whose subject is the record: "is not JSON"."""
    remedy: str
    """Imperative: what to change in the file."""
    label: Label | None = None
    """Label of the record if that is why: the model cannot learn it."""


@dataclass
class RecordCounts:
    """Number of records read from a source and number of records skipped as unreadable."""

    records: int = 0
    """Records read so far. In files of text or JSON lines every line counts, blank ones too."""
    skipped: int = 0
    first: BadRecord | None = None
    """First skipped record."""
    format: str = ""
    """Name of the format of the records, once it is known."""
    unread: Counter[str] = field(default_factory=Counter)
    """Number of records with a field that has no effect on their examples, by its name."""
    unknown: int = 0
    """Number of their tokens that are unk_token."""
    cursor: Any = None
    """Where the next record of a streamed source begins, a JSON value; None = at its beginning, or not streamed.

    A streamed source begins to read there."""
    fraction: Callable[[], float] | None = field(default=None, compare=False)
    """Returns the fraction of the source that has been read; may be called by any thread. None = unknown."""

    def skip(self, record: BadRecord) -> None:
        """Count a skipped record."""
        self.first = self.first or record
        self.skipped += 1

    def summary(self) -> str | None:
        """Return a clause that describes the skipped records, None if there are none."""
        if not self.first:
            return None
        first = self.first
        return f"skipped {self.skipped} of {self.records} records; the first, {first.where}, {first.reason}"

    def describe_format(self) -> str:
        """Return a clause that names the format."""
        return f'format "{self.format}"' if self.format else "no record has a known format"

    def unknown_summary(self) -> str | None:
        """Return a clause that counts the tokens of unknown text, None if there are none."""
        if not self.unknown:
            return None
        return f"{self.unknown:,} tokens stand for text that the tokenizer does not know (unk_token), and cannot write"

    def unread_summary(self) -> str | None:
        """Return a clause that names the fields without effect, None if there are none."""
        names = [f'"{name}" ({count:,})' for name, count in self.unread.most_common(MAX_FIELDS)]
        more = f", and {rest:,} more" if (rest := len(self.unread) - len(names)) > 0 else ""
        return f"fields that are not read (records with them): {', '.join(names)}{more}" if names else None


class Source(Protocol):
    """One source of records. Creating it reads nothing."""

    @property
    def name(self) -> str:
        """Name, as given in the configuration."""
        ...

    @property
    def key(self) -> str:
        """Configuration key the source was given for, such as data.sources."""
        ...

    @property
    def options(self) -> ReadOptions:
        """How the records are read."""
        ...

    @property
    def fingerprint(self) -> str:
        """Cache key of the records: changes when they may have changed."""
        ...

    def check(self) -> None:
        """Raise ValueError if the source cannot be opened. Does not read the records."""
        ...

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records in order, in bounded memory, with a BadRecord in place of each that cannot be read.

        counts: `records` and `fraction` are updated in place. Raises ValueError that names the file if the rest of it
        cannot be read.
        """
        ...


@dataclass(frozen=True)
class NamedSource:
    """Fields common to all sources."""

    name: str
    key: str = "data.sources"
    options: ReadOptions = ReadOptions()
