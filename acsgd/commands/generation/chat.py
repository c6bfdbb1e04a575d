"""Chat in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from acsgd.commands.generation.decode import Generator
from acsgd.commands.generation.prompts import PromptIds, describe_cuts
from acsgd.commands.generation.records import PromptReader
from acsgd.io.data.formats.messages import ASSISTANT, USER
from acsgd.notes import print_note


class Chat:
    """A conversation. With a chat template its messages are kept; without one each line is a separate prompt.

    reader: makes prompts of messages, and of lines without a chat template.
    """

    def __init__(self, generator: Generator, reader: PromptReader) -> None:
        self._generator = generator
        self._reader = reader
        self._messages: list[dict[str, Any]] = []
        self._turn = 0

    def run(self) -> None:
        """Read lines and print replies until the end of the input."""
        has_template = self._generator.prompts.has_chat_template
        print_note(
            "Ctrl-C ends a reply, Ctrl-D the chat"
            if has_template
            else "the tokenizer has no chat template: each line is continued as a plain prompt; Ctrl-C ends a text, "
            "Ctrl-D the session"
        )
        for line in _lines():
            try:
                self._reply(line)
            except ValueError as error:
                print_note(f"error: {error}")

    def _reply(self, line: str) -> None:
        """Print the reply to a line. Raises ValueError if the line alone is too long."""
        prompts, messages = self._generator.prompts, self._messages
        if prompts.has_chat_template:
            messages, prompt = self._newest([*messages, {"role": USER, "content": line}])
        else:
            prompt = prompts.encode(self._reader.of_text(line))
        for note in describe_cuts([prompt.cut_by]):
            print_note(note)
        with _interrupts() as is_interrupted:
            text = self._generator.stream(prompt.ids, index=self._turn, is_stopped=is_interrupted)
        self._turn += 1
        if prompts.has_chat_template:
            self._messages = [*messages, {"role": ASSISTANT, "content": text}]

    def _newest(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], PromptIds]:
        """Return the newest messages that leave room for a reply, or the last one, and their ids."""
        prompts, wanted = self._generator.prompts, self._generator.decoding.max_new_tokens
        if prompts.max_positions is not None:
            wanted = min(wanted, prompts.max_positions // 4)
        while len(messages) > 1:
            with contextlib.suppress(ValueError):  # too long
                prompt = prompts.encode(self._reader.of_messages(messages))
                if not prompt.cut_by and prompts.max_new_tokens(len(prompt.ids)) >= wanted:
                    return messages, prompt
            messages = messages[2:]
            print_note("the conversation is too long for the model: its oldest message and reply are left out")
        return messages, prompts.encode(self._reader.of_messages(messages))


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, gives input() a line editor
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            if (line := input(prompt)).strip():
                yield line
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            print_note("\nCtrl-D ends the session")


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Context in which Ctrl-C is not raised; yields a function that returns whether it was pressed."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    former = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, former)
