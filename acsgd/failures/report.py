"""What one process reports of an error: a message on stderr, and the traceback in a file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from acsgd.config.other_tools import OtherToolError
from acsgd.errors import InputError, explain, printable
from acsgd.launch import Launch

REPORTED = "acsgd"
"""Key of the text in the error files of this package."""


def log_file(run_dir: Path, rank: int) -> Path:
    """Return the text log of a rank."""
    return run_dir / "logs" / f"rank-{rank:05d}.log"


def message_of(error: BaseException, launch: Launch, run_dir: Path | None, *, checks_input: bool) -> str:
    """Return one sentence on an error. Writes its traceback to a file, unless the user's input is the cause.

    run_dir: None if unknown; checks_input: whether a ValueError is due to the user's input.
    """
    is_input_wrong = checks_input and (type(error) is ValueError or isinstance(error, InputError))
    known = str(error) if is_input_wrong else explain(error)
    path = _save_traceback(error, launch.rank, run_dir, is_known=known is not None)
    if known is not None:
        return "\n".join(map(printable, known.splitlines() if type(error) is OtherToolError else [known]))
    what = printable(" ".join(traceback.format_exception_only(error)[-1].split()))
    where = f"; please report it with the traceback in {path}" if path else f"\n{_traceback(error)}"
    return f"rank {launch.rank} on {socket.gethostname()}: {what}{_place(error)}: this is a bug in acsgd{where}"


@contextlib.contextmanager
def report_startup_error(launch: Launch) -> Iterator[None]:
    """Print an error that is raised in the context; exit with code 2. For one process that no other waits for.

    torchrun starts this process again as often as its --max-restarts says, and the same error is printed once.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a Rust extension that panics raises a BaseException
        text = message_of(error, launch, None, checks_input=True)
        record_error(text, launch)
        if not _was_printed(text, launch):
            print_error(text)
        raise SystemExit(2) from None


def record_error(text: str, launch: Launch, *, is_cause: bool = True) -> None:
    """Write the error file that torchrun's summary at the end quotes, in torch.distributed.elastic's format.

    torchrun takes the file with the smallest timestamp, in seconds, for the root cause.
    """
    if launch.error_file:
        timestamp = str(int(time.time()) + (0 if is_cause else 60))
        extra = {"py_callstack": f"error: {text}", "timestamp": timestamp, REPORTED: text}
        with contextlib.suppress(OSError):
            Path(launch.error_file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def is_first_of_host(launch: Launch) -> bool:
    """Return whether no other rank of this host has called this, as far as can be known without the store.

    The first creates a file in torchrun's directory of this host's error files, ATTEMPT/LOCAL_RANK/error.json.
    """
    if launch.error_file:
        try:
            (Path(launch.error_file).parents[1] / "acsgd-first").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # better two messages than none
            pass
    return True


def _was_printed(text: str, launch: Launch) -> bool:
    """Return whether an earlier attempt of torchrun has printed an error, and record that this one does.

    Error files are attempt_NUMBER/LOCAL_RANK/error.json in a directory of torchrun's.
    """
    attempt = Path(launch.error_file or "").absolute().parent.parent
    if not attempt.name.startswith("attempt_"):
        return False
    path = attempt.parent / "acsgd-printed"
    with contextlib.suppress(OSError, UnicodeError):  # better two messages than none
        if path.exists() and path.read_text() == text:
            return True
        path.write_text(text)
    return False


def print_error(text: str) -> None:
    """Print a message to stderr."""
    encodable = text.encode(errors="backslashreplace").decode()
    print(f"\nerror: {encodable}", file=sys.stderr, flush=True)


def _save_traceback(error: BaseException, rank: int, run_dir: Path | None, *, is_known: bool) -> Path | None:
    """Append a traceback to the rank's text log and return the file; None if it cannot be written.

    Without a run directory, the traceback of an error that is not known goes to a new file for temporary files.
    """
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} | ERROR    | rank {rank} ends with an error\n{_traceback(error)}\n"
    path = log_file(run_dir, rank) if run_dir else None
    with contextlib.suppress(OSError, UnicodeError):
        if path and (path.is_file() if is_known else run_dir and run_dir.is_dir()):
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return path
    if is_known:
        return None
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix=f"acsgd-rank-{rank:05d}-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return Path(name)
    return None


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _place(error: BaseException) -> str:
    """Return " (FILE:LINE)", the innermost line of this package that the error passed, if there is one."""
    package = Path(__file__).parents[1]
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(package)
    ]
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).relative_to(package.parent)}:{frames[-1].lineno})"
