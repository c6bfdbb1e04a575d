"""Standard output and standard error whose failure does not end training. Imports no torch.

A write to them fails if the reader of a pipe has ended (`| head`), the terminal was closed, or the disk of a log file
is full. It waits without end if a pager or a stopped terminal does not read, or a connection hangs. Output that fails,
or waits longer than TIMEOUT_S seconds, is dropped; in training, the text log of the rank says so.

Output of native code, which writes to the file descriptors directly, is not covered.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

TIMEOUT_S = 1.0
"""Maximum time that one write waits for a reader, seconds. Later writes are dropped at once, until it reads again."""

log = logging.getLogger(__name__)


class StandardStream(io.RawIOBase):
    """Writes to a file descriptor, drops what cannot be written, and never raises.

    timeout_s: maximum time that one write waits, seconds; None = without limit.
    """

    def __init__(self, fd: int, name: str, *, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.failures: list[str] = []
        """Sentences on why output was dropped, each once."""
        self._is_logged = False
        self.name = name
        self._fd = fd
        self._lock = threading.Lock()
        self._writer = threading.Thread()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Buffer, /) -> int:
        content = bytes(data)
        if self.timeout_s is None or sys.is_finalizing():  # when Python ends, it starts no threads
            reason = self._write(content)
        else:
            reason = self._write_in_thread(content, self.timeout_s)
        if reason:
            self._record(f"{self.name} cannot be written ({reason}): output is dropped until it can")
        return len(content)

    def _write_in_thread(self, content: bytes, timeout_s: float) -> str:
        """Write in a thread and wait for it; return why not everything was written, empty if it was."""
        reasons: list[str] = []
        with self._lock:
            if not self._writer.is_alive():
                self._writer = threading.Thread(target=lambda: reasons.append(self._write(content)), daemon=True)
                self._writer.start()
                self._writer.join(timeout_s)
        return reasons[0] if reasons else f"nothing was read for {timeout_s:g} s"

    def _write(self, content: bytes) -> str:
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _record(self, failure: str) -> None:
        if failure not in self.failures:
            self.failures.append(failure)
            if self._is_logged:
                log.warning(failure)

    def start_log(self) -> None:
        """Log the failures so far, and each later one."""
        self._is_logged = True
        for failure in self.failures:
            log.warning(failure)


def protect_streams() -> None:
    """Replace sys.stdout and sys.stderr, at the start of a process and before a module keeps a reference to them.

    Until `enter_training`, standard output may wait without limit, for the reader of --help in a pager. Descriptors 0
    to 2 that are closed are opened on the null device: a file of the run that gets the number would receive the output
    of native code. Warnings of bitsandbytes are not printed: PEFT imports it, and it warns of optional kernels for
    weights that are repacked for inference, which nothing here uses, and of inputs that int8 casts to fp16.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    sys.stdout = _as_text(StandardStream(1, "standard output", timeout_s=None), sys.stdout)
    sys.stderr = _as_text(StandardStream(2, "standard error", timeout_s=TIMEOUT_S), sys.stderr)


def enter_training() -> None:
    """Limit the time that standard output waits, and log failures. Called when the text log is open."""
    for text in (sys.stdout, sys.stderr):
        stream = getattr(text, "buffer", None)
        if isinstance(stream, StandardStream):
            stream.timeout_s = TIMEOUT_S
            stream.start_log()


def _as_text(stream: StandardStream, former: TextIO | None) -> io.TextIOWrapper:
    """Return a text stream with the encoding of `former`, which is None if its descriptor was closed."""
    encoding = former.encoding if former else "utf-8"
    return io.TextIOWrapper(stream, encoding, errors="backslashreplace", line_buffering=True)
