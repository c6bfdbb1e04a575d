"""Records with prompts, and the output file, to which results are appended in the order of the input."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from acsgd.io.data.formats.base import Example, Format, FormatError, TextSegment, field_of, has_value
from acsgd.io.data.formats.formats import CHATS, FORMATS, unread_of
from acsgd.io.data.formats.messages import SYSTEM, USER, is_list
from acsgd.io.data.sources.base import TEXT, BadRecord, ReadOptions, RecordCounts
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.files.atomic import build_atomically

FIELDS = ("prompt", "text", "input")
"""Fields that may hold a prompt that is a text, in order of preference."""
MESSAGES = "messages"
"""Format and field of chats, and so of a text that is the message of a user."""
GENERATED = "generated_text"
"""Field that is added to a record."""


class PromptRecord(NamedTuple):
    """A record of the input."""

    source: str
    """Name of its source."""
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
            records.append(PromptRecord(source.name, record.where, text, record.fields))
    if not records:
        raise ValueError(f"{spec} has no records; give a file with one JSON object per line")
    return records


class _Reading(NamedTuple):
    """How the prompts of a source are read: records in a format, or one field of them."""

    format: Format | None
    field: str | None
    """None if no record has any of FIELDS."""
    name: str | None
    """For the user and the options of an output file."""


class PromptReader:
    """Makes prompts of texts and of records, as a run makes those of its examples.

    field: that holds the prompts; None = as the format of the first record of a source says, or the first of FIELDS
    that it has. is_chat: whether a text is the message of a user.
    """

    def __init__(
        self, options: ReadOptions, tokenizer: PreTrainedTokenizerBase, *, field: str | None, is_chat: bool
    ) -> None:
        self._options = options
        self._formats = {name: make(options, tokenizer) for name, make in FORMATS.items()}
        self._is_chat = is_chat
        self._field = field
        self._readings = dict[str, _Reading]()
        self._counts = dict[str, RecordCounts]()

    @property
    def read(self) -> str:
        """Fields and formats of the prompts so far."""
        return ", ".join(dict.fromkeys(str(reading.name) for reading in self._readings.values()))

    def of_text(self, text: str) -> Example:
        """Return the prompt that a text makes. Raises ValueError if it cannot be the message of a user."""
        if self._is_chat:
            return self.of_messages([{"role": USER, "content": text}])
        text = self._options.input_format.replace("__input__", text)
        return self._limited(Example((TextSegment(text, is_target=False),)))

    def of_messages(self, messages: Any, fields: Mapping[str, Any] | None = None) -> Example:
        """Return the prompt that messages make, with what fields of a record add to a chat. Raises ValueError."""
        try:
            return self._formats[MESSAGES].prompt({**(fields or {}), MESSAGES: messages})
        except FormatError as error:
            raise ValueError(f"the chat {error.reason}; {error.remedy}") from None

    def of_record(self, record: PromptRecord) -> Example:
        """Return the prompt of a record. Raises ValueError that names the record."""
        fields = dict(record.fields)
        for name, path in self._options.fields:
            with contextlib.suppress(FormatError):  # such as that of the answer
                fields[name] = field_of(record.fields, path)
        if record.source not in self._readings:
            self._readings[record.source] = self._choose(fields, record.where)
        reading = self._readings[record.source]
        prompt = self._prompt(reading, fields, record)
        counts = self._counts.setdefault(record.source, RecordCounts())
        counts.unread.update(self._unread(reading, fields, record))
        return prompt

    def notes(self) -> list[str]:
        """Return a sentence on each source whose records, so far, had fields without effect on their prompts."""
        found = {source: counts.unread_summary() for source, counts in self._counts.items()}
        return [f"--file: {source}: {clause}" for source, clause in found.items() if clause]

    def _prompt(self, reading: _Reading, fields: Mapping[str, Any], record: PromptRecord) -> Example:
        """Return the prompt of a record. fields: as data.fields names them. Raises ValueError that names the record."""
        if reading.format is not None:
            try:
                prompt = reading.format.prompt(fields)
                return self._limited(prompt) if reading.format.answer else prompt
            except FormatError as error:
                raise ValueError(f"{record.where} {error.reason}; {error.remedy}") from None
            except ValueError as error:
                raise ValueError(f"{record.where}: {error}") from None
        if reading.field is None or reading.field not in fields:
            wanted = f"field {reading.field!r}" if reading.field else f"field {', '.join(FIELDS)} or {MESSAGES}"
            found = ", ".join(map(repr, record.fields)) or "none"
            raise ValueError(
                f"{record.where}, has no {wanted}; its fields: {found}; name the one with the prompt by --field"
            )
        return self._of_field(reading.field, fields, record.where)

    def _of_field(self, field: str, fields: Mapping[str, Any], where: str) -> Example:
        """Return the prompt of the field with it: a text, or messages. Raises ValueError that names the record."""
        prompt = fields[field]
        if isinstance(prompt, str) and not self._is_chat:
            return self._formats[TEXT].prompt(fields) if field == TEXT else self.of_text(prompt)
        if not isinstance(prompt, str) and not is_list(prompt):
            raise ValueError(
                f'{where}: {field!r} is neither a text nor a list of messages; write "..." or '
                '[{"role": "user", "content": "..."}]'
            )
        messages = [{"role": USER, "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return self.of_messages(messages, fields)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def _unread(self, reading: _Reading, fields: Mapping[str, Any], record: PromptRecord) -> set[str]:
        """Return the names of the fields of a record that its prompt does not depend on. fields: see `_prompt`."""
        (form, field, _), options = reading, self._options
        if form is not None:
            if form.answer is not None and not has_value(fields.get(form.answer)):
                fields = {**fields, form.answer: "."}
            return unread_of(form, record.fields, fields, options)
        assert field is not None
        prompt = fields[field]
        name = MESSAGES if self._is_chat or not isinstance(prompt, str) else TEXT
        messages = [{"role": USER, "content": prompt}] if isinstance(prompt, str) else prompt
        path = dict(options.fields).get(field, field)
        options = replace(options, fields=(*options.fields, (name, path)))
        renamed = {**fields, name: prompt if name == TEXT else messages}
        return unread_of(self._formats[name], record.fields, renamed, options) - {field}

    def _limited(self, prompt: Example) -> Example:
        """Return a prompt with the maximum length of those that a run has learned, which have no earlier answers."""
        is_limited = not prompt.has_special_tokens and len(prompt.segments) == 1
        return prompt._replace(max_prompt=self._options.max_prompt) if is_limited else prompt

    def _choose(self, fields: Mapping[str, Any], where: str) -> _Reading:
        """Return how the records of a source are read, by the fields of the first, in a place. Raises ValueError."""
        if self._field is not None:
            return _Reading(None, self._field, self._field)
        names = [*self._formats] if self._options.format == "auto" else [self._options.format]
        for name in names:
            form = self._formats[name]
            is_given = len(names) == 1 and (form.answer or TEXT in fields)
            if not is_given and not form.detect({**fields, form.answer: "."} if form.answer else fields):
                continue
            if not self._is_chat or name in CHATS:
                return _Reading(form, None, f"format {name}")
            texts = [each for each in (*form.required, *form.optional) if each not in (form.answer, SYSTEM)]
            if len(texts := [each for each in texts if has_value(fields.get(each))]) > 1:
                raise ValueError(
                    f"{where} has the fields {' and '.join(texts)}, but a message of the user is one; name it by "
                    f"--field, or give --format {name} for a plain prompt"
                )
            break
        field = next((name for name in FIELDS if name in fields), None)
        return _Reading(None, field, field)


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
