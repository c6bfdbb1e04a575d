"""Text logs: one file per rank, of what the modules of this package say through the standard library's logging.

    2026-11-20 16:05:35.123 | INFO     | rank 3, stage 1, replica 1 | acsgd.run.session:train_step:52 - message

A module logs with `log = logging.getLogger(__name__)`; a script, whose name is "__main__", with "acsgd.NAME".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = "acsgd"
"""The logger above those of all modules."""


@contextlib.contextmanager
def open_text_log(run_dir: Path, *, rank: int, stages: Sequence[int], replica: int) -> Iterator[None]:
    """Write what the package logs, from INFO up, into run_dir/logs/rank-XXXXX.log until the context ends.

    stages: those this rank holds. A file that is there is appended to. An error that ends the context is logged
    with its traceback and goes on. Nothing reaches the handlers of other loggers, such as the root's on a terminal.
    Raises OSError if the file cannot be opened; later failures to write, as on a full disk, end nothing.
    """
    path = run_dir / "logs" / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _RankFile(path, encoding="utf-8")
    handler.setFormatter(_formatter(rank, stages, replica))
    logger = logging.getLogger(PACKAGE)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    except Exception:
        logger.exception("this rank ends here")
        raise
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        with contextlib.suppress(OSError):  # what found no room on the disk
            handler.close()


class _RankFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say nothing: logging's own way is a traceback on the terminal for every line that finds no room."""


def _formatter(rank: int, stages: Sequence[int], replica: int) -> logging.Formatter:
    held = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    where = f"rank {rank}, {held}, replica {replica}"
    return logging.Formatter(
        f"%(asctime)s.%(msecs)03d | %(levelname)-8s | {where} | %(name)s:%(funcName)s:%(lineno)d - %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
