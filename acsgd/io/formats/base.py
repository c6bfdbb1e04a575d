"""Interface of formats, and the examples that they make of records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from acsgd.io.sources.base import Record
from acsgd.io.sources.text import excerpt


class Segment(NamedTuple):
    """A part of the text of an example."""

    text: str
    is_target: bool = True
    """Whether its tokens are learned; those of a prompt are not."""


class Example(NamedTuple):
    """One document to train on, or a part of a document that is too long to be tokenized at once.

    Its text is the concatenation of its segments, and is tokenized as a whole.
    """

    segments: tuple[Segment, ...]
    ends_document: bool = True
    label: int | float | str | None = None
    """Class, or value of a regression."""
    has_special_tokens: bool = False
    """Whether the text contains the tokens that begin and end a document, as chat templates write them."""

    @property
    def text(self) -> str:
        """Text of all segments."""
        return "".join(segment.text for segment in self.segments)


class FormatError(Exception):
    """A record that does not have a format. The message is a predicate: "has no string under "text""."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        """Imperative: what to change in the record or in the options."""


class Format(Protocol):
    """What the fields of a record mean."""

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a record with these fields has this format."""
        ...

    def example(self, record: Record) -> Example:
        """Make an example of a record. Raises FormatError."""
        ...


def string_of(fields: Mapping[str, Any], name: str) -> str:
    """Return a string among the fields of a record. Raises FormatError, which lists the fields, if there is none."""
    value = fields.get(name)
    if not isinstance(value, str):
        found = excerpt(", ".join(f'"{field}"' for field in fields) or "none")
        raise FormatError(f'has no string under "{name}"; its fields: {found}', f'write {{"{name}": "..."}}')
    return value
