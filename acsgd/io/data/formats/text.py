"""Plain texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acsgd.io.data.formats.base import Example, Format, TextSegment, string_of
from acsgd.io.data.formats.messages import check_weight
from acsgd.io.data.sources.base import TEXT, SourceRecord


class Text(Format):
    """A document under "text", all of which is learned."""

    required = (TEXT,)

    def example(self, record: SourceRecord) -> Example:
        """Return the text as one segment."""
        check_weight(record.fields, self.options)
        return Example((TextSegment(string_of(record.fields, TEXT)),), record.ends_document)

    def prompt(self, fields: Mapping[str, Any]) -> Example:
        """Return the text, which is continued."""
        return Example((TextSegment(string_of(fields, TEXT), is_target=False),))
