"""Plain texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acsgd.io.data.formats.base import Example, OptionsOfFormat, TextSegment, has_strings, string_of
from acsgd.io.data.sources.base import TEXT, SourceRecord


class Text(OptionsOfFormat):
    """A document under "text", all of which is learned."""

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether there is a text."""
        return has_strings(fields, TEXT)

    def example(self, record: SourceRecord) -> Example:
        """Return the text as one segment."""
        return Example((TextSegment(string_of(record.fields, TEXT)),), record.ends_document)
