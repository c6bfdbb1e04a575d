"""The error that ends a run."""

from __future__ import annotations

import re
from collections.abc import Iterable


class RunError(RuntimeError):
    """A failure outside this process (a lost peer, a corrupt file). The message says what to do.

    awaited: ranks that this rank waited for in vain; empty if the cause itself is known.
    """

    def __init__(self, message: str, *, awaited: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.awaited = tuple(awaited)


def reason(error: Exception) -> str:
    """Return the message of a gloo error without its source location and its advice."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition(". This is typically")[0]
