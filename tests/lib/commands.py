"""The `acsgd` command in the process of a test."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

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
