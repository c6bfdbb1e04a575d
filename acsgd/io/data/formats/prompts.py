"""Prompts with answers: pairs, instructions, and turns in one text. The answers are learned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from acsgd.io.data.formats.base import Example, FormatError, OptionsOfFormat, TextSegment, has_strings, string_of
from acsgd.io.data.sources.base import TEXT, SourceRecord

INSTRUCTION = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
INSTRUCTION_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
"""Prompts of Stanford Alpaca (Taori et al. 2023)."""

HUMAN, BOT = "<human>:", "<bot>:"
_TURN = re.compile(rf"(?:^|(?<=\n))({HUMAN}|{BOT})")


class _Pair(OptionsOfFormat):
    """A prompt and an answer, which data.input_format and data.output_format put into a text."""

    prompt: ClassVar[str]
    answer: ClassVar[str]

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether both fields are strings."""
        return has_strings(fields, self.prompt, self.answer)

    def example(self, record: SourceRecord) -> Example:
        """Return the prompt, and the answer as the target."""
        prompt = string_of(record.fields, self.prompt)
        answer = _answer(record.fields, self.answer)
        return _pair(
            self.options.input_format.replace("__input__", prompt),
            self.options.output_format.replace("__output__", answer),
        )


class PromptCompletion(_Pair):
    """A "prompt" and its "completion"."""

    prompt, answer = "prompt", "completion"


class P3(_Pair):
    """ "inputs" and "targets", as in the Public Pool of Prompts (Sanh et al. 2022)."""

    prompt, answer = "inputs", "targets"


class InputOutput(_Pair):
    """An "input" and its "output"."""

    prompt, answer = "input", "output"


class _Instruction(OptionsOfFormat):
    """An instruction, maybe with an input, and the answer, in the prompt of Stanford Alpaca."""

    context: ClassVar[str]
    answer: ClassVar[str]

    def detect(self, fields: Mapping[str, Any]) -> bool:
        """Return whether instruction and answer are strings."""
        return has_strings(fields, "instruction", self.answer)

    def example(self, record: SourceRecord) -> Example:
        """Return the prompt, and the answer as the target."""
        instruction = string_of(record.fields, "instruction")
        context = string_of(record.fields, self.context, default="")
        prompt = INSTRUCTION_WITH_INPUT if context else INSTRUCTION
        return _pair(prompt.format(instruction=instruction, input=context), _answer(record.fields, self.answer))


class Alpaca(_Instruction):
    """An "instruction", maybe an "input", and the "output"."""

    context, answer = "input", "output"


class Dolly(_Instruction):
    """An "instruction", maybe a "context", and the "response"."""

    context, answer = "context", "response"


class OigChat(OptionsOfFormat):
    """A text of turns that begin with "<human>:" and "<bot>:". Each answer is learned up to the next turn."""

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


def _answer(fields: Mapping[str, Any], name: str) -> str:
    answer = string_of(fields, name)
    if not answer.strip():
        raise FormatError(f'has an empty answer under "{name}"', "write an answer, or remove the record")
    return answer


def _pair(prompt: str, answer: str) -> Example:
    return Example((TextSegment(prompt, is_target=False), TextSegment(answer)))
