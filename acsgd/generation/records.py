"""Records of a file of prompts: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.generation.prompts import Prompt
from acsgd.io.sources.text import excerpt, not_utf8, open_text

FIELDS = ("prompt", "text", "input", "messages")
"""Fields that may hold the prompt, in order of preference."""
GENERATED = "generated_text"
"""Field that is added to a record."""


class Record(NamedTuple):
    """A line of the input."""

    line: int
    """Number, counted from 1."""
    text: str
    """The JSON object as it stands in the file, without white space around it."""
    prompt: Prompt

    def output_start(self) -> str:
        """Return the line of the output up to the generated text: all fields of the record, character by character."""
        fields = self.text[:-1].rstrip()
        return f'{fields}{"" if fields == "{" else ", "}"{GENERATED}": '

    def output_line(self, generated: str) -> str:
        """Return the line of the output: all fields of the record, and the generated text."""
        return f"{self.output_start()}{json.dumps(generated, ensure_ascii=False)}}}\n"


def read_records(path: Path, *, field: str | None, chat: bool) -> tuple[list[Record], str]:
    """Read all records; return them and the name of the field with the prompt. Blank lines are ignored.

    field: None = the first of FIELDS that the first record has. chat: whether a text is the message of a user.
    Raises ValueError with the number of the first line that is not a record with a prompt.
    """
    records = []
    for line, text, fields in _objects(path):
        where = f"{path}, line {line}"
        if field is None:
            field = next((name for name in FIELDS if name in fields), None)
        if field is None or field not in fields:
            wanted = f"field {field!r}" if field else f"field {', '.join(FIELDS[:-1])} or {FIELDS[-1]}"
            found = ", ".join(map(repr, fields)) or "none"
            raise ValueError(f"{where}, has no {wanted}; its fields: {found}; name the one with the prompt by --field")
        if GENERATED in fields:
            raise ValueError(f'{where}, has a "{GENERATED}" already; rename or remove the field')
        prompt = fields[field]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}] if chat else prompt
        elif not _is_chat(prompt):
            raise ValueError(
                f'{where}: {field!r} is neither a text nor a list of messages; write "..." or '
                '[{"role": "user", "content": "..."}]'
            )
        records.append(Record(line, text, prompt))
    if not records or field is None:
        raise ValueError(f"{path} has no records; give a file with one JSON object per line")
    return records, field


def _objects(path: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield line number, text and fields of each JSON object."""
    with open_text(path, key="--file") as file:
        for line, raw in enumerate(file, start=1):
            text = raw.strip(" \t\r\n")
            if not text:
                continue
            if error := not_utf8(text):
                raise ValueError(f"{path}, line {line} {error.reason}; {error.remedy}")
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError) as invalid:
                raise ValueError(f"{path}, line {line} is not JSON ({_reason(invalid)}): {excerpt(text)}") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{path}, line {line} is not a JSON object: {excerpt(text)}")
            yield line, text, fields


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "it exceeds the limits of the JSON parser"


def _is_chat(value: Any) -> bool:
    """Whether a JSON value is a list of messages."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in value)
