"""The `acsgd` command in the process of a test."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import NoReturn

import pytest

from acsgd import cli


def acsgd(*arguments: object) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed to stderr."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed), redirect_stdout(io.StringIO()):
            cli.run([str(argument) for argument in arguments])
    except SystemExit as ended:
        return ended.code or 0, printed.getvalue().lstrip()
    return 0, printed.getvalue()


def started(*arguments: object) -> list[str]:
    """Run a command up to the program that it starts in place of itself; return the command line of that."""
    programs: list[list[str]] = []

    def start(_: str, words: list[str]) -> NoReturn:
        programs.append(words)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execv", start)
        assert acsgd(*arguments)[0] == 0
    [words] = programs
    return words
