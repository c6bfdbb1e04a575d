"""Records with prompts, and the output file, to which results are appended in the order of the input."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from acsgd.commands.generation.prompts import Prompt
from acsgd.io.data.formats.base import Format, FormatError, field_of
from acsgd.io.data.formats.formats import FORMATS
from acsgd.io.data.sources.base import TEXT, BadRecord, ReadOptions, RecordCounts, SourceRecord
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.files.atomic import build_atomically

FIELDS = ("prompt", "text", "input", "messages")
"""Fields that may hold the prompt, in order of preference."""
GENERATED = "generated_text"
"""Field that is added to a record."""


class PromptRecord(NamedTuple):
    """A record of the input."""

    where: str
    """File and line."""
    text: str
    """The JSON object as it stands in the file, without white space around it."""
    fields: Mapping[str, Any]

    def output_start(self) -> str:
        """Return the line of the output up to the generated text: all fields of the record, character by character."""
        fields = self.text[:-1].rstrip()
        return f'{fields}{"" if fields == "{" else ", "}"{GENERATED}": '

    def output_line(self, generated: str) -> str:
        """Return the line of the output: all fields of the record, and the generated text."""
        return f"{self.output_start()}{json.dumps(generated, ensure_ascii=False)}}}\n"


def read_records(spec: str) -> list[PromptRecord]:
    """Read all records of the sources that `spec` lists. Raises ValueError with the place of the first wrong record."""
    records = []
    for source, weight in parse_sources(spec, key="--file"):
        if weight is not None:
            raise ValueError(f"--file={spec}: all records are read; remove the weights")
        for record in source.records(RecordCounts()):
            if isinstance(record, BadRecord):
                raise ValueError(f"{record.where} {record.reason}; {record.remedy}")
            if GENERATED in record.fields:
                raise ValueError(f'{record.where}, has a "{GENERATED}" already; rename or remove the field')
            text = record.line.strip(" \t\r\n") if record.line else json.dumps(record.fields, ensure_ascii=False)
            records.append(PromptRecord(record.where, text, record.fields))
    if not records:
        raise ValueError(f"{spec} has no records; give a file with one JSON object per line")
    return records


class PromptReader:
    """Makes prompts of texts and of records, as a run makes those of its examples.

    field: that holds the prompts; None = as the format of the first record says, or the first of FIELDS that it has.
    is_chat: whether a text is the message of a user.
    """

    def __init__(
        self, options: ReadOptions, tokenizer: PreTrainedTokenizerBase, *, field: str | None, is_chat: bool
    ) -> None:
        self._options = options
        self._formats = {name: make(options, tokenizer) for name, make in FORMATS.items()}
        self._is_chat = is_chat
        self._format: Format | None = None
        self.field = field
        """Field that holds the prompts, or the format of the records; None until one was read."""

    def of_text(self, text: str) -> Prompt:
        """Return the prompt that a text makes."""
        if self._is_chat:
            return [{"role": "user", "content": text}]
        return self._options.input_format.replace("__input__", text)

    def of_record(self, record: PromptRecord) -> Prompt:
        """Return the prompt of a record. Raises ValueError that names the record."""
        fields = dict(record.fields)
        for name, path in self._options.fields:
            with contextlib.suppress(FormatError):  # such as that of the answer
                fields[name] = field_of(record.fields, path)
        if self.field is None:
            self._choose(fields)
        if self._format is not None:
            try:
                example = self._format.example(SourceRecord(_Answered(self._format, fields), record.where))
                return "".join(segment.text for segment in example.segments if not segment.is_target)
            except FormatError as error:
                raise ValueError(f"{record.where} {error.reason}; {error.remedy}") from None
        if self.field is None or self.field not in fields:
            wanted = f"field {self.field!r}" if self.field else f"field {', '.join(FIELDS[:-1])} or {FIELDS[-1]}"
            found = ", ".join(map(repr, record.fields)) or "none"
            raise ValueError(
                f"{record.where}, has no {wanted}; its fields: {found}; name the one with the prompt by --field"
            )
        prompt = fields[self.field]
        if isinstance(prompt, str):
            return prompt if self.field == TEXT and not self._is_chat else self.of_text(prompt)
        if not _is_chat(prompt):
            raise ValueError(
                f'{record.where}: {self.field!r} is neither a text nor a list of messages; write "..." or '
                '[{"role": "user", "content": "..."}]'
            )
        return prompt

    def _choose(self, fields: Mapping[str, Any]) -> None:
        """Choose format or field of all records by the fields of the first."""
        names = self._formats if self._options.format == "auto" else [self._options.format]
        for name in () if self._is_chat else names:
            form = self._formats[name]
            if ANSWER in dir(form) and (len(names) == 1 or form.detect(_Answered(form, fields))):
                self._format, self.field = form, f"format {name}"
                return
        self.field = next((name for name in FIELDS if name in fields), None)


ANSWER = "answer"
"""Attribute of a format that names the field with the answer."""


class _Answered(dict[str, Any]):
    """Fields of a record that has an answer, which the format wants and prompts lack. Messages do not list it."""

    def __init__(self, form: Format, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._answer: str = getattr(form, ANSWER)

    def get(self, name: str, default: Any = None) -> Any:
        return "." if name == self._answer else super().get(name, default)


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


def check_output_path(path: Path, spec: str) -> None:
    """Raise ValueError if the path cannot be that of an output file. spec: sources of the input."""
    for name in (part.strip() for part in spec.split(",")):
        source = Path(name).expanduser()
        is_same = path.exists() and source.exists() and path.samefile(source)
        if is_same or fnmatch(str(path), name) or (source.is_dir() and path.resolve().is_relative_to(source.resolve())):
            raise ValueError(f"--out {path} is {'' if is_same else 'part of '}the input itself; give another file")
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
