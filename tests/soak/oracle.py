"""What is legal: input is accepted, or refused with one sentence that names what is wrong."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from acsgd.errors import RunError
from acsgd.failures.report import report_startup_error
from acsgd.launch import Launch
from tests.lib.patience import stretched
from tests.soak.area import ACCEPTED, Outcome

T = TypeVar("T")
MAX_CHARS = 2000
"""Maximum length of a sentence, characters; most of it paths."""
MAX_QUOTED = 400


def refusal(text: str, names: Iterable[str]) -> Outcome:
    """Return the outcome of input that was refused with `text`.

    names: of files or keys, of which the sentence must have one. Raises AssertionError unless the text is one sentence.
    """
    text, names = text.strip(), list(names)
    assert text, "refused without a word"
    assert "\n" not in text, f"refused with several lines: {text[:MAX_QUOTED]}"
    assert len(text) <= MAX_CHARS, f"refused with {len(text)} characters: {text[:MAX_QUOTED]}"
    assert not re.search(r"\bbug\b|Traceback|Error\(|object at 0x", text), f"refused as a bug: {text[:MAX_QUOTED]}"
    assert any(name in text for name in names), f"refused without naming {' or '.join(names[:5])}: {text[:MAX_QUOTED]}"
    return Outcome("refused", text)


def attempt(call: Callable[[], T], names: Iterable[str]) -> T | Outcome:
    """Return what `call` returns, or the outcome if it refuses its input by a ValueError or a RunError."""
    try:
        return call()
    except (ValueError, RunError) as error:
        return refusal(str(error), names)


def attempt_start(call: Callable[[], T], names: Iterable[str]) -> T | Outcome:
    """Return what `call`, a part of a run's start, returns, or the outcome if the start is refused.

    Lines about slow work, such as tokenizing, may come before the error.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed), report_startup_error(Launch()):
            return call()
    except SystemExit as end:
        code = end.code
    text = "\n" + printed.getvalue().strip()
    assert code == 2, f"exit code {code}: {text[:MAX_QUOTED]}"
    _, error, message = text.partition("\nerror: ")
    assert error, f"not an error message: {text[:MAX_QUOTED]}"
    return refusal(f"error: {message}", names)


class Ended(NamedTuple):
    """How a process ended, and what it printed."""

    code: int
    """Exit code; of a process that a signal ended, the negative signal number."""
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """Lines of stderr that begin with "error: "."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    def outcome(self, names: Iterable[str]) -> Outcome:
        """Return the outcome of a command. Raises AssertionError if it crashed or failed with more than a sentence."""
        if self.code == 0:
            return ACCEPTED
        tail = self.stderr[-MAX_QUOTED:]
        assert self.code > 0, f"ended by {signal.Signals(-self.code).name}: {tail}"
        assert "Traceback" not in self.stderr, f"traceback: {_last_line(self.stderr)}"
        assert self.code in (1, 2), f"exit code {self.code}: {tail}"
        assert len(self.errors) == 1, f"{len(self.errors)} lines of error: {tail}"
        return refusal(self.errors[0], names)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:MAX_QUOTED]


def in_child(call: Callable[[], object], directory: Path, timeout_s: float) -> Ended:
    """Run `call` in a forked process as a program; its output goes to files in `directory`.

    Raises AssertionError if it runs for longer than `timeout_s`.
    """
    out, err = directory / "stdout", directory / "stderr"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_as_program(call, out, err)
    descriptor = os.pidfd_open(pid)
    try:
        has_ended, _, _ = select.select([descriptor], [], [], stretched(timeout_s))
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(descriptor)
    ended = Ended(os.waitstatus_to_exitcode(status), _read(out), _read(err))
    assert has_ended, f"still running after {timeout_s:g} s: {ended.stderr[-MAX_QUOTED:]}"
    return ended


def _run_as_program(call: Callable[[], object], out: Path, err: Path) -> NoReturn:
    """Run `call` and end this process as the interpreter would."""
    code = 1
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        faulthandler.enable(file=2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        call()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
