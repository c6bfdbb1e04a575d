"""The `acsgd` command in the process of a test."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

from acsgd import cli


def acsgd(*arguments: object) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed to stderr."""
    former, printed = sys.argv, io.StringIO()
    sys.argv = ["acsgd", *map(str, arguments)]
    try:
        with redirect_stderr(printed), redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as ended:
        return ended.code or 0, printed.getvalue().lstrip()
    finally:
        sys.argv = former
    return 0, printed.getvalue()
