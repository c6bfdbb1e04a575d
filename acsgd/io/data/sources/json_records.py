"""Files of JSON: one object per line, objects over several lines, or one array or object per file."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from acsgd.io.data.sources.base import BadRecord, RecordCounts, SourceRecord
from acsgd.io.data.sources.text import LineError, excerpt, fraction_read, not_utf8, open_text

MAX_RECORD_CHARS = 2**27
"""Maximum length of a line of JSON, characters. Such a line takes 4 to 12 bytes of memory per character."""
MAX_JSON_CHARS = 2**30
"""Maximum length of a file that is one array or object, characters. It is read as a whole."""
SKIPPED_CHARS = 2**17
"""Characters of a longer line that are read at a time."""
READ_CHARS = 2**24
"""Characters of a file that are read at a time."""
CHATS = ("messages", "conversations")
"""Fields whose list of objects is the chat of one record, and no list of records."""
REMEDY = 'write one JSON object per line, such as {"text": "..."}'
_SPACE = re.compile(r"[ \t\r\n]*")


def read_json_lines(path: Path, name: str, key: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
    """Yield the object in each line of a file. Blank lines are ignored."""
    with open_text(path, key=key) as file:
        counts.fraction = partial(fraction_read, file)
        for number, line in enumerate(_lines(file), start=1):
            counts.records = number
            fields = parse_object(line) if isinstance(line, str) else line
            if isinstance(fields, LineError):
                yield BadRecord(f"{name}, line {number}", *fields)
            elif fields is not None:
                assert isinstance(line, str)
                yield SourceRecord(fields, f"{name}, line {number}", line=line.removesuffix("\n"))


def read_json(path: Path, name: str, key: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
    """Yield the objects of a file: of its array, those that follow each other, or of the only list in its object."""
    with open_text(path, key=key) as file:
        first = file.readline(MAX_RECORD_CHARS)
        has_lines = isinstance(parse_object(first), dict) and bool(file.read(1))
        text = "" if has_lines else first + _rest(file)
    if has_lines:
        yield from read_json_lines(path, name, key, counts)
        return
    if len(text) >= MAX_JSON_CHARS:
        raise ValueError(
            f"{key}: {name} has more than {MAX_JSON_CHARS} characters in one JSON value; write one object per line: "
            f"jq -c .[] {name} > {name}l"
        )
    for counts.records, (where, raw, value) in enumerate(_values(text, name, key), start=1):
        if error := not_utf8(raw):
            yield BadRecord(where, *error)
        elif isinstance(value, dict):
            yield SourceRecord(value, where)
        else:
            yield BadRecord(where, f"is not a JSON object: {excerpt(raw)}", REMEDY)


def _rest(file: TextIO) -> str:
    """Return the rest of a file, cut off above MAX_JSON_CHARS. Python allocates as much as a single read may return."""
    parts: list[str] = []
    while sum(map(len, parts)) < MAX_JSON_CHARS and (part := file.read(READ_CHARS)):
        parts.append(part)
    return "".join(parts)


def _values(text: str, name: str, key: str) -> Iterator[tuple[str, str, Any]]:
    """Yield place, text and value of each record of a JSON text: an array, an object, or objects one after another."""
    if text.lstrip().startswith("["):
        yield from _elements(text, text.index("[") + 1, name, key, in_array=True)
        return
    value, end = _decoded(text, _skip_space(text, 0), name, key)
    if _skip_space(text, end) < len(text):  # as jq prints them
        yield from _elements(text, 0, name, key, in_array=False)
        return
    fields = value if isinstance(value, dict) else {}
    if _is_table(fields):
        raise ValueError(
            f"{key}: {name} is a table of columns, as pandas writes it, and no list of records; write it with "
            f'to_json("{name}", orient="records", lines=True)'
        )
    lists = [each for field, each in fields.items() if _has_objects(each) and field not in CHATS]
    if len(lists) != 1:
        yield name, text, value
        return
    for number, each in enumerate(lists[0], start=1):
        yield f"{name}, record {number}", json.dumps(each, ensure_ascii=False), each


def _is_table(fields: Mapping[str, Any]) -> bool:
    """Return whether an object is a table, by columns, by rows or split, as pandas' to_json writes them."""
    if fields.keys() - {"index"} == {"columns", "data"}:
        return True
    parts = [each for each in fields.values() if isinstance(each, dict)]
    if not parts or len(parts) < len(fields):
        return False
    return any(keys and all(map(str.isdecimal, keys)) for keys in (fields, parts[0]))


def _elements(text: str, end: int, name: str, key: str, *, in_array: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield place, text and value of each JSON value after a character: up to the end of an array, else of the text."""
    line = text.count("\n", 0, end) + 1
    counted = end
    for number in itertools.count(1):
        start = _skip_space(text, end)
        if in_array and text[start : start + 1] == "]":
            if (rest := _skip_space(text, start + 1)) < len(text):
                _refuse(text, rest, "Extra data", name, key)
            return
        if not in_array and start == len(text):
            return
        value, end = _decoded(text, start, name, key)
        line += text.count("\n", counted, start)
        counted = start
        yield f"{name}, line {line}, record {number}", text[start:end], value
        if in_array:
            end = _skip_space(text, end)
            if text[end : end + 1] not in (",", "]"):
                _refuse(text, end, "Expecting ',' delimiter", name, key)
            end += text[end] == ","


def _skip_space(text: str, start: int) -> int:
    """Return the first character from `start` on that is no white space of JSON."""
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]


def _decoded(text: str, start: int, name: str, key: str) -> tuple[Any, int]:
    """Return the JSON value that starts at a character, and where it ends. Raises ValueError."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as invalid:
        _refuse(text, invalid.pos, invalid.msg, name, key)
    except (ValueError, RecursionError):
        _refuse(text, start, "it exceeds the limits of the parser", name, key)


def _refuse(text: str, position: int, problem: str, name: str, key: str) -> NoReturn:
    line = text.count("\n", 0, position) + 1
    around = excerpt(text[position : position + 200])
    raise ValueError(f"{key}: {name}, line {line} is not JSON ({problem}): {around}; correct the file")


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _lines(file: TextIO) -> Iterator[str | LineError]:
    """Yield each line, or an error in place of a line of more than MAX_RECORD_CHARS characters."""
    while line := file.readline(MAX_RECORD_CHARS + 1):
        if len(line) <= MAX_RECORD_CHARS or line.endswith("\n"):
            yield line
            continue
        yield LineError(
            f"has more than {MAX_RECORD_CHARS} characters: {excerpt(line)}",
            "split the record or write its text to a *.txt file",
        )
        while (line := file.readline(SKIPPED_CHARS)) and not line.endswith("\n"):
            pass


def parse_object(line: str) -> Mapping[str, Any] | LineError | None:
    """Return the JSON object in a line, or why there is none; None for a blank line."""
    if line.isspace():
        return None
    if error := not_utf8(line):
        return error
    try:
        fields = json.loads(line.rstrip("\n"))
    except json.JSONDecodeError as invalid:
        return LineError(f"is not JSON ({invalid.msg} at column {invalid.colno}): {excerpt(line)}", REMEDY)
    except (ValueError, RecursionError):  # a number of 5000 digits, a thousand brackets
        return LineError(f"exceeds the limits of the JSON parser: {excerpt(line)}", REMEDY)
    if not isinstance(fields, dict):
        return LineError(f"is not a JSON object: {excerpt(line)}", REMEDY)
    return fields
