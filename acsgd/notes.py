"""Sentences and progress bars on stderr, and reports on work that takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

FIRST_REPORT_S = 5.0
"""Seconds until the first report."""
NEXT_REPORT_S = 60.0
"""Seconds between later reports."""


def print_note(text: str) -> None:
    """Print a sentence on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def report_if_slow(note: Callable[[str], None], text: Callable[[], str], *, enabled: bool = True) -> Iterator[None]:
    """Call `note` with a text after FIRST_REPORT_S seconds in the context, then every NEXT_REPORT_S, from a thread."""
    if not enabled:
        yield
        return
    ended = threading.Event()

    def report() -> None:
        wait_s = FIRST_REPORT_S
        while not ended.wait(wait_s):
            note(text())
            wait_s = NEXT_REPORT_S

    thread = threading.Thread(target=report, name="reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if that is a terminal. Yields what updates it: f(bytes done, bytes in all)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
