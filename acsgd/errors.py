"""The error that ends a run, and what it says."""

from __future__ import annotations

import re
from collections.abc import Iterable


class RunError(RuntimeError):
    """The world failed the run (a peer gone, a file torn); the message says where and what to do.

    awaited: the ranks that this one waited for in vain; none if the failure is known at first hand.
    """

    def __init__(self, message: str, *, awaited: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.awaited = tuple(awaited)


def reason(error: Exception) -> str:
    """Return what an error of gloo says, without the place in gloo's source before it and the advice behind it."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition(". This is typically")[0]
