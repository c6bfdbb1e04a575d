"""Texts, or pairs of texts, with a label."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from acsgd.io.data.formats.base import Example, Format, FormatError, TextSegment, is_null, names_of, string_of
from acsgd.io.data.sources.base import Label, SourceRecord

TEXTS = (
    ("text",),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("sentence",),
)
"""Names of the fields with the texts, in the order in which they are tried: those of GLUE."""
LABEL = "label"


class Labelled(Format):
    """A "text", or texts under names of TEXTS, and a "label": a class, by number or name, or a number."""

    required = (LABEL,)

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return False: labels are read only for tasks that need them."""
        return False

    def example(self, record: SourceRecord) -> Example:
        """Return a segment per text, and the label."""
        names = _texts(record.fields)
        if not names:
            raise FormatError(
                f'has no string under "text"; its fields: {names_of(record.fields)}',
                'name the fields with the text and the label, --data.fields "text=FIELD,label=FIELD"',
            )
        texts = tuple(TextSegment(string_of(record.fields, name)) for name in names)
        return Example(texts, label=_label(record.fields))

    def unread(self, fields: Mapping[str, Any]) -> Iterator[str]:
        texts = _texts(fields)
        yield from (name for name in super().unread(fields) if name not in texts)


def _texts(fields: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the fields with the texts, none if there are none."""
    return next((names for names in TEXTS if not any(is_null(fields.get(name)) for name in names)), ())


def _label(fields: Mapping[str, Any]) -> Label:
    """Return the label: a number if it can be read as one, as in tables without types."""
    label = fields.get(LABEL)
    if isinstance(label, str):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                label = kind(label)
                break
    if isinstance(label, int | str) or (isinstance(label, float) and math.isfinite(label)):
        return label
    raise FormatError(
        f'has no number or name under "{LABEL}"; its fields: {names_of(fields)}',
        'write {"label": 1} or name another field, --data.fields "label=FIELD"',
    )
