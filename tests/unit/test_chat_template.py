"""The chat template of a run is used wherever chats are written, and lies in checkpoints and exports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.saved import SMALL, small_run, train_alone
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from acsgd import cli
from acsgd.commands.generation.prompts import PromptEncoder
from acsgd.config.options import DataConfig
from acsgd.io.data.formats.base import Example
from acsgd.io.data.formats.chat import Messages
from acsgd.io.data.formats.formats import describe_unused
from acsgd.io.data.sources.base import ReadOptions, SourceRecord
from acsgd.shards.chat_template import describe_date, describe_template, set_chat_template
from acsgd.shards.export import to_hf

CHAT = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
TURNS = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TEMPLATES = {
    "default": "{{ thinking | default('on') }}" + TURNS,
    "test": "{% if thinking is defined and not thinking %}{{ '/no_think\n' }}{% endif %}" + TURNS,
    "false": "{% if thinking is defined and thinking is false %}off {% endif %}" + TURNS,
    "in a loop": TURNS.replace("m.content", "m.content + thinking | default('') | string"),
    "macro": "{% macro mode() %}{{ thinking }}{% endmacro %}{{ mode() }}" + TURNS,
    "set": "{%- set thinking = thinking if thinking is defined else 5 -%} {{ thinking }}" + TURNS,
    "newline first": "\n\n  {{ thinking }}\n" + TURNS,
    "block after blanks": "   {% if thinking %}on{% endif %}\n" + TURNS,
    "comment first": "{# thinking #}\n" + TURNS,
    "marks": "{{ thinking }}{% for m in messages %}{{ m.role }}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}",
}
VALUES: dict[str, Any] = {"false": False, "true": True, "null": None, "3": 3, "low": "low", "\"a 'b' %}\"": "a 'b' %}"}
VALUES |= {"3 May, noon": "3 May, noon", '"a, b=c"': "a, b=c", '[1, {"a": "b, c=d"}]': [1, {"a": "b, c=d"}]}


@pytest.fixture
def chat(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return a copy of the tokenizer."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def data_config(**options: Any) -> DataConfig:
    return DataConfig("a.jsonl", sequence=16, batch=1, **options)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("value", VALUES)
def test_a_chat_is_written_as_transformers_writes_it_with_the_variables(
    template: str, value: str, chat: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Of which those of a record, and of a caller of transformers, have precedence."""
    (tmp_path / "a.jinja").write_text(template)
    set_chat_template(
        chat, data_config(chat_template=str(tmp_path / "a.jinja"), chat_template_kwargs=f"thinking={value}")
    )

    def expected(**variables: Any) -> Any:
        return chat.apply_chat_template(CHAT, chat_template=template, tokenize=False, **variables)

    assert chat.apply_chat_template(CHAT, tokenize=False) == expected(thinking=VALUES[value])
    assert chat.apply_chat_template(CHAT, tokenize=False, thinking="x") == expected(thinking="x")
    for record in ({}, {"chat_template_kwargs": {"thinking": "x"}}):
        example = Messages(ReadOptions(), chat).example(SourceRecord({"messages": CHAT, **record}, "line 1"))
        assert example.text == expected(thinking="x" if record else VALUES[value])


LLAMA = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
)


@pytest.mark.parametrize(
    ("template", "variables", "is_dated"),
    [
        (LLAMA, None, True),
        (LLAMA, "date_string=26 Jul 2024", False),
        ("{% if tools %}{{ strftime_now('%Y') }}{% endif %}", None, False),
        ("{{ raise_exception('strftime_now') }}", None, False),
    ],
)
def test_a_template_that_writes_the_date_is_named(
    template: str, variables: str | None, is_dated: bool, chat: PreTrainedTokenizerFast
) -> None:
    chat.chat_template = template
    set_chat_template(chat, data_config(chat_template_kwargs=variables))
    assert [note.startswith("warning: the chat template writes") for note in describe_date(chat)] == [True] * is_dated


def test_each_of_several_templates_gets_the_variables(chat: PreTrainedTokenizerFast) -> None:
    chat.chat_template = {"default": TEMPLATES["default"], "tool_use": "tools " + TEMPLATES["default"]}
    before = describe_template(chat)
    set_chat_template(chat, data_config(chat_template_kwargs="thinking=off"))
    assert describe_template(chat) != before  # what a run that resumes with another template says
    written = [chat.apply_chat_template(CHAT, tools=tools, tokenize=False) for tools in (None, [{"type": "function"}])]
    assert [text.partition("user")[0] for text in written] == ["off", "tools off"]


WRONG = {
    "chat_template=none.jinja": "data.chat_template=none.jinja does not exist; give a file with a Jinja template",
    "chat_template=empty.jinja": "data.chat_template=empty.jinja is empty; give",
    "chat_template=.": "data.chat_template=. cannot be read (Is a directory); give",
    "chat_template=wrong.jinja": "data.chat_template=wrong.jinja, line 2: Encountered unknown tag 'fi'",
    "chat_template_kwargs=thinking=1": "data.chat_template_kwargs=thinking=1: the tokenizer  has no chat template",
    "chat_template_kwargs=thinking": 'data.chat_template_kwargs="thinking" is not a list of variables; write "',
    "chat_template_kwargs=a-b=1": 'data.chat_template_kwargs="a-b=1" is not a list of variables; write "',
    "chat_template=a.jinja;chat_template_kwargs=other=1": 'data.chat_template_kwargs: "other" is no variable of the',
    "chat_template=a.jinja;chat_template_kwargs=messages=1": 'data.chat_template_kwargs: "messages" is no variable',
    "chat_template=a.jinja;chat_template_kwargs=thinking=1,thinking=2": "data.chat_template_kwargs=",
    **dict.fromkeys(
        (
            f"chat_template=a.jinja;chat_template_kwargs={text}"
            for text in (
                "thinking=low,",
                "thinking=false,b",
                'thinking="x",b',
                "thinking=[1, 2],b",
                'b=1,thinking={"a": 1},c',
                "thinking=1,",
            )
        ),
        "data.chat_template_kwargs=",
    ),
}
"""Options, and the beginning of the message."""


@pytest.mark.parametrize("options", WRONG)
def test_a_wrong_option_is_refused(
    options: str, chat: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("empty", "\n"), ("wrong", "{% if thinking %}\n{% fi %}"), ("a", TEMPLATES["default"])):
        Path(f"{name}.jinja").write_text(text)
    with pytest.raises(ValueError) as error:
        set_chat_template(chat, data_config(**dict(option.split("=", 1) for option in options.split(";"))))
    assert str(error.value).startswith(WRONG[options])


def test_checkpoints_and_exports_carry_the_template(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, template = tiny_model("gpt2", **SMALL), tmp_path / "a.jinja"
    template.write_text(TEMPLATES["test"])
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    config = small_run(model, tmp_path / "runs" / "run", steps=1)
    options: dict[str, Any] = {"chat_template": str(template), "chat_template_kwargs": "thinking=false"}
    data = DataConfig(str(tmp_path / "a.jsonl"), sequence=32, batch=2, rows="single", **options)
    checkpoint = train_alone(dataclasses.replace(config, data=data)) / "step-00000001"
    (tmp_path / "hf").mkdir()
    to_hf(checkpoint, tmp_path / "hf")
    oracle = AutoTokenizer.from_pretrained(model)
    written = {"chat_template": TEMPLATES["test"], "tokenize": False, "add_generation_prompt": True}
    expected = oracle.apply_chat_template(CHAT[:1], thinking=False, **written)
    assert expected.startswith("/no_think")
    for directory in (checkpoint, tmp_path / "hf"):
        found = AutoTokenizer.from_pretrained(directory)
        assert found.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True) == expected
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    for arguments in ([str(model), *flags], [str(checkpoint)]):
        cli.run(["data", "show", str(tmp_path / "a.jsonl"), "--model", *arguments])
        assert "⟦/no_think\nuser:1 + 1\nassistant:⟧2" in capsys.readouterr().out
    prompts = list[Example]()
    encode = PromptEncoder.encode
    monkeypatch.setattr(PromptEncoder, "encode", lambda self, prompt: (prompts.append(prompt), encode(self, prompt))[1])
    for flags, prompt in (
        ([], expected),
        (["--chat"], expected),
        (["--format", "text"], CHAT[0]["content"]),
        (["--input-format", "Q: __input__"], "Q: 1 + 1"),
    ):
        cli.run(["generate", str(checkpoint), "--prompt", "1 + 1", "--max-new-tokens", "1", *flags])
        assert prompts.pop().text == prompt
        assert ("a text is the message of a user" in capsys.readouterr().err) == (not flags)


def test_the_template_of_openchatkit_is_known_by_name(chat: PreTrainedTokenizerFast) -> None:
    """Turns as its inference writes them; what the bot answers is learned, up to the token that ends it."""
    set_chat_template(chat, data_config(chat_template="openchatkit"))
    example = Messages(ReadOptions(), chat).example(SourceRecord({"messages": [*CHAT, *CHAT]}, "here"))
    turn = ("<human>: 1 + 1\n<bot>:", " 2<|endoftext|>")
    assert [segment.text for segment in example.segments] == [*turn, f"\n{turn[0]}", turn[1]]
    assert [segment.is_target for segment in example.segments] == [False, True] * 2
    prompt = chat.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == turn[0]
    assert describe_unused(data_config(chat_template="openchatkit"), {"oig"}) == []
