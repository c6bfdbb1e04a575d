"""Chats, written with the chat template of the tokenizer. The answers of the assistant are learned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from acsgd.io.data.formats.base import Example, FormatError, OptionsOfFormat, TextSegment, TextSpan, names_of
from acsgd.io.data.sources.base import SourceRecord
from acsgd.io.data.sources.text import excerpt

ChatMessage = dict[str, Any]

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
SPEAKERS = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "system": SYSTEM,
    "tool": TOOL,
    "observation": TOOL,
}
"""Speakers of ShareGPT and their roles."""
FOLLOWS = {
    None: (SYSTEM, USER),
    SYSTEM: (USER,),
    USER: (ASSISTANT,),
    ASSISTANT: (USER, TOOL),
    TOOL: (TOOL, ASSISTANT),
}
"""Role -> roles that may follow it; None = at the beginning."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Tag with which a chat template marks what the assistant writes."""
NOTHING = "(?!)"
"""Pattern that is found nowhere."""
PLACEHOLDER = "\U00100000"
"""Character that stands for those of a special token in a message, to find where the template puts it."""


class Messages(OptionsOfFormat):
    """A list under "messages" of objects with "role" and "content"."""

    field, speaker, content = "messages", "role", "content"
    roles: Mapping[str, str] = {role: role for role in (SYSTEM, USER, ASSISTANT, TOOL)}

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether there is a list of such objects."""
        turns: Any = fields.get(self.field)
        return _is_list(turns) and all(isinstance(each, Mapping) and self.speaker in each for each in turns)

    def example(self, record: SourceRecord) -> Example:
        """Return the text of the chat template, with the answers as targets."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {self.tokenizer.name_or_path} has no chat template, which chats need; put one into the "
                "directory of the model as chat_template.jinja, or give a model that was trained for chats"
            )
        messages = self._messages(record.fields)
        text, spans = self._marked(messages) if MARKS.search(self._template) else self._derived(messages)
        control_token = self._control_token(messages)
        return Example(
            _segments(text, spans),
            has_special_tokens=True,
            control_token=control_token,
            plain=self._plain(messages, text) if control_token and self.options.split_special_tokens else (),
        )

    def _control_token(self, messages: Sequence[ChatMessage]) -> str | None:
        """Return a special token that the text of a message contains, None if there is none."""
        texts = (message["content"] for message in messages if isinstance(message["content"], str))
        return next((found[0] for text in texts if (found := self._special_tokens.search(text))), None)

    def _plain(self, messages: Sequence[ChatMessage], text: str) -> tuple[TextSpan, ...]:
        """Return where the text of a chat has special tokens of its messages; nothing if that cannot be known.

        The template writes the chat again, with placeholders of the same length in the messages.
        """
        masked = [{**message, "content": self._masked(message["content"])} for message in messages]
        try:
            [found] = self._rendered([masked])
        except FormatError:
            return ()
        if len(found) != len(text) or PLACEHOLDER in text:
            return ()
        if any(there not in (here, PLACEHOLDER) for here, there in zip(text, found, strict=True)):
            return ()
        return tuple(run.span() for run in re.finditer(f"{PLACEHOLDER}+", found))

    def _masked(self, content: str) -> str:
        """Return the text of a message with placeholders in place of special tokens."""
        return self._special_tokens.sub(lambda token: PLACEHOLDER * len(token[0]), content)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """Texts that the tokenizer takes for control tokens wherever they are."""
        added = self.tokenizer.added_tokens_decoder.values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, special)) or NOTHING)

    def _messages(self, fields: Mapping[str, Any]) -> list[ChatMessage]:
        """Return the messages, in the form in which chat templates take them. Raises FormatError."""
        turns: Any = fields.get(self.field)
        if not _is_list(turns) or not turns:
            raise FormatError(
                f'has no list of messages under "{self.field}"; its fields: {names_of(fields)}',
                f'write {{"{self.field}": [{{"{self.speaker}": ..., "{self.content}": ...}}]}}',
            )
        messages: list[ChatMessage] = []
        before = None
        for number, turn in enumerate(turns, start=1):
            message = self._message(turn, f"message {number}")
            role = message["role"]
            if role not in FOLLOWS[before]:
                raise FormatError(
                    f"has roles out of order: message {number} is of the {role}, "
                    + (f"after one of the {before}" if before else "and the first one"),
                    "let user and assistant take turns, after at most one message of the system",
                )
            messages.append(message)
            before = role
        if not any(message["role"] == ASSISTANT for message in messages):
            raise FormatError("has no message of the assistant", "write an answer, or remove the record")
        return messages

    def _message(self, turn: Any, place: str) -> ChatMessage:
        speaker = turn.get(self.speaker) if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or speaker not in self.roles:
            known = ", ".join(f'"{role}"' for role in self.roles)
            raise FormatError(
                f'has no known "{self.speaker}" in {place} ({excerpt(repr(speaker))})', f"use one of {known}"
            )
        assert isinstance(turn, Mapping)
        role, content = self.roles[speaker], turn.get(self.content)
        rest = {name: value for name, value in turn.items() if name not in (self.speaker, self.content)}
        if not isinstance(content, str) and not rest.get("tool_calls"):
            raise FormatError(f'has no string under "{self.content}" in {place}', f'write "{self.content}": "..."')
        if role == ASSISTANT and not (content or "").strip() and not rest.get("tool_calls"):
            raise FormatError(f"has an empty answer in {place}", "write an answer, or remove the record")
        return {"role": role, "content": content or "", **rest}

    @property
    def _template(self) -> str:
        template = self.tokenizer.get_chat_template()
        assert isinstance(template, str)
        return template

    def _marked(self, messages: list[ChatMessage]) -> tuple[str, list[TextSpan]]:
        """Return the text of a chat, and the spans that the template marks."""
        options: dict[str, Any] = {"chat_template": self._template, **self.tokenizer.special_tokens_map}
        try:
            rendered: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
        except Exception as error:  # templates raise errors of every class
            raise _refused(error) from None
        [text], [spans] = rendered
        return text, [(start, end) for start, end in spans if end > start]

    def _derived(self, messages: list[ChatMessage]) -> tuple[str, list[TextSpan]]:
        """Return the text of a chat, and what each answer adds to the prompt before it."""
        answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        prompts = self._rendered([messages[:number] for number in answers], add_generation_prompt=True)
        ends = sorted({*(number + 1 for number in answers), len(messages)})
        answered = self._rendered([messages[:end] for end in ends])
        text = answered[-1]
        spans = []
        for number, prompt, end in zip(answers, prompts, answered, strict=False):
            if not end.startswith(prompt) or not text.startswith(end):
                raise FormatError(
                    f"has an answer, message {number + 1}, that the chat template writes in another way in the middle "
                    "of a chat than at its end",
                    "mark the answers in the template with {% generation %} and {% endgeneration %}",
                )
            spans.append((len(prompt), _end(end, len(prompt), messages[number]["content"])))
        return text, spans

    def _rendered(self, chats: list[list[ChatMessage]], **options: bool) -> list[str]:
        """Return the texts of chats: together, which takes less time than one by one."""
        try:
            texts: Any = self.tokenizer.apply_chat_template(chats, tokenize=False, **options)  # type: ignore[arg-type]
        except Exception as error:  # templates raise errors of every class
            raise _refused(error) from None
        return list(texts)


class ShareGpt(Messages):
    """A list under "conversations" of objects with "from" and "value"."""

    field, speaker, content = "conversations", "from", "value"
    roles = SPEAKERS


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _refused(error: Exception) -> FormatError:
    reason = excerpt(" ".join(str(error).split()))
    return FormatError(f"is refused by the chat template of the tokenizer ({reason})", "correct the messages")


def _end(text: str, begin: int, content: str) -> int:
    """Return the end of an answer that begins at a character: without white space after the end of the turn."""
    if text.endswith(content):
        return len(text)
    return max(begin, len(text.rstrip()))


def _segments(text: str, spans: Sequence[TextSpan]) -> tuple[TextSegment, ...]:
    """Cut a text into targets, its spans, and the rest."""
    segments = []
    done = 0
    for start, end in spans:
        segments += [TextSegment(text[done:start], is_target=False), TextSegment(text[start:end])]
        done = end
    segments.append(TextSegment(text[done:], is_target=False))
    return tuple(segment for segment in segments if segment.text)
