"""Prompts with answers: pairs, instructions, and turns in one text. The answers are learned."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from acsgd.io.data.formats.base import Example, Format, FormatError, TextSegment, has_value, string_of
from acsgd.io.data.formats.chat import PromptMessages
from acsgd.io.data.formats.messages import check_learnable
from acsgd.io.data.sources.base import TEXT, SourceRecord

DESCRIBED = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request."
PREAMBLES = {
    False: f"{DESCRIBED}. {REQUEST}",
    True: f"{DESCRIBED}, paired with an input that provides further context. {REQUEST}",
}
"""First lines of a prompt of Stanford Alpaca (Taori et al. 2023), by whether the instruction has an input."""
SYSTEM, HISTORY = "system", "history"

HUMAN, BOT = "<human>:", "<bot>:"
_TURN = re.compile(rf"(?:^|(?<=\n))({HUMAN}|{BOT})")


class _PromptFormat(Format):
    """A prompt and its answer. "system" is a text before them, "history" a list of earlier pairs of prompt and answer.

    The answers of the history are learned, too, as LLaMA-Factory does.
    """

    optional: ClassVar[Sequence[str]] = (SYSTEM, HISTORY)
    options_read: ClassVar[Sequence[str]] = ("targets",)
    answer: ClassVar[str]

    def example(self, record: SourceRecord) -> Example:
        """Return the prompts, and the answers as targets."""
        prompt, answer = self.prompt(record.fields), string_of(record.fields, self.answer)
        if not answer.strip():
            raise FormatError(f'has an empty answer under "{self.answer}"', "write an answer, or remove the record")
        return prompt._replace(segments=(*prompt.segments, TextSegment(self._answered(answer))))

    def prompt(self, fields: Mapping[str, Any]) -> Example:
        """Return the prompts, and the answers of the history as targets."""
        check_learnable(fields, self.options)
        prompt, before = self._prompt(fields), self._opening(fields)
        segments: list[TextSegment] = []
        for earlier, its_answer in _history(fields):
            segments += [
                TextSegment(before + self._asked(earlier), is_target=False),
                TextSegment(self._answered(its_answer)),
            ]
            before = "\n\n"
        return Example((*segments, TextSegment(before + prompt, is_target=False)))

    @abstractmethod
    def _opening(self, fields: Mapping[str, Any]) -> str:
        """Return what the text of a record begins with."""

    @abstractmethod
    def _prompt(self, fields: Mapping[str, Any]) -> str:
        """Return the prompt of a record, as it is written."""

    @abstractmethod
    def _asked(self, prompt: str, context: str = "") -> str:
        """Return a prompt as it is written. context: further input, which not all formats have."""

    def _answered(self, answer: str) -> str:
        """Return an answer as it is written."""
        return answer


class _Pair(_PromptFormat):
    """A prompt and an answer, which data.input_format and data.output_format put into a text."""

    options_read: ClassVar[Sequence[str]] = ("targets", "input_format", "output_format")
    prompts: ClassVar[Sequence[str]]
    """Fields with the parts of the prompt, of which records may have some; they are joined by newlines."""

    def _opening(self, fields: Mapping[str, Any]) -> str:
        system = string_of(fields, SYSTEM, default="")
        return f"{system}\n\n" if system else ""

    def _prompt(self, fields: Mapping[str, Any]) -> str:
        parts = [string_of(fields, name, default=None if name in self.required else "") for name in self.prompts]
        return self._asked("\n".join(part for part in parts if part))

    def _asked(self, prompt: str, context: str = "") -> str:
        return self.options.input_format.replace("__input__", prompt)

    def _answered(self, answer: str) -> str:
        return self.options.output_format.replace("__output__", answer)


class PromptCompletion(_Pair):
    """A "prompt", maybe an "input", and the "completion"; texts, or lists of messages as in a chat."""

    required, answer = ("prompt", "completion"), "completion"
    optional = ("input", *_Pair.optional)
    prompts = ("prompt", "input")
    options_read = (*_Pair.options_read, *PromptMessages.options_read)

    def example(self, record: SourceRecord) -> Example:
        return self._messages.example(record) if self._messages.detect(record.fields) else super().example(record)

    def prompt(self, fields: Mapping[str, Any]) -> Example:
        return self._messages.prompt(fields) if self._messages.detect(fields) else super().prompt(fields)

    def unread(self, fields: Mapping[str, Any]) -> Iterator[str]:
        return self._messages.unread(fields) if self._messages.detect(fields) else super().unread(fields)

    @cached_property
    def _messages(self) -> PromptMessages:
        return PromptMessages(self.options, self.tokenizer)


class P3(_Pair):
    """ "inputs" and "targets", as in the Public Pool of Prompts (Sanh et al. 2022)."""

    required, answer = ("inputs", "targets"), "targets"
    prompts = ("inputs",)


class InputOutput(_Pair):
    """An "input", maybe a "prompt" before it, and its "output"."""

    required, answer = ("input", "output"), "output"
    optional = ("prompt", *_Pair.optional)
    prompts = ("prompt", "input")


class _Instruction(_PromptFormat):
    """An instruction, maybe with an input, and the answer, in the prompt of Stanford Alpaca.

    A system prompt stands in place of its first lines.
    """

    contexts: ClassVar[Sequence[str]] = ("input", "context")
    """Fields with the input; they are joined by newlines."""
    optional = (*contexts, *_PromptFormat.optional)

    def _opening(self, fields: Mapping[str, Any]) -> str:
        return f"{string_of(fields, SYSTEM, default='') or PREAMBLES[bool(self._context(fields))]}\n\n"

    def _prompt(self, fields: Mapping[str, Any]) -> str:
        return self._asked(string_of(fields, "instruction"), self._context(fields))

    def _context(self, fields: Mapping[str, Any]) -> str:
        return "\n".join(part for name in self.contexts if (part := string_of(fields, name, default="")))

    def _asked(self, prompt: str, context: str = "") -> str:
        middle = f"### Input:\n{context}\n\n" if context else ""
        return f"### Instruction:\n{prompt}\n\n{middle}### Response:\n"


class Alpaca(_Instruction):
    """An "instruction", maybe an "input", and the "output"."""

    required, answer = ("instruction", "output"), "output"


class Dolly(_Instruction):
    """An "instruction", maybe a "context", and the "response"."""

    required, answer = ("instruction", "response"), "response"


class OigChat(Format):
    """A text of turns that begin with "<human>:" and "<bot>:". Each answer is learned up to the next turn."""

    required = (TEXT,)
    options_read = ("targets", "chat_template")  # with which checkpoints write chats

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return False: such a text is learned as a whole unless this format is asked for."""
        return False

    def example(self, record: SourceRecord) -> Example:
        """Return the text, with what follows each "<bot>:" as a target."""
        opening, *turns = _TURN.split(string_of(record.fields, TEXT))
        segments = [TextSegment(opening, is_target=False)] if opening else []
        for number, (speaker, text) in enumerate(zip(turns[::2], turns[1::2], strict=True), start=1):
            if speaker != (HUMAN if number % 2 else BOT):
                raise FormatError(
                    f"has roles out of order: turn {number} is of {speaker}", f"let {HUMAN} and {BOT} take turns"
                )
            if speaker == BOT and not text.strip():
                raise FormatError(f"has an empty answer in turn {number}", "write an answer, or remove the turn")
            segments += [TextSegment(speaker, is_target=False), TextSegment(text, is_target=speaker == BOT)]
        if not any(segment.is_target for segment in segments):
            raise FormatError(f'has no answer: no line begins with "{BOT}"', "correct the record, or --data.format")
        return Example(tuple(segments))

    def prompt(self, fields: Mapping[str, Any]) -> Example:
        """Return the text up to the last "<bot>:"."""
        turns = [*_TURN.finditer(text := string_of(fields, TEXT))]
        if not turns or turns[-1][1] != BOT:
            raise FormatError(f'does not end in a turn of "{BOT}", which would be generated', f'add a line "{BOT}"')
        return Example((TextSegment(text[: turns[-1].end()], is_target=False),))


def _history(fields: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Return the pairs of prompt and answer before those of a record. Raises FormatError."""
    history: Any = fields.get(HISTORY)
    if not has_value(history):
        return ()
    is_valid = isinstance(history, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history
    )
    if not is_valid:
        raise FormatError(
            f'has no list of pairs under "{HISTORY}"', f'write {{"{HISTORY}": [["PROMPT", "ANSWER"]]}}, or remove it'
        )
    pairs: Sequence[Sequence[str]] = history
    return pairs
