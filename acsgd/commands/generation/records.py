"""Records of a file of prompts, and the output file, to which results are appended in the order of the input."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.commands.generation.prompts import Prompt
from acsgd.io.data.sources.text import excerpt, not_utf8, open_text
from acsgd.io.files.atomic import build_atomically

FIELDS = ("prompt", "text", "input", "messages")
"""Fields that may hold the prompt, in order of preference."""
GENERATED = "generated_text"
"""Field that is added to a record."""


class PromptRecord(NamedTuple):
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


def read_records(path: Path, *, field: str | None, chat: bool) -> tuple[list[PromptRecord], str]:
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
        records.append(PromptRecord(line, text, prompt))
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


Options = Mapping[str, Any]
"""JSON values by name."""

CHECKSUMS = {"weights": "other weights", "prompts": "other prompts, another tokenizer or another chat template"}
"""Options whose values are checksums, and what it means that they differ."""


class OutputFile:
    """An open output file, locked against other processes. It ends with a complete record."""

    def __init__(self, path: Path, descriptor: int, finished: int) -> None:
        self.path = path
        self.finished = finished
        """Number of records that it holds."""
        self._descriptor = descriptor

    def append(self, record: PromptRecord, generated: str) -> None:
        """Append a record with its generated text. Raises OSError, after which the last line may be incomplete."""
        line = record.output_line(generated).encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.finished += 1


@contextlib.contextmanager
def open_output(path: Path, records: Sequence[PromptRecord], options: Options) -> Iterator[OutputFile]:
    """Open the output file of some records, new or from an interrupted start, whose last line may be incomplete.

    Raises ValueError if the file holds anything else, was written with other options, or is in use.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _lock(descriptor, path)
        if not os.fstat(descriptor).st_size:
            _write_options(path, options)
        else:
            _check_options(path, options)
        yield OutputFile(path, descriptor, _finished(path, descriptor, records))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output_path(path: Path, source: Path) -> None:
    """Raise ValueError if the path cannot be that of an output file. source: the input."""
    if path.exists() and source.exists() and path.samefile(source):
        raise ValueError(f"--out {path} is the input itself; give another file")
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"--out {path} is not a file; give the path of a file")


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process writes {path}; wait for it, or give another --out") from None
    except OSError:  # a file system without locks
        pass


def _options_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.options.json")


def _write_options(path: Path, options: Options) -> None:
    target = _options_path(path)

    def write(file: Path) -> None:
        file.write_text(json.dumps(options, indent=1) + "\n")

    target.unlink(missing_ok=True)
    build_atomically(target, write)


def _check_options(path: Path, options: Options) -> None:
    """Raise ValueError unless the file was written with the same options."""
    target = _options_path(path)
    remedy = f"remove {path} to start again, or give another --out"
    try:
        former = json.loads(target.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} exists, but {target.name} does not, so it cannot be resumed; {remedy}") from None
    except ValueError:
        former = None
    if not isinstance(former, dict) or former.keys() != options.keys():
        raise ValueError(f"{target} is not one that this acsgd has written; {remedy}")
    for name, value in options.items():
        if former[name] != value:
            difference = CHECKSUMS.get(name, f"{name}={json.dumps(former[name])}, now {json.dumps(value)}")
            raise ValueError(f"{path} was written with {difference}; use the same to resume it, or {remedy}")


def _finished(path: Path, descriptor: int, records: Sequence[PromptRecord]) -> int:
    """Remove an incomplete last line; return the number of records. Raises ValueError if they are not the input's."""
    finished, size = 0, 0
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                break
            if finished == len(records) or not _is_output(line, records[finished]):
                raise ValueError(
                    f"{path}, line {finished + 1} is not record {finished + 1} of the input with its generated text; "
                    f"remove {path} to start again, or give another --out"
                )
            finished, size = finished + 1, size + len(line)
    os.ftruncate(descriptor, size)
    return finished


def _is_output(line: bytes, record: PromptRecord) -> bool:
    """Whether a line of the output is a record with a generated text."""
    start = record.output_start().encode()
    if not line.startswith(start) or not line.endswith(b"}\n"):
        return False
    try:
        return isinstance(json.loads(line[len(start) : -2]), str)
    except ValueError:
        return False
