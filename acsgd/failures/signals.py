"""Ends from outside: stop signals, and the death of the torchrun that started this rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

from acsgd.errors import ReportedError
from acsgd.failures.processes import find_torchrun, has_proc, start_time
from acsgd.failures.report import print_error
from acsgd.io.files.atomic import build_atomically, describe_stopped_build
from acsgd.launch import Launch, forbid_restart
from acsgd.notes import print_note

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
"""Signals that stop a run after the current step. The Slurm scripts send SIGUSR1 before a job's time limit. SIGHUP:
the terminal was closed; torchrun forwards it to its ranks, which have no terminal."""

REPEAT_S = 0.5
"""Interrupts within this many seconds count as one: a Ctrl-C reaches a rank both directly and through torchrun, which
forwards it within milliseconds."""

WATCH_S = 0.5
"""Seconds between two checks whether torchrun is alive."""

NOTE_S = 1.0
"""Seconds from a stop signal to a command to the note that it cleans up."""

CLEAN_UP_S = 2.0
"""Time for a command to clean up after that note, seconds."""

BUILD_CLEAN_UP_S = 600.0
"""The same while it writes files: a large file may have to reach the disk before it can be removed."""


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal by nothing: the pipe gets its number; without a handler it would end the process."""


class StopSignals:
    """Context manager that records stop signals instead of ending the process; a second Ctrl-C ends it.

    end: ends the process with an exit code, from a thread, while the main thread may be waiting inside gloo. handle:
    handler of the signals. One that gets another handler within the context is not recorded.

    After a SIGINT, a later SIGTERM ends the process as well, since torchrun forwards a second Ctrl-C as SIGTERM. The
    exit code is then 130. A SIGHUP that is ignored when the process starts (nohup) stays ignored. Must be entered in
    the main thread. On exit the former handlers are restored, unless an exception is raised: torchrun's SIGTERM must
    not interrupt the failure report.

    Python runs handlers in the main thread only, and not while that thread waits inside gloo. So by default they do
    nothing; Python's C-level handler writes the signal number to a pipe (signal.set_wakeup_fd), which a thread reads.
    (sigwait in a thread would require blocking the signals in all threads, including torch's.)
    """

    def __init__(
        self, end: Callable[[int], None], *, handle: Callable[[int, FrameType | None], None] = _do_nothing
    ) -> None:
        self._end = end
        self._handle = handle
        self._on_signal: Callable[[], None] = lambda: None
        self.received: str | None = None
        """Name of the first stop signal received, e.g. "SIGTERM"."""
        self._interrupted_at: float | None = None
        self._lock = threading.Lock()
        """Guards the callback and whether there was a signal."""

    def __enter__(self) -> StopSignals:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._listener = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        self._listener.start()
        self._former_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._former = {number: signal.signal(number, self._handle) for number in {*STOP_SIGNALS} - ignored}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        signal.set_wakeup_fd(self._former_fd)
        os.close(self._writer)
        self._listener.join()  # before the handlers change, by which it knows the signals that it records
        for number, handler in self._former.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """Exit code of a process that the recorded signal ends."""
        return 128 + signal.Signals[str(self.received)]

    def on_signal(self, callback: Callable[[], None]) -> None:
        """Call a function at the first stop signal, in the thread that records it; now, if there was one."""
        with self._lock:
            self._on_signal = callback
            if self.received is None:
                return
        callback()

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if signal.getsignal(number) is self._handle:
                    self._record(number, time.monotonic())
        os.close(reader)

    def _record(self, number: int, now: float) -> None:
        """Record a signal received at `now` (time.monotonic); end the process if it is a second interrupt."""
        if number not in STOP_SIGNALS:
            return
        interrupted_at = self._interrupted_at
        is_late = interrupted_at is not None and now - interrupted_at >= REPEAT_S
        if is_late and number in (signal.SIGINT, signal.SIGTERM):
            self._end(128 + signal.SIGINT)
        if number == signal.SIGINT and interrupted_at is None:
            self._interrupted_at = now
        with self._lock:
            if self.received is not None:
                return
            self.received, callback = signal.Signals(number).name, self._on_signal
        callback()


@contextlib.contextmanager
def starting(launch: Launch | None = None, end: Callable[[int], None] = os._exit) -> Iterator[None]:
    """Context of what comes before a command: its imports, and the wait for torchrun's store. Nothing is cleaned up.

    A stop signal ends the process from a thread, since the main thread may be inside native code. launch: of a process
    of torchrun, of which the first one of a host reports the signal; none reports SIGTERM, which torchrun sends if
    another process has failed. end: as of StopSignals. Must be entered in the main thread.
    """

    def stop() -> None:
        if (
            launch is None
            or not launch.under_torchrun
            or (launch.local_rank == 0 and signals.received != signal.SIGTERM.name)
        ):
            print_error(f"stopped by {signals.received} before the start; nothing was written")
        forbid_restart()
        end(signals.exit_code)

    with StopSignals(end) as signals:
        signals.on_signal(stop)
        try:
            yield
        except BaseException:
            signals.on_signal(lambda: None)  # the error is reported, also if torchrun ends this process for it
            raise


@contextlib.contextmanager
def reporting_stop(outcome: Callable[[], str] = lambda: "", *, clean_up_s: float = CLEAN_UP_S) -> Iterator[None]:
    """Context of a command that a stop signal ends. Raises ReportedError once the signal is reported.

    The main thread gets ReportedError as well, to clean up; code that catches it does not complete the command. If the
    context still runs after NOTE_S, a thread says so; it ends the process after another `clean_up_s`, or a second
    Ctrl-C does: the main thread may wait for a download, or inside native code. outcome: returns, at the end, what the
    user reads besides the name of the signal. Contexts may be nested; the innermost reports. Must be entered in the
    main thread.
    """
    command = _StoppableCommand(outcome, clean_up_s)
    command.signals.__enter__()
    command.signals.on_signal(command.watcher.start)
    try:
        try:
            yield
        finally:
            command.raises = False  # unless it has just been raised: what follows is not interrupted
    finally:
        command.end()


class _StoppableCommand:
    """A command that a stop signal ends, with the thread that watches how long it cleans up."""

    def __init__(self, outcome: Callable[[], str], clean_up_s: float) -> None:
        self.signals = StopSignals(self._end_early, handle=self._raise_once)
        self.watcher = threading.Thread(target=self._watch, name="clean-up watch", daemon=True)
        self.raises = True
        """Whether a signal raises in the main thread; the first one does."""
        self._outcome = outcome
        self._clean_up_s = clean_up_s
        self._has_ended = threading.Event()
        self._is_noted = False

    def end(self) -> None:
        """Restore the handlers of the process. Raises ReportedError after a signal, once it is reported."""
        self._has_ended.set()
        self.signals.__exit__(None, None, None)  # after errors, too
        if self.signals.received is not None:
            self.watcher.join()
            self._report()
            raise ReportedError(self.signals.exit_code) from None

    def _raise_once(self, number: int, frame: FrameType | None) -> None:
        if self.raises:
            self.raises = False
            raise ReportedError(128 + number)

    def _report(self) -> None:
        print_error("; ".join(filter(None, [f"stopped by {self.signals.received}", self._outcome()])))

    def _end_early(self, code: int) -> None:
        if self._is_noted:
            self._report()
            os._exit(code)

    def _watch(self) -> None:
        if not self._has_ended.wait(NOTE_S):
            print_note(f"{self.signals.received}: cleaning up; Ctrl-C ends this at once")
            self._is_noted = True
            if not self._has_ended.wait(self._clean_up_s):
                self._end_early(self.signals.exit_code)


def build_until_stopped(path: Path, build: Callable[[Path], None], *, resumable: bool = False) -> bool:
    """Run `build_atomically` in a command; after a stop signal, report what is left once everything is cleaned up."""
    with reporting_stop(partial(describe_stopped_build, path), clean_up_s=BUILD_CLEAN_UP_S):
        return build_atomically(path, build, resumable=resumable)


def end_with_torchrun(parent: int, *, is_main: bool, end: Callable[[int], None]) -> None:
    """Start a thread that ends this process with code 1 within a second of torchrun's death.

    To be called before the slow imports. The thread then runs between the instructions of the imports: loading torch
    keeps the interpreter busy for 0.4 s at a time.
    parent: os.getppid() at the start of the process. If torchrun died since then, the parent is another process by
    now: process 1, or a subreaper as `systemd --user` or tini. If torchrun died even before, no ancestor is torchrun.
    is_main: whether this process prints the error; one per host. end: ends the process with an exit code.
    """
    torchrun = find_torchrun(parent) if has_proc() else parent

    def started_at() -> str:
        return start_time(torchrun) if torchrun else ""

    started = started_at()
    has_ended = has_proc() and not started  # maybe since it was found: then no later check would see a difference

    def is_alive() -> bool:
        return not has_ended and os.getppid() == parent and started_at() == started

    def watch() -> None:
        while is_alive():
            time.sleep(WATCH_S)
        if is_main:
            name = f"process {torchrun}," if torchrun else "which started this run,"
            print(f"\nerror: torchrun, {name} has ended; this host's ranks end with it", file=sys.stderr, flush=True)
        end(1)

    threading.Thread(target=watch, name="torchrun watch", daemon=True).start()
