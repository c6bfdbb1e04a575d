"""Plain texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acsgd.io.formats.base import Example, Segment, string_of
from acsgd.io.sources.base import TEXT, Record


@dataclass(frozen=True)
class Text:
    """A document under "text", all of which is learned."""

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether there is a text."""
        return isinstance(fields.get(TEXT), str)

    def example(self, record: Record) -> Example:
        """Return the text as one segment."""
        return Example((Segment(string_of(record.fields, TEXT)),), record.ends_document)
