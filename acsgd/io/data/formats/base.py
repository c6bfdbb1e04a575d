"""Interface of formats, and the examples that they make of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from acsgd.io.data.sources.base import Label, ReadOptions, SourceRecord
from acsgd.io.data.sources.text import excerpt

TextSpan = tuple[int, int]
"""First character of a part of a text, and its end."""


class TextSegment(NamedTuple):
    """A part of the text of an example."""

    text: str
    is_target: bool = True
    """Whether its tokens are learned; those of a prompt are not."""


class Example(NamedTuple):
    """One document to train on, or a part of a document that is too long to be tokenized at once.

    Its text is the concatenation of its segments, and is tokenized as a whole.
    """

    segments: tuple[TextSegment, ...]
    ends_document: bool = True
    label: Label | None = None
    has_special_tokens: bool = False
    """Whether the text contains the tokens that begin and end a document, as chat templates write them."""
    control_token: str | None = None
    """First special token of the tokenizer that a message of a chat has in its text; None if there is none."""
    plain: tuple[TextSpan, ...] = ()
    """Spans of the text in which special tokens are ordinary text: where messages have them in theirs."""

    @property
    def text(self) -> str:
        """Text of all segments."""
        return "".join(segment.text for segment in self.segments)


class FormatError(Exception):
    """A record that does not have a format. The message is a predicate: has no string under "text"."""

    def __init__(self, reason: str, remedy: str, *, label: Label | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        """Imperative: what to change in the record or in the options."""
        self.label = label
        """Label of the record if that is why: the model cannot learn it."""


class Format(Protocol):
    """What the fields of a record mean. Created with the options and the tokenizer of a run."""

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a record with these fields has this format."""
        ...

    def example(self, record: SourceRecord) -> Example:
        """Make an example of a record. Raises FormatError; ValueError if no record can have this format."""
        ...


@dataclass(frozen=True)
class OptionsOfFormat:
    """What every format is created with."""

    options: ReadOptions
    tokenizer: PreTrainedTokenizerBase


def has_strings(fields: Mapping[str, Any], *names: str) -> bool:
    """Return whether a record has strings under all names."""
    return all(isinstance(fields.get(name), str) for name in names)


def string_of(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a string among the fields of a record. Raises FormatError, which lists the fields, if there is none.

    default: value of a field that is missing or null.
    """
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise FormatError(
            f'has no string under "{name}"; its fields: {names_of(fields)}',
            f'write {{"{name}": "..."}} or name another field, --data.fields "{name}=FIELD"',
        )
    return value


def names_of(fields: Mapping[str, Any]) -> str:
    """Return the names of the fields of a record for a message, those of objects as of `field_of`."""
    return excerpt(", ".join(_names(fields)) or "none")


def _names(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{prefix}{name}.")
        else:
            kind = " (null)" if value is None else " (a list)" if isinstance(value, list) else ""
            yield f'"{prefix}{name}"{kind}'


def field_of(fields: Mapping[str, Any], path: str) -> Any:
    """Return a field by its name, or by the names of objects within objects: "meta.text". Raises FormatError."""
    value: Any = fields
    for name in [path] if path in fields else path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise FormatError(f'has no field "{path}"; its fields: {names_of(fields)}', "correct --data.fields")
        value = value[name]
    return value
