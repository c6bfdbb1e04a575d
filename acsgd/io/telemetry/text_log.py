"""Text logs: one file per rank with the log records of this package.

    2026-11-20 16:05:35.123 | INFO     | rank 3, stage 1, replica 1 | acsgd.run.session:train_step:52 - message

Modules log with `log = logging.getLogger(__name__)`; scripts, whose __name__ is "__main__", use "acsgd.NAME".
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import NamedTuple

from acsgd.failures.report import log_file

PACKAGE = "acsgd"
"""Name of the parent logger of all modules."""


@contextlib.contextmanager
def open_text_log(run_dir: Path, *, rank: int, stages: Sequence[int], replica: int) -> Iterator[None]:
    """Append the package's log records, level INFO and above, to run_dir/logs/rank-XXXXX.log while the context is open.

    stages: stages of this rank. Records do not reach the handlers of other loggers. Raises OSError if the file cannot
    be opened. Later errors do not end the run: rank 0 prints the first, and each record is another attempt. A file that
    is removed is created again.
    """
    path = log_file(run_dir, rank)
    handler = _RankFile(path, is_main=rank == 0)
    handler.setFormatter(_formatter(rank, stages, replica))
    logger = logging.getLogger(PACKAGE)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        with contextlib.suppress(OSError):  # the buffer does not fit on the disk
            handler.close()


class LogEntry(NamedTuple):
    """A record of a text log."""

    time: str
    function: str
    """That has logged it."""
    message: str


_ENTRY = re.compile(r"(\d{4}-\d\d-\d\d [\d:.]+) \| \w+ +\| [^|]* \| [\w.]+:(\w+):\d+ - (.*)")


def parse_text_log(lines: Iterable[bytes]) -> Iterator[LogEntry]:
    """Yield the records of the lines of a text log, the first line of each."""
    for line in lines:
        if match := _ENTRY.match(line.decode(errors="replace")):
            yield LogEntry(*match.groups())


class _RankFile(WatchedFileHandler):
    """Text log of a rank, opened again when it is removed or replaced, as WatchedFileHandler does."""

    def __init__(self, path: Path, *, is_main: bool) -> None:
        self._has_warned = not is_main
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # of opening the file again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Print the first error; logging would print a traceback for each record."""
        if not self._has_warned:
            self._has_warned = True
            print(f"{self.baseFilename} cannot be written ({sys.exception()}); training continues", file=sys.stderr)


def _formatter(rank: int, stages: Sequence[int], replica: int) -> logging.Formatter:
    held = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    where = f"rank {rank}, {held}, replica {replica}"
    return logging.Formatter(
        f"%(asctime)s.%(msecs)03d | %(levelname)-8s | {where} | %(name)s:%(funcName)s:%(lineno)d - %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
