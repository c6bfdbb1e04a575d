"""Chats, written with the chat template of the tokenizer. The answers of the assistant are learned.

What a template is given is what `apply_chat_template` of transformers would be given: messages, tools and variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from acsgd.io.data.formats.base import (
    Example,
    Format,
    FormatError,
    TextSegment,
    TextSpan,
    has_value,
    is_null,
    names_of,
    string_of,
)
from acsgd.io.data.formats.messages import (
    ASSISTANT,
    FLAGS,
    FUNCTION_CALL,
    FUNCTIONS,
    ROLES,
    SPEAKERS,
    SYSTEM,
    TOOL_CALLS,
    USER,
    ChatMessage,
    arguments_of,
    calls_in,
    check_learnable,
    has_name,
    is_answer,
    is_list,
    learned_flag,
    map_arguments,
    map_strings,
    messages_in,
    parsed,
    texts_of,
)
from acsgd.io.data.sources.base import SourceRecord
from acsgd.io.data.sources.text import excerpt
from acsgd.shards.chat_template import names

SPANS = "train_detail"
"""Field of a message of axolotl with the spans of its text that are learned."""
TOOLS, DOCUMENTS, VARIABLES = "tools", "documents", "chat_template_kwargs"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Tag with which a chat template marks what the assistant writes."""
NOTHING = "(?!)"
"""Pattern that is found nowhere."""
ITERATES_CONTENT = re.compile(r"\bfor\s+\w+\s+in\s+[^%]*content")
"""Loop of a chat template over the parts of a message; other templates take its text alone."""
TESTS_CONTENT = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")
"""Question of a chat template whether a message has content; others take an empty text for none."""
PROBE = '{"probe": "text"}'
"""Arguments of a tool call, which a template that takes text writes as they are."""
PLACEHOLDER = "\U00100000"
"""Character that stands for those of a special token in a message, to find where the template puts it."""


class ChatRecord(NamedTuple):
    """Messages in the form in which chat templates take them."""

    messages: list[ChatMessage]
    answers: list[int]
    """Indices of the messages that are learned."""
    variables: dict[str, Any]
    """Tools, documents, and variables of the template."""


class Messages(Format):
    """A list under "messages" of objects with "role" and "content"; maybe "system", and the "tools" that may be called.

    The list may be JSON text, as in tables. Messages may have "tool_calls", one of FLAGS, and the NAMES of ShareGPT.
    "documents" are those that answers refer to, and "chat_template_kwargs" variables of the template.
    """

    required: ClassVar[Sequence[str]] = ("messages",)
    optional = (SYSTEM, TOOLS, FUNCTIONS, DOCUMENTS, VARIABLES)
    options_read = ("targets", "chat_template", "chat_template_kwargs", "split_special_tokens")

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether there is a list of such objects."""
        turns = messages_in(fields.get(self.required[0]))
        return turns is not None and all(isinstance(each, Mapping) and "role" in each for each in turns)

    def unread(self, fields: Mapping[str, Any]) -> Iterator[str]:
        yield from super().unread(fields)
        chat, template = self._chat(fields), self._template(fields)
        has_effect = cache(lambda name: self._has_effect(name, chat, template))
        if TOOLS in chat.variables and not has_effect(TOOLS):
            yield TOOLS if has_value(fields.get(TOOLS)) else FUNCTIONS
        if DOCUMENTS in chat.variables and not has_effect(DOCUMENTS):
            yield DOCUMENTS
        given = chat.variables.keys() - {TOOLS, DOCUMENTS}
        yield from (f"{VARIABLES}.{name}" for name in given if not names(template, name))
        known = ("role", "content", TOOL_CALLS, FUNCTION_CALL)
        for place, turn, _ in self._turns(fields):
            flags = [name for name in FLAGS if is_answer(turn["role"]) or not turn.get(name)]
            others = [name for name, value in turn.items() if has_value(value) and name not in (*known, *flags)]
            yield from (f"{place}.{name}" for name in others if not has_effect(name))
            content = turn.get("content")
            parts = [part for part in content if isinstance(part, Mapping)] if is_list(content) else []
            rest = {name for part in parts for name, value in part.items() if has_value(value)} - {"type", "text"}
            yield from (f"{place}.content.{name}" for name in rest if not names(template, name))

    def _has_effect(self, name: str, chat: ChatRecord, template: str) -> bool:
        """Return whether a field of messages, or a variable, changes the text of a chat or of an earlier one."""
        if name not in self._effective and names(template, name):
            messages = [{key: value for key, value in message.items() if key != name} for message in chat.messages]
            variables = {key: value for key, value in chat.variables.items() if key != name}
            try:
                is_same = self._rendered([messages], variables) == self._rendered([chat.messages], chat.variables)
            except FormatError:
                is_same = False
            self._effective.update([name] * (not is_same))
        return name in self._effective

    @cached_property
    def _effective(self) -> set[str]:
        """Names that have changed the text of a chat."""
        return set()

    def example(self, record: SourceRecord) -> Example:
        """Return the text of the chat template, with the answers as targets."""
        chat, template = self._chat(record.fields), self._template(record.fields)
        if not any(is_answer(message["role"]) for message in chat.messages):
            raise FormatError("has no message of the assistant", "write an answer, or remove the record")
        text, spans = self._marked(chat, template) if MARKS.search(template) else self._derived(chat)
        return self._example(chat, text, spans)

    def prompt(self, fields: Mapping[str, Any]) -> Example:
        """Return the text of the chat template that asks for an answer: for the last message if it is one."""
        chat = self._chat(fields)
        if is_answer(chat.messages[-1]["role"]):
            chat = chat._replace(messages=chat.messages[:-1])
        if not chat.messages:
            raise FormatError("has nothing but an answer", "write what it answers")
        [text] = self._rendered([chat.messages], chat.variables, add_generation_prompt=True)
        return self._example(chat, text, [], add_generation_prompt=True)

    def _example(self, chat: ChatRecord, text: str, spans: Sequence[TextSpan], **options: bool) -> Example:
        """Return a text of a chat, written with some options, with spans as targets."""
        _check_written(chat.messages, text)
        control_token = self._control_token(chat)
        is_plain = control_token and self.options.split_special_tokens
        return Example(
            _segments(text, spans),
            has_special_tokens=True,
            control_token=control_token,
            plain=self._plain(chat, text, **options) if is_plain else (),
        )

    def _control_token(self, chat: ChatRecord) -> str | None:
        """Return a special token that a text of a chat contains, None if there is none."""
        found: list[str] = []
        map_strings([chat.messages, chat.variables], lambda text: found.extend(self._special_tokens.findall(text)))
        return found[0] if found else None

    def _plain(self, chat: ChatRecord, text: str, **options: bool) -> tuple[TextSpan, ...]:
        """Return where the text of a chat has special tokens of its messages; nothing if that cannot be known.

        The template writes the chat again, with placeholders of the same length in the messages.
        """
        messages, variables = map_strings([chat.messages, chat.variables], self._masked)
        try:
            [found] = self._rendered([messages], variables, **options)
        except FormatError:
            return ()
        if len(found) != len(text) or PLACEHOLDER in text:
            return ()
        if any(there not in (here, PLACEHOLDER) for here, there in zip(text, found, strict=True)):
            return ()
        return tuple(run.span() for run in re.finditer(f"{PLACEHOLDER}+", found))

    def _masked(self, content: str) -> str:
        """Return a text of a chat with placeholders in place of special tokens."""
        return self._special_tokens.sub(lambda token: PLACEHOLDER * len(token[0]), content)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """Texts that the tokenizer takes for control tokens wherever they are."""
        added = self.tokenizer.added_tokens_decoder.values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, special)) or NOTHING)

    def _turns(self, fields: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """Return field and value of each message of a record, and whether it is learned unless a flag says so.

        Raises FormatError.
        """
        [field] = self.required
        if not (turns := messages_in(fields.get(field))):
            raise FormatError(
                f'has no list of messages under "{field}"; its fields: {names_of(fields)}',
                f'write {{"{field}": [{{"role": ..., "content": ...}}]}}',
            )
        return [(field, turn, True) for turn in turns]

    def _chat(self, fields: Mapping[str, Any]) -> ChatRecord:
        """Return the chat of a record. Raises FormatError."""
        template, messages, answers = self._template(fields), list[ChatMessage](), list[int]()
        system, turns = string_of(fields, SYSTEM, default=""), self._turns(fields)
        variables = parsed(fields.get(VARIABLES), dict, f'"{VARIABLES}"') or {}
        check_learnable(fields, self.options)
        if tools := parsed(fields.get(TOOLS), list, f'"{TOOLS}"'):
            variables[TOOLS] = tools
        elif functions := parsed(fields.get(FUNCTIONS), list, f'"{FUNCTIONS}"'):
            variables[TOOLS] = [{"type": "function", "function": function} for function in functions]
        if documents := parsed(fields.get(DOCUMENTS), list, f'"{DOCUMENTS}"'):
            variables[DOCUMENTS] = documents
        if system:
            messages.append({"role": SYSTEM, "content": system})
        for number, (_, turn, is_learned) in enumerate(turns, start=1):
            message, is_learned = self._message(turn, f"message {number}", template, is_learned=is_learned)
            if system and message["role"] == SYSTEM:
                raise FormatError(f'has two system prompts, "{SYSTEM}" and message {number}', "remove one of them")
            answers += [len(messages)] * (is_learned and is_answer(message["role"]))
            messages.append(message)
        return ChatRecord(self._with_arguments(messages, variables), answers, variables)

    def _message(self, turn: Any, place: str, template: str, *, is_learned: bool) -> tuple[ChatMessage, bool]:
        """Return a message for the template, and whether it is learned. Raises FormatError."""
        speaker = turn.get("role") if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or not (speaker in SPEAKERS or _quotes(template, speaker)):
            known = ", ".join(f'"{role}"' for role in ROLES)
            raise FormatError(
                f'has no known "role" or "from" in {place} ({excerpt(repr(speaker))})', f"use one of {known}"
            )
        assert isinstance(turn, Mapping)
        role = SPEAKERS.get(speaker, speaker)
        if _quotes(template, speaker) and not _quotes(template, role):
            role = speaker
        call = turn.get(FUNCTION_CALL)
        call = None if not has_value(call) or (isinstance(call, Mapping) and all(map(is_null, call.values()))) else call
        writes_call = names(template, FUNCTION_CALL)
        turn = {name: value for name, value in turn.items() if name != FUNCTION_CALL}
        if speaker == FUNCTION_CALL != role:
            turn |= {"content": None, TOOL_CALLS: calls_in(turn.get("content"), place)}
        elif call is not None:
            calls = calls_in(call, place)
            turn |= {FUNCTION_CALL: call} if writes_call else {TOOL_CALLS: calls}
        if has_value(turn.get(SPANS)) and not names(template, SPANS):
            raise FormatError(f'has "{SPANS}" in {place}: parts of an answer cannot be left out', "give whole answers")
        is_learned = learned_flag(turn, place, default=is_learned)
        content, read = turn.get("content"), ("role", "content", *FLAGS)
        # without nulls, which tables of rows add
        rest = {name: value for name, value in turn.items() if name not in read and value is not None}
        has_calls = bool(rest.get(TOOL_CALLS))
        if has_calls and not names(template, TOOL_CALLS):
            raise FormatError(
                f"has tool calls in {place}, which the chat template does not write",
                "give a model whose template does, or remove the record",
            )
        has_calls |= FUNCTION_CALL in rest
        if is_list(content):
            content = content if ITERATES_CONTENT.search(template) else "".join(texts_of(content, place))
        elif not isinstance(content, str) and not (has_calls and is_null(content)):
            raise FormatError(f'has no string under "content", "value" or "text" in {place}', 'write "content": "..."')
        if is_answer(role) and is_learned and not has_calls and isinstance(content, str) and not content.strip():
            raise FormatError(f"has an empty answer in {place}", "write an answer, or remove the record")
        if content is None and not TESTS_CONTENT.search(template):
            content = ""
        return {**rest, "role": role, "content": content}, is_learned

    def _with_arguments(self, messages: list[ChatMessage], variables: Mapping[str, Any]) -> list[ChatMessage]:
        """Return messages with arguments that are JSON text as objects, unless the template writes text as it is."""
        if not any(isinstance(each, str) for message in messages for each in arguments_of(message)):
            return messages
        probes = [map_arguments(message, lambda _: PROBE) for message in messages]
        try:
            if PROBE in self._rendered([probes], variables)[0]:
                return messages
        except FormatError:
            pass
        return [
            map_arguments(message, lambda text: parsed(text, dict, "the arguments of a tool call"))
            for message in messages
        ]

    def _template(self, fields: Mapping[str, Any]) -> str:
        """Return the template of a record. Raises ValueError if the tokenizer has none."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {self.tokenizer.name_or_path} has no chat template, which chats need; put one into the "
                "directory of the model as chat_template.jinja, or give a model that was trained for chats"
            )
        template = self.tokenizer.get_chat_template(tools=fields.get(TOOLS) or fields.get(FUNCTIONS) or None)
        assert isinstance(template, str)
        return template

    def _marked(self, chat: ChatRecord, template: str) -> tuple[str, list[TextSpan]]:
        """Return the text of a chat, and the spans of answers that the template marks."""
        options: dict[str, Any] = {"chat_template": template, **self.tokenizer.special_tokens_map, **chat.variables}
        try:
            rendered: Any = render_jinja_template([chat.messages], return_assistant_tokens_mask=True, **options)
        except Exception as error:  # templates raise errors of every class
            raise _refused(error) from None
        [text], [spans] = rendered
        answers = [number for number, message in enumerate(chat.messages) if is_answer(message["role"])]
        if answers != chat.answers:
            if len(spans) != len(answers):
                raise FormatError(
                    "has answers that are not learned, and the chat template does not mark each answer once",
                    "mark each message of the assistant with one {% generation %} and {% endgeneration %}",
                )
            spans = [span for span, number in zip(spans, answers, strict=True) if number in chat.answers]
        if chat.answers and (last := chat.answers[-1]) == len(chat.messages) - 1:
            [prompt] = self._rendered([chat.messages[:last]], chat.variables, add_generation_prompt=True)
            learned = next((start for start, end in spans if end > len(prompt)), 0)
            self._check_prompt(chat, last, prompt, text, learned)
        return text, [(start, end) for start, end in spans if end > start]

    def _derived(self, chat: ChatRecord) -> tuple[str, list[TextSpan]]:
        """Return the text of a chat, and what each answer adds to the prompt before it."""
        messages, answers = chat.messages, chat.answers
        prompts = self._rendered([messages[:end] for end in answers], chat.variables, add_generation_prompt=True)
        ends = sorted({*(number + 1 for number in answers), len(messages)})
        answered = self._rendered([messages[:end] for end in ends], chat.variables)
        text = answered[-1]
        spans = []
        for number, prompt, end in zip(answers, prompts, answered, strict=False):
            self._check_prompt(chat, number, prompt, end)
            if not end.startswith(prompt) or not text.startswith(end):
                raise FormatError(
                    f"has an answer, message {number + 1}, that the chat template writes in another way in the middle "
                    "of a chat than at its end",
                    "mark the answers in the template with {% generation %} and {% endgeneration %}",
                )
            spans.append((len(prompt), _end(end, len(prompt), messages[number]["content"])))
        return text, spans

    def _check_prompt(self, chat: ChatRecord, number: int, prompt: str, text: str, learned: int = 0) -> None:
        """Raise FormatError if the template asks for an answer, a message, with another text than it writes before it.

        prompt: the chat before the answer, with the generation prompt; text: the chat up to it, of which the answer is
        learned from a character on. No error if they differ before the generation prompt already: templates may shorten
        earlier messages.
        """
        if text.startswith(prompt) and learned <= len(prompt):
            return
        [before] = self._rendered([chat.messages[:number]], chat.variables)
        if prompt.startswith(before) and text.startswith(before):
            asked, written = prompt[len(before) :], text[len(before) : max(learned, len(prompt))]
            raise FormatError(
                f"has an answer, message {number + 1}, before which the chat template writes {excerpt(repr(written))}, "
                f"but {excerpt(repr(asked))} to ask for one (add_generation_prompt): generation would not begin where "
                "learning does",
                "correct the template, or give one with data.chat_template",
            )

    def _rendered(self, chats: list[list[ChatMessage]], variables: Mapping[str, Any], **options: bool) -> list[str]:
        """Return the texts of chats: together, which takes less time than one by one."""
        if not chats:
            return []
        try:
            texts: Any = self.tokenizer.apply_chat_template(chats, tokenize=False, **variables, **options)  # type: ignore[arg-type]
        except Exception as error:  # templates raise errors of every class
            if all(chats):
                raise _refused(error) from None
            self._rendered([chat for chat in chats if chat], variables, **options)
            raise FormatError(
                "begins with an answer, which the chat template does not ask for without a message before it",
                "add the message that it answers, or remove it",
            ) from None
        return list(texts)


class ShareGpt(Messages):
    """A list under "conversations" of objects with "from" and "value", or as in Messages."""

    required = ("conversations",)


class PromptMessages(Messages):
    """Lists of messages under "prompt" and "completion", of which one may be a text. Only the completion is learned.

    A list may be JSON text, as in tables.
    """

    required = ("prompt", "completion")

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether one of them is a list."""
        return any(_list_in(fields.get(name)) is not None for name in self.required)

    def prompt(self, fields: Mapping[str, Any]) -> Example:
        _, answer = self.required
        return super().prompt(fields if has_value(fields.get(answer)) else {**fields, answer: "."})

    def _turns(self, fields: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        turns = []
        for name, role in zip(self.required, (USER, ASSISTANT), strict=True):
            part = _list_in(fields.get(name))
            part = [{"role": role, "content": string_of(fields, name)}] if part is None else part
            turns += [(name, turn, name == "completion") for turn in part]
        return turns


def _list_in(value: Any) -> list[Any] | None:
    """Return the messages of a list, or of a text that is the JSON of one; None of another text."""
    found = messages_in(value)
    is_chat = is_list(value) or all(isinstance(each, Mapping) and "role" in each for each in found or [None])
    return found if is_chat else None


@lru_cache(maxsize=256)
def _quotes(template: str, role: str) -> bool:
    """Return whether a template has a role as a string."""
    return f"'{role}'" in template.replace('"', "'")


def _check_written(messages: Sequence[ChatMessage], text: str) -> None:
    """Raise FormatError if the template leaves out what somebody else than the assistant says."""
    for number, message in enumerate(messages, start=1):
        content = message["content"]
        calls = [call.get("function") for call in message.get(TOOL_CALLS) or () if isinstance(call, Mapping)]
        if has_value(call := message.get(FUNCTION_CALL)):
            calls += [each["function"] for each in calls_in(call, f"message {number}")]
        called = [call for call in calls if isinstance(call, Mapping) and "name" in call]
        if not all(map(has_name, called)):
            raise FormatError(
                f"has a tool call without a name in message {number}", "name the tool, or remove the record"
            )
        if missing := next((call["name"] for call in called if call["name"] not in text), None):
            raise FormatError(
                f'has a call of the tool "{missing}" in message {number}, which the chat template does not write',
                "give a model whose template does, or remove the record",
            )
        if is_answer(message["role"]) or not isinstance(content, str) or content.strip() in text:
            continue
        # templates may change white space, or write JSON
        if json.dumps(content, ensure_ascii=False)[1:-1] not in text and "".join(content.split()) not in "".join(
            text.split()
        ):
            raise FormatError(
                f"has a message of the {message['role']}, number {number}, which the chat template does not write",
                "remove it, or give its text to a message that the template writes",
            )


def _refused(error: Exception) -> Exception:
    """Return what a template that fails means: a ValueError if it does for all chats."""
    reason = excerpt(" ".join(str(error).split()))
    if isinstance(error, TemplateSyntaxError):
        return ValueError(f"the chat template of the tokenizer is invalid, line {error.lineno}: {reason}; correct it")
    return FormatError(f"is refused by the chat template of the tokenizer ({reason})", "correct the messages")


def _end(text: str, begin: int, content: Any) -> int:
    """Return the end of an answer that begins at a character: without white space after the end of the turn."""
    if content and isinstance(content, str) and text.endswith(content):
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
