"""Texts, or pairs of texts, with a label."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from acsgd.io.data.formats.base import Example, FormatError, OptionsOfFormat, TextSegment, has_strings, names_of
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


class Labelled(OptionsOfFormat):
    """A "text", or texts under names of TEXTS, and a "label": a class, by number or name, or a number."""

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return False: labels are read only for tasks that need them."""
        return False

    def example(self, record: SourceRecord) -> Example:
        """Return a segment per text, and the label."""
        names = next((names for names in TEXTS if has_strings(record.fields, *names)), None)
        if names is None:
            raise FormatError(
                f'has no string under "text"; its fields: {names_of(record.fields)}',
                'name the fields with the text and the label, --data.fields "text=FIELD,label=FIELD"',
            )
        return Example(tuple(TextSegment(record.fields[name]) for name in names), label=_label(record.fields))


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
