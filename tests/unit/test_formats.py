"""Formats: what they detect, which text is a target, and the records that they refuse."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from lib.corpora import encoded_of, examples_of, tokenize_all
from transformers import PreTrainedTokenizerFast

from acsgd.commands.recorded import RecordedModel
from acsgd.config.options import DataConfig
from acsgd.io.data.formats.base import Example, TextSegment
from acsgd.io.data.formats.chat import Messages
from acsgd.io.data.formats.formats import FORMATS, describe_unused, read_options
from acsgd.io.data.sources.base import ReadOptions, RecordCounts
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.tokens.encode import DocumentEncoder
from acsgd.io.data.tokens.encode_examples import PairEncoder

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def read(
    directory: Path, *records: dict[str, Any], tokenizer: PreTrainedTokenizerFast | None = None, **options: Any
) -> list[Example]:
    """Return the examples of records in a file, read with options of a run."""
    (directory / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(sources=str(directory / "a.jsonl"), sequence=1, batch=1, **options)
    [part] = parse_sources(data.sources, options=read_options(data))
    return list(examples_of(part.source, tokenizer=tokenizer))


def marked(example: Example) -> str:
    """Return the text of an example with its targets in braces."""
    return "".join(f"{{{text}}}" if is_target else text for text, is_target in example.segments)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
ASK = "Below is an instruction that describes a task"
RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": "all"}, "{all}"),
    "messages": ({"messages": CHAT, "text": "x"}, "U:hi\nA:{hello}\n"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        "U:hi\nA:{hello}\n",
    ),
    "prompt": ({"prompt": "one ", "completion": "two", "text": "one two"}, "one {two}"),
    "p3": ({"inputs": "one ", "targets": "two"}, "one {two}"),
    "io": ({"input": "one ", "output": "two", "id": 7}, "one {two}"),
    "alpaca": (
        {"instruction": "Add.", "input": "1 {x} 1", "output": "2"},
        f"{ASK}, paired with an input that provides further context. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 {x} 1\n\n### Response:\n{2}",
    ),
    "dolly": (
        {"instruction": "Add.", "context": "", "response": "2", "category": "open_qa"},
        f"{ASK}. Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"
        "### Response:\n{2}",
    ),
    "oig": (
        {"text": "Be kind.\n<human>: one <bot>: no turn\n<bot>: two\n\n<human>: three\n<bot>: four"},
        "Be kind.\n<human>: one <bot>: no turn\n<bot>:{ two\n\n}<human>: three\n<bot>:{ four}",
    ),
}
"""Format of a language model -> a record, and its text with the targets in braces."""
TURNS = "{% for m in messages %}{{ m.role[0] | upper + ':' + m.content + '\\n' }}{% endfor %}"


def with_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    """Return a copy of a tokenizer with a chat template."""
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    copy.chat_template = template
    return copy


def test_the_table_has_all_formats() -> None:
    assert {*RECORDS, "label"} == FORMATS.keys()


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("is_given", [True, False])
def test_a_format_is_detected_and_masks_the_prompt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str, is_given: bool
) -> None:
    record, expected = RECORDS[name]
    chat = with_template(tokenizer, TURNS + "{% if add_generation_prompt %}A:{% endif %}")
    [example] = read(tmp_path, record, tokenizer=chat, format=name if is_given else "auto")
    if name == "oig" and not is_given:
        assert marked(example) == f"{{{record['text']}}}"
    else:
        assert marked(example) == expected
    [whole] = read(tmp_path, record, tokenizer=chat, format=name if is_given else "auto", targets="all")
    assert whole == example._replace(segments=(TextSegment(example.text),))


def test_a_context_of_dolly_is_the_input_of_its_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    [found] = read(tmp_path, {"instruction": "Add.", "context": "1 {x} 1", "response": "2"}, tokenizer=tokenizer)
    assert marked(found) == RECORDS["alpaca"][1]


def test_speakers_of_sharegpt_have_roles(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    speakers = ["system", "human", "gpt", "observation", "tool", "chatgpt", "user", "assistant", "human", "bot"]
    turns = [{"from": speaker, "value": str(number)} for number, speaker in enumerate(speakers)]
    chat = with_template(tokenizer, TURNS + "{% if add_generation_prompt %}A:{% endif %}")
    [found] = read(tmp_path, {"conversations": turns}, tokenizer=chat)
    expected = "S:0 U:1 A:{2} T:3 T:4 A:{5} U:6 A:{7} U:8 A:{9}"
    assert marked(found).split() == expected.split()


def test_a_run_reports_the_format_and_gets_the_mask(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "one two", "output": " three"}\n' * 3)
    for options, notes in (
        (ReadOptions(), (f'data.sources: {path}: format "io", detected from the first record',)),
        (ReadOptions(format="io"), ()),
        (ReadOptions(format="io", targets="all"), ()),
        (ReadOptions(format="io", input_format="Q: __input__"), ()),
    ):
        sources = parse_sources(str(path), options=[options])
        [corpus] = tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
        assert corpus.notes == notes
        assert (corpus.targets is None) == (options.targets == "all")
        if corpus.targets is not None:
            targets = corpus.tokens[:][corpus.targets[:] == 1]
            assert tokenizer.decode(targets.tolist()) == " three<|endoftext|>" * 3


def test_options_that_no_format_of_the_sources_reads_are_named() -> None:
    options: dict[str, Any] = {"targets": "all", "input_format": "Q: __input__", "split_special_tokens": False}
    options |= {"output_format": " __output__", "chat_template": "a.jinja", "chat_template_kwargs": "a=1"}
    unused = {
        "text": {*options},
        "io": {"chat_template", "chat_template_kwargs", "split_special_tokens"},
        "messages": {"input_format", "output_format"},
        "prompt": set(),
        "alpaca": {*options} - {"targets"},
        "label": {*options},
    }
    for form, names in unused.items():
        sentences = describe_unused(DataConfig("a", sequence=1, batch=1, **options), {form})
        assert {sentence.removeprefix("data.").partition("=")[0] for sentence in sentences} == names, form
        assert all(
            f'has no effect on how records of format "{form}" are read; remove it, or give --data.format ' in each
            for each in sentences
        )
        assert describe_unused(DataConfig("a", sequence=1, batch=1), {form}) == []
    assert describe_unused(DataConfig("a", sequence=1, batch=1, **options), {"text", "prompt"}) == []


def test_input_and_output_are_put_into_formats(tmp_path: Path) -> None:
    for record in (
        {"input": "__output__?", "output": "__input__!"},
        {"prompt": "__output__?", "completion": "__input__!"},
        {"inputs": "__output__?", "targets": "__input__!"},
    ):
        [example] = read(tmp_path, record, input_format="Q: __input__\nA:", output_format=" __output__\n")
        assert marked(example) == "Q: __output__?\nA:{ __input__!\n}"


def test_fields_are_renamed_and_found_in_objects(tmp_path: Path) -> None:
    record = {"meta": {"body": {"text": "deep"}}, "question": "q", "a.b": "dotted"}
    assert [marked(each) for each in read(tmp_path, record, fields="text=meta.body.text")] == ["{deep}"]
    assert [marked(each) for each in read(tmp_path, record, fields="text = a.b")] == ["{dotted}"]
    assert [marked(each) for each in read(tmp_path, record, fields="input=question,output=a.b")] == ["q{dotted}"]


def test_a_long_answer_is_cut_into_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acsgd.io.data.sources.text.PIECE_CHARS", 8)
    examples = read(tmp_path, {"prompt": "a b ", "completion": "c d e f g h i"}, {"prompt": "p", "completion": "q"})
    assert [marked(example) for example in examples] == ["a b ", "{c d e f }", "{g h i}", "p{q}"]
    assert [example.ends_document for example in examples] == [False, False, True, True]


BAD: list[tuple[dict[str, Any], dict[str, str], str]] = [
    (
        {"txt": "a", "n": 1},
        {},
        'has no string under "text"; its fields: "txt", "n" (a number); name the fields that a format needs',
    ),
    (
        {"txt": {"body": {"en": "a", "de": 1}}, "tags": ["x"], "n": None},
        {},
        'has no string under "text"; its fields: "txt.body.en", "txt.body.de" (a number), "tags" (a list), "n" (null); '
        "name the",
    ),
    (
        {"text": 7},
        {},
        'has no string under "text"; its fields: "text" (a number); write a string, or read the value as text, '
        '--data.fields "text=text:text"',
    ),
    (
        {"input": "a", "output": True, "text": "a"},
        {"format": "auto"},
        'has no string under "output"; its fields: "input", "output" (true or false), "text"; write a string, or read',
    ),
    (
        {"text": float("nan"), "n": None},
        {"format": "text"},
        'has no string under "text"; its fields: "text" (NaN), "n" (null); write {"text": "..."} or name',
    ),
    (
        {"text": "a"},
        {"fields": "text=body.text"},
        'has no field "body.text"; its fields: "text"; correct --data.fields',
    ),
    (
        {"text": "a"},
        {"format": "io"},
        'has no string under "input"; its fields: "text"; write {"input": "..."} or name',
    ),
    ({"input": "a", "output": " \n"}, {}, 'has an empty answer under "output"; write an answer, or remove the record'),
    ({"prompt": "a", "completion": ""}, {}, 'has an empty answer under "completion"'),
    (
        {"instruction": "a", "input": 7, "output": "b"},
        {},
        'has no string under "input"; its fields: "instruction", "input"',
    ),
    ({"text": "<bot>: a\n<human>: b"}, {"format": "oig"}, "has roles out of order: turn 1 is of <bot>:"),
    ({"text": "<human>: a\n<bot>:  \n<human>: b"}, {"format": "oig"}, "has an empty answer in turn 2"),
    ({"text": "plain"}, {"format": "oig"}, 'has no answer: no line begins with "<bot>:"'),
    ({"messages": []}, {"format": "messages"}, 'has no list of messages under "messages"; its fields: "messages"'),
    (
        {"messages": ["a"]},
        {"format": "messages"},
        'has no known "role" or "from" in message 1 (None); use one of "system", "user"',
    ),
    ({"messages": [{"role": "boss", "content": "a"}]}, {}, 'has no known "role" or "from" in message 1 (\'boss\')'),
    ({"messages": [{"role": "user"}]}, {}, 'has no string under "content", "value" or "text" in message 1'),
    ({"messages": [{"role": "a(b", "content": "a"}]}, {}, 'has no known "role" or "from" in message 1 (\'a(b\')'),
    ({"messages": CHAT[:1]}, {}, "has no message of the assistant"),
    (
        {"dialog": CHAT},
        {},
        'has no string under "text"; its fields: "dialog" (a list); name the fields that a format needs, '
        '--data.fields "messages=dialog"',
    ),
    ({"messages": [CHAT[0], {"role": "assistant", "content": " "}]}, {}, "has an empty answer in message 2"),
    (
        {"messages": [{"role": "system", "content": "s"}, *CHAT]},
        {},
        "is refused by the chat template of the tokenizer (no system)",
    ),
    (
        {"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]},
        {},
        'has "weight": 0.5 in message 2; an answer is learned (1',
    ),
    (
        {"messages": [CHAT[0], {**CHAT[1], "weight": 1, "train": False}]},
        {},
        'has "weight": 1, "train": false in message 2',
    ),
    ({"messages": CHAT, "tools": "[{]"}, {}, 'has no JSON list under "tools": [{]; correct it'),
    ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": [{}]}]}, {}, "has tool calls in message 2, which the"),
    ({"conversations": [{"from": "function_call", "value": "tide()"}]}, {}, "has no tool call in message 1 ('tide()')"),
    (
        {"messages": [CHAT[0], {**CHAT[1], "function_call": {"name": None, "arguments": "{}"}}]},
        {},
        "has no tool call in",
    ),
    ({"messages": [CHAT[0], {**CHAT[1], "function_call": "tide()"}]}, {}, "has no tool call in message 2 ('tide()')"),
    (
        {"dialog": CHAT, "tags": []},
        {},
        'has no string under "text"; its fields: "dialog" (a list), "tags" (a list); name'
        ' the fields that a format needs, --data.fields "messages=dialog"',
    ),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]}, {}, "has a part in message 1 that is"),
    ({"messages": [CHAT[0], {**CHAT[1], "train_detail": [{}]}]}, {}, 'has "train_detail" in message 2: parts of an'),
    (
        {"messages": CHAT, "label": False},
        {},
        'has "label": false, which says that its answer is one to avoid; remove it or the record or',
    ),
    ({"messages": CHAT[1:]}, {}, "begins with an answer, which the chat template does not ask for without a message "),
    ({"messages": CHAT, "images": ["a.png"]}, {}, 'has "images", which are not read, and may be what its text is '),
    ({"messages": CHAT, "weight": 0.5}, {}, 'has "weight": 0.5, which says how much it is learned; remove it or the'),
    ({"prompt": "a", "completion": "b", "weight": 0}, {}, 'has "weight": 0, which says that its answer is not '),
    ({"prompt": "a", "completion": "b", "kto_tag": False}, {}, 'has "kto_tag": false, which says that its answer'),
    ({"messages": CHAT, "train": False}, {}, 'has "train": false, which says that its answer is not learned; remove'),
    ({"messages": CHAT, "loss": 0}, {}, 'has "loss": 0, which says that its answer is not learned; remove it or the'),
    (
        {"prompt": "a", "completion": "b", "train": "False"},
        {},
        'has "train": "False", which says that its answer is not ',
    ),
    (
        {"text": "a", "weight": 0},
        {},
        'has "weight": 0, which says that it is not learned; remove it or the record or, if it says something else, '
        "give --data.format text",
    ),
    ({"text": "a", "weight": "0.5"}, {}, 'has "weight": "0.5", which says how much it is learned; remove it or the'),
    ({"text": "a", "train": False}, {}, 'has "train": false, which says that it is not learned; remove it or the'),
    ({"prompt": "a", "completion": "b", "history": [["c"]]}, {}, 'has no list of pairs under "history"; write'),
]
"""Record, options, and the message."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS


@pytest.mark.parametrize(("record", "options", "message"), BAD)
def test_a_bad_record_is_named_or_skipped(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], options: dict[str, str], message: str
) -> None:
    chat = with_template(tokenizer, NO_SYSTEM)
    with pytest.raises(ValueError) as refused:
        read(tmp_path, record, tokenizer=chat, **options)
    assert str(refused.value).startswith(f"data.sources: {tmp_path / 'a.jsonl'}, line 1 {message}")
    assert read(tmp_path, record, tokenizer=chat, on_error="skip", **options) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "mesages"}, 'data.format="mesages": unknown format; use "auto", "messages", '),
        ({"fields": "text"}, 'data.fields="text" is not a list of fields; write, for example, "text=content"'),
        ({"fields": "text=a,"}, 'data.fields="text=a," is not a list of fields'),
        ({"fields": "text=,a=b"}, 'data.fields="text=,a=b" is not a list of fields'),
        (
            {"fields": "input=q output=a"},
            'data.fields="input=q output=a" is not a list of fields; write, for example, "input=q,output=a"',
        ),
        (
            {"input_format": "Q: __input__\\nA:"},
            "has a backslash and the letter n, as a shell",
        ),
        ({"input_format": "Q: "}, 'data.input_format="Q: " must contain __input__ once'),
        ({"output_format": "__output____output__"}, "must contain __output__ once"),
        ({"output_format": ("__output__", "Yes")}, 'data.output_format="Yes" must contain __output__ once'),
        (
            {"format": ("io", "text"), "max_prompt": (1, 0, 2)},
            "data.format has 2 values, data.max_prompt has 3 values; give one for all sources, or one for each",
        ),
        ({"max_answer": 5, "targets": "all"}, "data.targets=all makes them one text; remove them, or data.targets"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_options(DataConfig(sources="demo", sequence=1, batch=1, **options))
    assert message in str(refused.value)


def test_each_source_may_be_read_in_its_own_way(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Law: sources of a mixture, the same file twice among them, have the tokens that each has alone."""
    (tmp_path / "a.jsonl").write_text('{"input": "one two", "output": " three", "body": "four five six"}\n' * 3)
    (tmp_path / "b.jsonl").write_text('{"q": "seven eight", "a": "nine ten"}\n' * 3)
    lists: dict[str, Any] = {
        "format": ("text", "io", "io"),
        "fields": ("text=body", "", "input=q,output=a"),
        "input_format": ("__input__", "Q: __input__", "__input__?"),
        "max_prompt": (0, 0, 2),
    }
    names = [str(tmp_path / f"{name}.jsonl") for name in "aab"]

    def tokens(sources: Sequence[str], options: dict[str, Any], cache: str) -> list[tuple[list[int], object]]:
        data = DataConfig(sources=",".join(sources), sequence=1, batch=1, **options)
        parsed = parse_sources(data.sources, options=read_options(data))
        found = tokenize_all(parsed, tokenizer, tmp_path / cache, vocab_size=512)
        return [(each.tokens[:].tolist(), each.targets and each.targets[:].tolist()) for each in found]

    alone = [
        tokens([name], {key: values[index] for key, values in lists.items()}, f"cache-{index}")[0]
        for index, name in enumerate(names)
    ]
    assert tokens(names, lists, "cache") == alone
    recorded = RecordedModel("m", options=json.loads(json.dumps({f"data.{key}": each for key, each in lists.items()})))
    assert recorded.data_options({}) == lists, "evaluation reads them alike"
    assert tokens(names[::-1], {key: values[::-1] for key, values in lists.items()}, "cache") == alone[::-1]
    with pytest.raises(
        ValueError, match=r"has 2 sources, but options of \[data\], such as data.format, have 3 values; "
    ):
        tokens(names[:2], lists, "cache")


def test_a_limit_of_prompts_is_for_records_of_a_prompt_and_an_answer(tmp_path: Path) -> None:
    [found] = read(tmp_path, {"input": "one", "output": "two"}, max_prompt=3)
    assert (found.max_prompt, found.max_answer) == (3, 0)
    for record in ({"text": "all"}, {"input": "a", "output": "b", **HISTORY}):
        with pytest.raises(ValueError, match=r"is not a prompt with one answer, which data\.max_prompt and"):
            read(tmp_path, record, max_prompt=3)


HISTORY = {"history": [["three", "four"]], "system": "Be kind."}
MEANT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "one", "input": "two", "completion": "3"}, "one\ntwo{3}"),
    ({"prompt": "one", "input": "two", "output": "3"}, "one\ntwo{3}"),
    ({"prompt": "one", "completion": "2", **HISTORY}, "Be kind.\n\nthree{four}\n\none{2}"),
    ({"prompt": "one", "completion": "2", "system": None, "history": [], "input": ""}, "one{2}"),
    ({"inputs": "one", "targets": "2", "system": "Be kind."}, "Be kind.\n\none{2}"),
    (
        {"instruction": "one", "output": "2", **HISTORY},
        "Be kind.\n\n### Instruction:\nthree\n\n### Response:\n{four}\n\n### Instruction:\none\n\n### Response:\n{2}",
    ),
    (
        {"instruction": "one", "input": "two", "response": "3", "system": "S"},
        "S\n\n### Instruction:\none\n\n### Input:\ntwo\n\n### Response:\n{3}",
    ),
]
"""Record with fields that other tools give a meaning, and its text."""


@pytest.mark.parametrize(("record", "expected"), MEANT)
def test_fields_with_a_meaning_are_read(tmp_path: Path, record: dict[str, Any], expected: str) -> None:
    assert [marked(example) for example in read(tmp_path, record)] == [expected]


def test_numbers_are_text_when_asked(tmp_path: Path) -> None:
    records = [{"q": "a", "n": value} for value in (4, 4.5, True, [1, "é"], "four")]
    found = [marked(example) for example in read(tmp_path, *records, fields="input=q,output=n:text")]
    assert found == ["a{4}", "a{4.5}", "a{true}", 'a{[1, "é"]}', "a{four}"]
    day, name = datetime.date(2024, 1, 2), f"{tmp_path / 'a.parquet'}"
    for value, text in (("é".encode(), "é"), (day, "2024-01-02"), (decimal.Decimal("1.50"), "1.50")):
        pyarrow.parquet.write_table(pyarrow.table({"n": [value]}), name)
        [part] = parse_sources(name, options=[ReadOptions(fields=(("text", "n:text"),))])
        assert [example.text for example in examples_of(part.source)] == [text]
    with pytest.raises(
        ValueError, match=r'has no string under "text"; .*, or read the value as text, --data.fields "tex'
    ):
        [*examples_of(parse_sources(name, options=[ReadOptions(fields=(("text", "n"),))])[0].source)]


def unread(directory: Path, *records: dict[str, Any], tokenizer: Any = None, **options: str) -> dict[str, int]:
    """Return what a run says of fields without effect."""
    counts = RecordCounts()
    (directory / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(sources=str(directory / "a.jsonl"), sequence=1, batch=1, **options)
    [part] = parse_sources(data.sources, options=read_options(data))
    assert list(examples_of(part.source, counts, tokenizer))
    return dict(counts.unread)


def test_fields_without_effect_are_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    records = [{"input": "a", "output": "b", "id": 0, "tags": [], "note": None}, {"input": "a", "output": "b"}]
    assert unread(tmp_path, *records) == {"id": 1}
    assert unread(tmp_path, {"text": "a", "body": {"t": "b"}, "m": 1}, fields="text=body.t") == {"text": 1, "m": 1}
    assert unread(tmp_path, {"text": "a", "n": 1, "label": 1}, fields="text=n:text") == {"text": 1, "label": 1}
    for weight in (72.5, "[" * 10_000):
        assert unread(tmp_path, {"text": "a", "weight": weight, "loss": 0.0}) == {"weight": 1, "loss": 1}
    assert unread(tmp_path, {"prompt": "a", "completion": "b", "label": "False"}) == {"label": 1}
    chat = with_template(tokenizer, TURNS + "{% if add_generation_prompt %}A:{% endif %}")
    messages = [{**CHAT[0], "name": "x", "train": True}, {**CHAT[1], "weight": 1, "name": None}]
    found = unread(tmp_path, {"messages": messages, "tools": [{"name": "f"}], "id": 1}, tokenizer=chat)
    assert found == {"messages.name": 1, "messages.train": 1, "tools": 1, "id": 1}
    record = {"a": {"b": {"text": "t", "n": 1}, "c": 2, "d": None}, "e": 3}
    assert unread(tmp_path, record, fields="text=a.b.text") == {"a.b.n": 1, "a.c": 1, "e": 1}
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "x"}, "image": None}]
    messages = [{"role": "user", "content": parts, "weight": 0}, {**CHAT[1], "training": 1}]
    record = {"messages": messages, "chat_template_kwargs": {"mode": 1}, "functions": [{"name": "f"}]}
    names = {"messages.content.cache_control", "chat_template_kwargs.mode", "functions"}
    assert unread(tmp_path, record, tokenizer=chat) == dict.fromkeys(names, 1)
    record = {"prompt": [{**CHAT[0], "id": 1}], "completion": [{**CHAT[1], "name": "x"}]}
    assert unread(tmp_path, record, tokenizer=chat) == {"prompt.id": 1, "completion.name": 1}
    path = tmp_path / "b.jsonl"
    path.write_text('{"text": "one", "id": 3}\n' * 2)
    [corpus] = tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)
    assert corpus.notes == (f'data.sources: {path}: fields that are not read (records with them): "id" (2)',)


def test_a_field_of_a_message_is_read_if_it_changes_the_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Not if the template names it elsewhere, as "name" in tool calls, or on a condition that no message meets."""
    template = OBJECTS.replace("m.role +", "(m.name if m.role == 'tool' and m.name else m.role) +")
    chat, named = with_template(tokenizer, template), {"name": "x"}
    assert unread(tmp_path, {"messages": [{**CHAT[0], **named}, CHAT[1]]}, tokenizer=chat) == {"messages.name": 1}
    user, call, result, answer = calling(ARGUMENTS)
    assert unread(tmp_path, {"messages": [user, call, {**result, **named}, answer]}, tokenizer=chat) == {}


def test_a_label_says_nothing_of_an_answer_if_the_format_is_given(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat, is_toxic = with_template(tokenizer, CHATML), {"label": False}
    for form, record in (("messages", {"messages": CHAT}), ("prompt", {"prompt": "a", "completion": "b"})):
        assert unread(tmp_path, {**record, **is_toxic}, tokenizer=chat, format=form) == {"label": 1}


@pytest.mark.parametrize("function", ["a name", None, {"name": None}, {"name": 1}])
def test_a_tool_call_without_a_name_is_no_bug(
    function: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = with_template(tokenizer, "{# tool_calls #}" + CHATML)
    record = {"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{"function": function}]}]}
    if not isinstance(function, dict):
        assert len(read(tmp_path, record, tokenizer=chat)) == 1
        return
    with pytest.raises(ValueError, match="has a tool call without a name in message 2"):
        read(tmp_path, record, tokenizer=chat)


def test_a_chat_is_rendered_once_per_field_whose_effect_is_in_question(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, rendered = list[int](), Messages._rendered

    def counted(self: Messages, chats: Any, *arguments: Any, **options: Any) -> list[str]:
        calls.append(len(chats))
        return rendered(self, chats, *arguments, **options)

    monkeypatch.setattr(Messages, "_rendered", counted)
    chat, counts = with_template(tokenizer, "{# name #}" + CHATML), set[int]()
    for turns in (1, 20):
        calls.clear()
        messages = [{**each, "name": "x"} for each in CHAT * turns]
        assert unread(tmp_path, {"messages": messages}, tokenizer=chat) == {"messages.name": 1}
        counts.add(len(calls))
    assert len(counts) == 1


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    message = r"a\.jsonl, line 1: the tokenizer .* has no chat template, .*; put one into .* as chat_template\.jinja"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {"messages": CHAT}, tokenizer=with_template(tokenizer, None), on_error="skip")


# ---- chat templates, as short as they can be

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content"
    " | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
    + CHATML
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role)"
    " + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BOS = EOS = "<|endoftext|>"
HEAD = "<|start_header_id|>"
END = "<|end_header_id|>\n\n"
TEMPLATES = {
    "llama3": (
        LLAMA3,
        f"{BOS}{HEAD}user{END}one<|eot_id|>{HEAD}assistant{END}{{two<|eot_id|>}}"
        f"{HEAD}user{END}three<|eot_id|>{HEAD}assistant{END}{{four<|eot_id|>}}",
    ),
    "chatml": (
        CHATML,
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{two<|im_end|>}\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n{four<|im_end|>}\n",
    ),
    "qwen": (
        QWEN,
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{two<|im_end|>}\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n{four<|im_end|>}\n",
    ),
    "mistral": (MISTRAL, f"{BOS}[INST] one [/INST]{{ two{EOS}}}[INST] three [/INST]{{ four{EOS}}}"),
    "gemma": (
        GEMMA,
        f"{BOS}<start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\n{{two<end_of_turn>}}\n"
        "<start_of_turn>user\nthree<end_of_turn>\n<start_of_turn>model\n{four<end_of_turn>}\n",
    ),
    "marked": (
        MARKED,
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{two<|im_end|>}\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n{four<|im_end|>}\n",
    ),
}
"""Name -> chat template, and its text with the targets in braces."""
WORDS = ["one", "two", "three", "four"]
TWO_TURNS = [{"role": role, "content": word} for role, word in zip(["user", "assistant"] * 2, WORDS, strict=True)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_targets_are_what_the_template_writes_for_the_assistant(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    template, expected = TEMPLATES[name]
    chat = with_template(tokenizer, template)
    specials = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", HEAD, END.strip(), "<start_of_turn>", "<end_of_turn>"]
    [example] = read(tmp_path, {"messages": TWO_TURNS}, tokenizer=chat)
    assert marked(example) == expected
    assert example.text == chat.apply_chat_template(TWO_TURNS, tokenize=False)
    for special in ([], specials):
        chat.add_special_tokens({"additional_special_tokens": special})
        assert read(tmp_path, {"messages": TWO_TURNS}, tokenizer=chat) == [example]
        encoded = encoded_of(chat, example)
        assert encoded.tokens.tolist() == chat.apply_chat_template(TWO_TURNS, return_dict=False)
        targets = [text for text, is_target in example.segments if is_target]
        assert chat.decode(encoded.tokens[encoded.targets].tolist()) == "".join(targets)


def test_marks_agree_with_those_of_transformers(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = with_template(tokenizer, MARKED)
    [example] = read(tmp_path, {"messages": TWO_TURNS}, tokenizer=chat)
    oracle = chat.apply_chat_template(TWO_TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded_of(chat, example).targets.tolist() == [bool(bit) for bit in oracle["assistant_masks"]]


def test_a_template_that_rewrites_earlier_turns_needs_marks(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Templates of reasoning models leave the thoughts of earlier turns out."""
    forgetful = "{% for m in messages %}{{ m.role + ':' + (m.content if loop.last else '...') + '\\n' }}{% endfor %}"
    with pytest.raises(ValueError, match=r"answer, message 2, that the chat template writes in another way "):
        read(tmp_path, {"messages": TWO_TURNS}, tokenizer=with_template(tokenizer, forgetful))


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("asked", ["", "<|im_start|>assistant", "<|im_start|>assistant\\n\\n", "<|im_start|>model\\n"])
def test_a_generation_prompt_that_is_not_what_was_learned_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str, asked: str
) -> None:
    other = "{{ '<|im_start|>assistant\\n' }}{% endif %}"
    assert template.endswith(other)
    chat = with_template(tokenizer, template.removesuffix(other) + f"{{{{ '{asked}' }}}}{{% endif %}}")
    if template == CHATML and "<|im_start|>assistant\\n".startswith(asked):  # its rest is learned with the answer
        assert marked(read(tmp_path, {"messages": TWO_TURNS}, tokenizer=chat)[0]).endswith("four<|im_end|>}\n")
        return
    with pytest.raises(ValueError, match=r"before which the chat template writes '<\|im_start\|>assis.*add_generation"):
        read(tmp_path, {"messages": TWO_TURNS}, tokenizer=chat)


def test_a_token_is_divided_where_an_answer_begins(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    glued = "{% for m in messages %}{{ m.content }}{% endfor %}"
    [whole] = tokenizer("hein", add_special_tokens=False)["input_ids"][-1:]
    text = tokenizer.decode([whole])
    for cut in range(1, len(text)):
        chat = [{"role": "user", "content": text[:cut]}, {"role": "assistant", "content": text[cut:]}]
        template = with_template(tokenizer, glued)
        read(tmp_path, {"messages": chat}, tokenizer=template)
        [corpus] = tokenize_all(parse_sources(str(tmp_path / "a.jsonl")), template, tmp_path / "cache", vocab_size=1000)
        parts = [template(part, add_special_tokens=False)["input_ids"] for part in (text[:cut], text[cut:])]
        assert corpus.tokens[:].tolist() == [*parts[0], *parts[1]]
        assert corpus.targets[:].tolist() == [0] * len(parts[0]) + [1] * len(parts[1])


# ---- what other tools give a meaning: the oracle is apply_chat_template

CALLS = (
    "{% if tools %}{{ '<|im_start|>tools' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + ARGUMENTS }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OBJECTS, TEXTS = (
    CALLS.replace("ARGUMENTS", how) for how in ("(c.function.arguments | tojson)", "c.function.arguments")
)
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PORT = {"type": "object", "properties": {"port": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "tide", "parameters": PORT}}
ARGUMENTS = {"port": "Brest", "hour": 7}


def calling(arguments: Any) -> list[dict[str, Any]]:
    """Return a chat in which a tool is called."""
    call = {"type": "function", "function": {"name": "tide", "arguments": arguments}}
    answer, result = {"role": "assistant", "content": "4 m."}, {"role": "tool", "content": "4"}
    return [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}, result, answer]


def legacy() -> list[dict[str, Any]]:
    """Return the chat of `calling` as OpenAI had it before tools."""
    user, _, result, answer = calling(ARGUMENTS)
    call = {"name": "tide", "arguments": json.dumps(ARGUMENTS)}
    asked = {"role": "assistant", "content": None, "function_call": call}
    return [user, asked, {**result, "role": "function", "name": "tide"}, answer]


def sharegpt(call: Any) -> list[dict[str, str]]:
    """Return the chat of `calling` as ShareGPT has it."""
    texts = {"human": CHAT[0]["content"], "function_call": json.dumps(call), "observation": "4", "gpt": "4 m."}
    return [{"from": speaker, "value": text} for speaker, text in texts.items()]


def parts_of(content: str) -> list[dict[str, str]]:
    """Return a text and another one as the parts of a message."""
    return [{"type": "text", "text": word} for word in (content, " more")]


ROLES = {"human": "user", "bot": "assistant"}
ANSWERING = ("assistant", "gpt", "bot", "function_call")


def by_role(*speakers: str) -> str:
    """Return a chat template that tells messages apart by speakers of its own, and takes others for answers."""
    branches = "".join(
        f"{{% elif m.role == '{speaker}' %}}{{{{ '{'<a>' if speaker in ANSWERING else speaker}' + m.content }}}}"
        for speaker in speakers
    )
    return (
        f"{{% for m in messages %}}{{% if not m %}}{branches}{{% else %}}"
        "{{ '<a>' + (m.content or '') + m.function_call | string }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
    )


def spoken(*speakers: str) -> list[dict[str, Any]]:
    """Return a chat of speakers."""
    return [{"role": role, "content": f"of {role}"} for role in speakers]


USER, ANSWER = CHAT
DEVELOPER, SYSTEM = ({"role": role, "content": "Be kind."} for role in ("developer", "system"))
MORE = [{**each, "content": f"{each['content']} more"} for each in CHAT]
CHATS: list[tuple[str, dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = [
    (OBJECTS, {"messages": calling(ARGUMENTS), "tools": [FUNCTION]}, calling(ARGUMENTS), {"tools": [FUNCTION]}),
    (OBJECTS, {"messages": CHAT, "tools": json.dumps([FUNCTION])}, CHAT, {"tools": [FUNCTION]}),
    (OBJECTS, {"messages": calling(json.dumps(ARGUMENTS))}, calling(ARGUMENTS), {}),
    (OBJECTS, {"messages": calling("{}")}, calling({}), {}),
    (TEXTS, {"messages": calling(json.dumps(ARGUMENTS))}, calling(json.dumps(ARGUMENTS)), {}),
    (OBJECTS, {"conversations": CHAT}, CHAT, {}),
    (OBJECTS, {"messages": json.dumps(CHAT)}, CHAT, {}),
    (OBJECTS, {"messages": [{"from": "human", "value": CHAT[0]["content"]}, CHAT[1]]}, CHAT, {}),
    (
        OBJECTS,
        {
            "conversations": [
                {"role": "human", "value": CHAT[0]["content"], "content": None},
                {"from": "gpt", "text": CHAT[1]["content"], "value": None},
            ]
        },
        CHAT,
        {},
    ),
    (OBJECTS, {"messages": legacy(), "functions": [FUNCTION["function"]]}, calling(ARGUMENTS), {"tools": [FUNCTION]}),
    (by_role("user", "function"), {"messages": legacy()}, legacy(), {}),
    *(
        (by_role(*speakers), {"messages": spoken(*speakers)}, spoken(*speakers), {})
        for speakers in (("human", "gpt"), ("human", "bot"), ("human", "function_call", "observation"))
    ),
    (
        CHATML,
        {"messages": spoken("human", "bot")},
        [{**m, "role": ROLES[m["role"]]} for m in spoken("human", "bot")],
        {},
    ),
    (OBJECTS, {"messages": [{**m, "function_call": {"name": None, "arguments": None}} for m in CHAT]}, CHAT, {}),
    (
        OBJECTS,
        {"messages": [CHAT[0], {"role": "assistant", "function_call": json.dumps({"name": "tide", "arguments": {}})}]},
        [CHAT[0], {**calling({})[1]}],
        {},
    ),
    (
        OBJECTS,
        {"conversations": sharegpt({"name": "tide", "arguments": ARGUMENTS})},
        calling(ARGUMENTS),
        {},
    ),
    (OBJECTS, {"conversations": sharegpt([{"name": "tide", "arguments": {}}])}, calling({}), {}),
    (CHATML, {"messages": CHAT, "system": "Be kind."}, [SYSTEM, *CHAT], {}),
    (CHATML, {"messages": [DEVELOPER, *CHAT]}, [DEVELOPER, *CHAT], {}),
    (CHATML, {"messages": [USER, USER, ANSWER, ANSWER, USER]}, [USER, USER, ANSWER, ANSWER, USER], {}),
    (CHATML, {"messages": [ANSWER, *CHAT]}, [ANSWER, *CHAT], {}),
    (CHATML, {"messages": [{**each, "content": parts_of(each["content"])} for each in CHAT]}, MORE, {}),
    (PARTS, {"messages": [{**each, "content": parts_of(each["content"])} for each in CHAT]}, MORE, {}),
    (CHATML, {"prompt": [SYSTEM, *CHAT, USER], "completion": [ANSWER]}, [SYSTEM, *CHAT, *CHAT], {}),
    (CHATML, {"prompt": "hi", "completion": [ANSWER]}, CHAT, {}),
    (
        "{% for each in documents %}{{ each.text }}{% endfor %}" + CHATML,
        {"messages": CHAT, "documents": [{"text": "High water at 7."}]},
        CHAT,
        {"documents": [{"text": "High water at 7."}]},
    ),
    (CHATML, {"prompt": json.dumps([SYSTEM, USER]), "completion": json.dumps([ANSWER])}, [SYSTEM, *CHAT], {}),
    (
        "{{ mode }}" + CHATML,
        {"messages": CHAT, "chat_template_kwargs": {"mode": "fast"}},
        CHAT,
        {"mode": "fast"},
    ),
]
"""Chat template, record, and the messages and variables that its authors would give to transformers."""


@pytest.mark.parametrize(("template", "record", "messages", "variables"), CHATS)
def test_a_chat_is_written_as_transformers_writes_it(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    record: dict[str, Any],
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
) -> None:
    chat = with_template(tokenizer, template)
    [example] = read(tmp_path, record, tokenizer=chat)
    assert example.text == chat.apply_chat_template(messages, tokenize=False, **variables)
    learned = [text for text, is_target in example.segments if is_target]
    answers = [each for each in messages if each["role"] in ANSWERING]
    assert len(learned) == (1 if "prompt" in record else len(answers))
    table = pyarrow.Table.from_pylist([record, dict.fromkeys(record)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    [part] = parse_sources(str(tmp_path / "a.parquet"), options=[ReadOptions(on_error="skip")])
    assert next(examples_of(part.source, tokenizer=chat)) == example


def test_nulls_that_arrow_adds_are_not_written(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = with_template(tokenizer, OBJECTS)
    chats = [calling(ARGUMENTS), calling({"port": "Lorient", "day": "Monday"}), CHAT]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": each} for each in chats]), tmp_path / "a.parquet"
    )
    datasets.Dataset.from_list([{"messages": each} for each in chats]).save_to_disk(tmp_path / "saved")
    for source in ("a.parquet", "saved", "saved:hub"):
        name = f"hf:{tmp_path / 'saved'}" if source == "saved:hub" else str(tmp_path / source)
        for prefix in ("", "stream:"):
            [part] = parse_sources(prefix + name)
            found = [example.text for example in examples_of(part.source, tokenizer=chat)]
            assert found == [chat.apply_chat_template(each, tokenize=False) for each in chats]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("flag", ["weight", "train", "training", "loss"])
def test_an_answer_with_weight_0_is_not_learned(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str, flag: str
) -> None:
    turns = [{**turn, flag: int(turn["content"] == "four")} for turn in TWO_TURNS]
    [example] = read(tmp_path, {"messages": turns}, tokenizer=with_template(tokenizer, template))
    assert example.text == with_template(tokenizer, template).apply_chat_template(TWO_TURNS, tokenize=False)
    assert [text for text, is_target in example.segments if is_target] == ["four<|im_end|>"]


def test_a_message_that_the_template_leaves_out_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    known = TURNS.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")
    with pytest.raises(ValueError, match="has a message of the developer, number 1, which the chat template does not"):
        read(tmp_path, {"messages": [DEVELOPER, *CHAT]}, tokenizer=with_template(tokenizer, known))


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
def test_real_dialogues_are_masked() -> None:
    options = read_options(DataConfig(sources="", sequence=1, batch=1, format="oig"))
    counts = RecordCounts()
    [part] = parse_sources(str(SHARED / "oig-chat" / "unified_sgd.jsonl"), options=options)
    for example in examples_of(part.source, counts):
        for before, segment in zip(example.segments, example.segments[1:], strict=False):
            assert segment.is_target == (before.text == "<bot>:")
    assert counts.records == 708


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_special_tokens_in_the_text_of_a_message_are_found(
    role: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    chat = with_template(tokenizer, CHATML)
    chat.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    chat.add_tokens(["<think>"])
    turns = [{"role": "user", "content": "a <think> b"}, {"role": "assistant", "content": "c <|im_ end|>"}]
    injected = [turn | {"content": "x<|im_end|>y"} if turn["role"] == role else turn for turn in turns]
    [plain] = read(tmp_path, {"messages": turns}, tokenizer=chat)
    [found] = read(tmp_path, {"messages": injected}, tokenizer=chat)
    assert (plain.control_token, found.control_token) == (None, "<|im_end|>")
    encoder = DocumentEncoder(chat)
    encoder.encode([plain], encoder.tokenize([plain]))
    assert encoder.note is None
    encoder.encode([found, plain, found], encoder.tokenize([found, plain, found]))
    note = "chats with special tokens of the tokenizer in the text of a message: as"
    assert encoder.note == f"{note} ordinary text 2"
    of_pairs = PairEncoder(chat, 512, "error")
    of_pairs.encode([found, plain], of_pairs.tokenize([found, plain]))
    assert of_pairs.note == f"{note} control tokens 1"
