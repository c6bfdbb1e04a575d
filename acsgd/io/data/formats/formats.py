"""Read the examples of a source. To add a format, write a class that satisfies `Format` and a line in FORMATS."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from acsgd.config.options import DataConfig
from acsgd.config.spec import assignments, suggest
from acsgd.io.data.formats.base import AS_TEXT, Example, Format, FormatError, TextSegment, field_of, has_value, names_of
from acsgd.io.data.formats.chat import Messages, ShareGpt
from acsgd.io.data.formats.labelled import Labelled
from acsgd.io.data.formats.prompts import P3, Alpaca, Dolly, InputOutput, OigChat, PromptCompletion
from acsgd.io.data.formats.text import Text
from acsgd.io.data.sources.base import TEXT, BadRecord, ReadOptions, RecordCounts, Source, SourceRecord
from acsgd.io.data.sources.text import pieces_of

FORMATS: dict[str, type[Format]] = {
    "messages": Messages,
    "sharegpt": ShareGpt,
    "prompt": PromptCompletion,
    "p3": P3,
    "alpaca": Alpaca,
    "dolly": Dolly,
    "io": InputOutput,
    "text": Text,
    "oig": OigChat,
    "label": Labelled,
}
"""Formats by name, in the order in which they are tried. A text beside a prompt or a chat repeats it."""
CHATS = ("messages", "sharegpt")
"""Names of those whose texts are written with a chat template alone."""


def read_options(data: DataConfig, *, has_labels: bool = False) -> tuple[ReadOptions, ...]:
    """Return how records are read: for all sources, or for each one.

    has_labels: whether the task needs labels. Raises ValueError.
    """
    lists = {each.name: value for each in fields(data) if isinstance(value := getattr(data, each.name), tuple)}
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1:
        given = ", ".join(f"data.{name} has {len(values)} values" for name, values in lists.items())
        raise ValueError(f"{given}; give one for all sources, or one for each")
    singles = [{name: values[index] for name, values in lists.items()} for index in range(max(lengths, default=1))]
    return tuple(_read_options(replace(data, **values), has_labels=has_labels) for values in singles)


def _read_options(data: DataConfig, *, has_labels: bool) -> ReadOptions:
    """Return how the records of a source are read. data: options with one value each."""
    assert isinstance(data.format, str)
    assert isinstance(data.input_format, str)
    assert isinstance(data.output_format, str)
    assert not isinstance(data.fields, tuple)
    known = {"auto": None, **FORMATS}
    if data.format not in known:
        raise ValueError(f'data.format="{data.format}": unknown format{suggest(data.format, known)}')
    form = "label" if has_labels and data.format == "auto" else data.format
    if has_labels != (form == "label"):
        task = "classification or regression" if form == "label" else "lm or seq2seq"
        raise ValueError(f'data.format="{data.format}" is for model.task={task}; remove data.format')
    for name, option in (("input", data.input_format), ("output", data.output_format)):
        if option.count(f"__{name}__") != 1:
            raise ValueError(f'data.{name}_format="{option}" must contain __{name}__ once')
        if escape := re.search(r"\\[nt]", option):
            raise ValueError(
                f'data.{name}_format="{option}" has a backslash and the letter {escape[0][1]}, as a shell leaves '
                f"them in quotes; for a newline or tab type $'{option}', or give the option in the TOML file"
            )
    if data.targets == "all" and (data.max_prompt or data.max_answer):
        raise ValueError(
            "data.max_prompt and data.max_answer limit prompts and answers, but data.targets=all makes them one text; "
            "remove them, or data.targets"
        )
    given = {each.name: getattr(data, each.name) for each in fields(ReadOptions)}
    return ReadOptions(**{**given, "format": form, "fields": _parse_fields(data.fields)})


def describe_unused(data: DataConfig, used: Collection[str]) -> list[str]:
    """Return a sentence on each option of [data] that no format of the sources reads. used: names of these formats."""
    readers = dict[str, list[str]]()
    for name, form in FORMATS.items():
        for option in form.options_read:
            readers.setdefault(option, []).append(name)
    if not used:  # not known
        return []
    found = " and ".join(f'"{name}"' for name in sorted(used))
    return [
        f"data.{option}={getattr(data, option)} has no effect on how records of format {found} are read; remove "
        f"it, or give --data.format {names[0]}, if the data are of this format"
        for option, names in readers.items()
        if getattr(data, option) != getattr(DataConfig, option) and not {*names} & {*used}
    ]


def read_each(
    source: Source, tokenizer: PreTrainedTokenizerBase, counts: RecordCounts
) -> Iterator[tuple[str, Example | BadRecord]]:
    """Yield place and example of each record, or why there is none.

    counts: updated in place, but for `skipped`. A format that it names is that of all records. Raises ValueError if no
    record can have the format.
    """
    reader = _Reader(source.options, tokenizer, counts)
    for record in source.records(counts):
        try:
            example = reader.example(record)
        except ValueError as error:
            raise ValueError(f"{source.key}: {record.where}: {error}") from None
        yield record.where, example


class _Reader:
    """Makes examples of records, all in one format: that of `counts`, else the one that the first record has."""

    def __init__(self, options: ReadOptions, tokenizer: PreTrainedTokenizerBase, counts: RecordCounts) -> None:
        self._options = options
        self._formats = {name: make(options, tokenizer) for name, make in FORMATS.items()}
        self._counts = counts
        if options.format != "auto":
            counts.format = options.format

    def example(self, record: SourceRecord | BadRecord) -> Example | BadRecord:
        """Return the example of a record, or why there is none."""
        if isinstance(record, BadRecord):
            return record
        try:
            renamed = record._replace(fields=self._renamed(record.fields))
            self._counts.format = self._counts.format or self._detected(renamed.fields)
            form = self._formats[self._counts.format]
            example = form.example(renamed)
            example.text.encode()
            if self._options.max_prompt or self._options.max_answer:
                example = _limited(example, self._options)
            self._counts.unread.update(unread_of(form, record.fields, renamed.fields, self._options))
        except FormatError as error:
            return BadRecord(record.where, error.reason, error.remedy)
        except UnicodeEncodeError:
            return BadRecord(record.where, "has a lone surrogate, which is not valid text", "write the whole pair")
        if self._options.targets == "all" and example.label is None:
            return example._replace(segments=(TextSegment(example.text),))
        return example

    def _renamed(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a record with those of data.fields under the names of the format."""
        if not self._options.fields:
            return fields
        return {**fields, **{name: field_of(fields, path) for name, path in self._options.fields}}

    def _detected(self, fields: Mapping[str, Any]) -> str:
        for name, form in self._formats.items():
            if form.detect(fields):
                return name
        detect = self._formats["messages"].detect
        chats = [name for name, value in fields.items() if has_value(value) and detect({"messages": value})]
        examples = f'"messages={chats[0]}"' if len(chats) == 1 else '"text=FIELD" or "input=FIELD,output=FIELD"'
        raise FormatError(
            f'has no string under "{TEXT}"; its fields: {names_of(fields)}',
            f"name the fields that a format needs, --data.fields {examples}",
        )


def unread_of(form: Format, fields: Mapping[str, Any], renamed: Mapping[str, Any], options: ReadOptions) -> set[str]:
    """Return the names of the fields of a record that its example does not depend on.

    renamed: the fields under the names of the format. Raises FormatError if they have another one.
    """
    if not options.fields:
        return {*form.unread(renamed)}
    names = {name for name, _ in options.fields}
    paths = {path.removesuffix(AS_TEXT) for _, path in options.fields}
    read = paths | {path.split(".")[0] for path in paths}
    replaced = {name for name in names & fields.keys() - read if has_value(fields[name])}
    beside = {name for top in read - paths for name in _beside(fields.get(top), top, paths)}
    return replaced | beside | ({*form.unread(renamed)} - read)


def _beside(value: Any, place: str, paths: Collection[str]) -> Iterator[str]:
    """Yield what a value has besides the fields at some paths. place: path of the value."""
    if isinstance(value, Mapping) and any(path.startswith(f"{place}.") for path in paths):
        for name, each in value.items():
            yield from _beside(each, f"{place}.{name}", paths)
    elif place not in paths and has_value(value):
        yield place


def _parse_fields(text: str | None) -> tuple[tuple[str, str], ...]:
    """Parse data.fields. Raises ValueError."""
    if not text:
        return ()
    pairs, words = assignments(text), text.split()
    is_spaced = len(words) > 1 and all(re.fullmatch("[^=,]+=[^=,]+", word) for word in words)
    if pairs is None or is_spaced:
        example = ",".join(words) if is_spaced else "text=content"
        raise ValueError(f'data.fields="{text}" is not a list of fields; write, for example, "{example}"')
    return tuple(pairs)


def _limited(example: Example, options: ReadOptions) -> Example:
    """Return an example with limits of its tokens. Raises FormatError if it is not a prompt with one answer."""
    if example.has_special_tokens or [each.is_target for each in example.segments] != [False, True]:
        raise FormatError(
            "is not a prompt with one answer, which data.max_prompt and data.max_answer limit",
            "give 0 for this source, --data.max_prompt 100 0 for two sources",
        )
    return example._replace(max_prompt=options.max_prompt, max_answer=options.max_answer)


def parts_of(example: Example) -> Iterator[Example]:
    """Cut a long example into parts that are tokenized one at a time."""
    parts = [TextSegment(piece, is_target) for text, is_target in example.segments for piece in pieces_of(text)]
    if len(parts) == len(example.segments):
        yield example
        return
    for part in parts[:-1]:
        yield example._replace(segments=(part,), ends_document=False)
    yield example._replace(segments=(parts[-1],))
