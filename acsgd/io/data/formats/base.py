"""Interface of formats, and the examples that they make of records: text in segments, no token ids."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from acsgd.io.data.sources.base import Label, ReadOptions, SourceRecord
from acsgd.io.data.sources.text import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AS_TEXT = ":text"
"""End of the name of a field in data.fields whose value is read as text."""

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
    max_prompt: int = 0
    """Maximum number of tokens of the segments that are no targets; 0 = no limit. All examples of a source have the
    same."""
    max_answer: int = 0
    """The same of its only target, the last segment."""

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


@dataclass(frozen=True)
class Format(ABC):
    """What the fields of a record mean. Created with the options and the tokenizer of a run."""

    options: ReadOptions
    tokenizer: PreTrainedTokenizerBase

    required: ClassVar[Sequence[str]]
    """Fields that a record must have. A record with all of them has the format."""
    optional: ClassVar[Sequence[str]] = ()
    """Fields that are read if a record has them."""
    options_read: ClassVar[Sequence[str]] = ()
    """Options of [data] that affect the examples, of those that do not affect all formats."""
    answer: ClassVar[str | None] = None
    """Field with the answer, which a record that is a prompt may lack; None if answers have no field of their own."""

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a record has a value in all required fields."""
        return not any(is_null(fields.get(name)) for name in self.required)

    @abstractmethod
    def example(self, record: SourceRecord) -> Example:
        """Make an example of a record. Raises FormatError; ValueError if no record can have this format."""

    def prompt(self, fields: Mapping[str, Any]) -> Example:
        """Make an example of what stands before the last answer of a record, which may lack that answer.

        Raises as `example`; FormatError if records of this format have no answers that can be generated.
        """
        raise FormatError("has a format without answers that can be generated", "give another --format")

    def unread(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of the fields of a record that have a value and no effect on the example: not declared."""
        declared = (*self.required, *self.optional)
        yield from (name for name, value in fields.items() if name not in declared and has_value(value))


def is_null(value: Any) -> bool:
    """Return whether a value is missing: null, or NaN as tables have it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def has_value(value: Any) -> bool:
    """Return whether a value is neither missing nor an empty string, list or object."""
    return not is_null(value) and not (isinstance(value, str | list | Mapping) and not value)


def string_of(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a string among the fields of a record. Raises FormatError, which lists the fields, if there is none.

    default: value of a field that is missing or null.
    """
    value = fields.get(name)
    if default is not None and is_null(value):
        return default
    if isinstance(value, str):
        return value
    remedy = f'write {{"{name}": "..."}} or name another field, --data.fields "{name}=FIELD"'
    if not (is_null(value) or isinstance(value, list | Mapping)):
        remedy = f'write a string, or read the value as text, --data.fields "{name}={name}{AS_TEXT}"'
    raise FormatError(f'has no string under "{name}"; its fields: {names_of(fields)}', remedy)


def names_of(fields: Mapping[str, Any]) -> str:
    """Return the names of the fields of a record for a message, those of objects as of `field_of`."""
    return excerpt(", ".join(_names(fields)) or "none")


def _names(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f'"{prefix}{name}"{_kind(value)}'


def _kind(value: Any) -> str:
    """Return what a value is that is no string: " (null)"."""
    if isinstance(value, str):
        return ""
    if is_null(value):
        return " (null)" if value is None else " (NaN)"
    kinds = {list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return f" ({kinds.get(type(value), type(value).__name__)})"


def _text_of(value: Any, path: str) -> str:
    """Return the text of a value: of numbers, lists and objects as JSON, of bytes as UTF-8. Raises FormatError."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise FormatError(f'has bytes under "{path}" that are not UTF-8', "convert them, or remove it") from None
    is_json = isinstance(value, bool | int | float | list | Mapping)
    return json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)


def field_of(fields: Mapping[str, Any], path: str) -> Any:
    """Return a field by its name, or by the names of objects within objects: "meta.text".

    With AS_TEXT after it, "meta.score:text", the text of its value. Raises FormatError.
    """
    value: Any = fields
    if path not in fields and path.endswith(AS_TEXT):
        found = field_of(fields, path.removesuffix(AS_TEXT))
        return found if isinstance(found, str) or is_null(found) else _text_of(found, path)
    for name in [path] if path in fields else path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise FormatError(f'has no field "{path}"; its fields: {names_of(fields)}', "correct --data.fields")
        value = value[name]
    return value
