"""Spans of time of one rank: what it does when, for a trace of some steps."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

Category = Literal["step", "phase", "action", "codec", "wait", "send", "receive", "replicas"]


class Span(NamedTuple):
    """Something that a thread did, or a message."""

    category: Category
    name: str
    start: float
    """A time.perf_counter()."""
    end: float
    thread: int
    """Identifier of the thread."""
    details: dict[str, Any]
    """JSON values."""


@dataclass(frozen=True)
class SpanRecorder:
    """Records the spans of this rank. Whoever has something to record has one, or None while nothing is traced."""

    spans: list[Span] = field(default_factory=list)
    subject: str = ""
    """What the messages and waits are about that this recorder records."""
    limit: int = sys.maxsize
    """Number of spans after which only steps are recorded."""

    def about(self, subject: str) -> SpanRecorder:
        """Return a recorder of the same spans with another subject."""
        return replace(self, subject=subject)

    def add(self, category: Category, name: str, start: float, end: float, **details: Any) -> None:
        """Record a span, unless there are too many. From any thread."""
        if len(self.spans) < self.limit or category == "step":
            self.spans.append(Span(category, name, start, end, threading.get_ident(), details))

    @contextlib.contextmanager
    def span(self, category: Category, name: str, **details: Any) -> Iterator[None]:
        """Record the time of the body, if it raises nothing."""
        start = time.perf_counter()
        yield
        self.add(category, name, start, time.perf_counter(), **details)
