"""Chat in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from acsgd.generation.decode import Generator
from acsgd.generation.prompts import Prompt
from acsgd.notes import print_note


class Chat:
    """A conversation. With a chat template its messages are kept; without one each line is a prompt of its own."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._messages: list[dict[str, str]] = []
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
        generator = self._generator
        has_template = generator.prompts.has_chat_template
        messages = [*self._messages, {"role": "user", "content": line}]
        while True:
            prompt: Prompt = messages if has_template else line
            try:
                ids = generator.prompts.encode(prompt)
                break
            except ValueError:
                if len(messages) < 3 or not has_template:
                    raise
                messages = messages[2:]
                print_note("the conversation exceeds the model's maximum: its oldest messages are left out")
        with _interrupts() as is_interrupted:
            text = generator.stream(ids, index=self._turn, is_stopped=is_interrupted)
        self._turn += 1
        self._messages = [*messages, {"role": "assistant", "content": text}]


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
