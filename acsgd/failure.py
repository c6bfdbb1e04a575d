"""How a run ends when it cannot go on: one message for one failure, whatever the number of ranks."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator


class RunError(RuntimeError):
    """The world failed the run (a peer gone, a file torn); the message says where and what to do."""


@contextlib.contextmanager
def told_once(rank: int, local_rank: int) -> Iterator[None]:
    """Report what keeps a run from starting, from one rank; exit with code 2.

    All ranks see the same mistake. Rank 0 tells it and exits, upon which torchrun ends the others while they
    wait here. A mistake that rank 0 does not share (a file missing on one host only) is told after the wait.
    """
    try:
        yield
    except (ValueError, RunError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise  # --help
        if rank:
            time.sleep(10.0 if local_rank == 0 else 20.0)
        if not isinstance(error, SystemExit):
            _tell(f"error: {error}")
        raise SystemExit(2) from None


@contextlib.contextmanager
def told_by_first(claim: Callable[[], bool]) -> Iterator[None]:
    """Report a failure of the running job from the rank that `claim`s it first; exit with code 1.

    A RunError is told by its message; anything else is a fault of ours and is told with its traceback.
    """
    try:
        yield
    except Exception as error:
        if claim():
            _tell(f"error: {error}" if isinstance(error, RunError) else traceback.format_exc())
        raise SystemExit(1) from None


def _tell(message: str) -> None:
    print(f"\n{message}", file=sys.stderr, flush=True)
