"""What ends a run from outside: a signal that asks it to stop, and the death of the torchrun that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask for an end after the current step. Slurm is told to send SIGUSR1 before a job's time is up."""

ONE_INTERRUPT_S = 0.5
"""Seconds within which interrupts are one: a terminal or Slurm may reach a process besides torchrun, which passes
on what it gets; it does so within milliseconds."""

WATCH_S = 0.5
"""Seconds between looks at the parent process."""


class StopSignals:
    """While open, SIGTERM, SIGUSR1 and the first SIGINT only set `wished`; an interrupt after that ends the process.

    After a SIGINT, a later SIGTERM ends the process too: torchrun passes a second Ctrl-C on as SIGTERM. The exit code
    is then 130. Open it in the main thread. On leaving, the former handlers are back, unless an exception leaves:
    torchrun's SIGTERM must not cut short the report of a failure.

    Python runs a handler in the main thread only, and not while that waits for a message inside gloo. So the
    handlers do nothing, and a thread reads the signals' numbers from a pipe into which Python's C handler writes at
    once (signal.set_wakeup_fd). sigwait in a thread would need the signals blocked in all threads, torch's included.
    """

    def __init__(self) -> None:
        self.wished: str | None = None
        """Name of the first signal that came, e.g. "SIGTERM"."""
        self._interrupted_at: float | None = None

    def __enter__(self) -> StopSignals:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._listener = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        self._listener.start()
        self._former_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, _do_nothing) for number in STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        os.close(self._writer)
        self._listener.join()

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                self._note(number, time.monotonic())
        os.close(reader)

    def _note(self, number: int, now: float) -> None:
        """Take in a signal that arrived at `now`, a time.monotonic()."""
        if number not in STOPPING:
            return
        interrupted_at = self._interrupted_at
        if number != signal.SIGUSR1 and interrupted_at is not None and now - interrupted_at >= ONE_INTERRUPT_S:
            os._exit(128 + signal.SIGINT)
        if number == signal.SIGINT and interrupted_at is None:
            self._interrupted_at = now
        self.wished = self.wished or signal.Signals(number).name


def end_with_torchrun(*, is_main: bool) -> None:
    """End this process with code 1 within a second of the death of torchrun, its parent, which nobody else notices.

    is_main: whether this process says so; one per host.
    """
    torchrun = os.getppid()
    gone = torchrun == 1 and not _may_be_torchrun(torchrun)  # it died before this process could look

    def watch() -> None:
        while not gone and os.getppid() == torchrun:
            time.sleep(WATCH_S)
        if is_main:
            told = "that started this run" if gone else f"process {torchrun},"
            print(f"\nerror: torchrun, {told} is gone; this host's ranks end with it", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="torchrun", daemon=True).start()


def _may_be_torchrun(pid: int) -> bool:
    """Whether a process may have started this one under torchrun: it is the same user's and has torch in memory.

    Orphans belong to process 1, but in a container torchrun may be process 1.
    """
    process = Path(f"/proc/{pid}")
    try:
        return process.stat().st_uid == os.getuid() and "libtorch" in (process / "maps").read_text()
    except OSError:
        return True  # cannot be known here


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Let Python write the signal's number to the pipe; a signal without a handler would end the process."""
