"""The times at which lines of metrics.jsonl arrive."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 0.002


class Arrival(NamedTuple):
    """A line of metrics.jsonl."""

    at: float
    """When it was first seen, a time.monotonic()."""
    line: dict[str, Any]

    @property
    def is_step(self) -> bool:
        return "step" in self.line


class MetricsWatch:
    """Notes when each line of metrics.jsonl appears, to `POLL_S`. Lines that are logged again are ignored."""

    def __init__(self, path: Path) -> None:
        self.arrivals: list[Arrival] = []
        self._path, self._read_until, self._inode = path, 0, 0
        self._last_step = self._last_view = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="metrics watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    @property
    def last_step(self) -> int:
        return self._last_step

    @property
    def steps(self) -> list[Arrival]:
        return [arrival for arrival in list(self.arrivals) if arrival.is_step]

    @property
    def replicas(self) -> int:
        """Replicas of the newest view; 0 before the first."""
        views = [arrival.line["replicas"] for arrival in list(self.arrivals) if "view" in arrival.line]
        return views[-1] if views else 0

    def find_view(self, since: float, replicas: int) -> int | None:
        """Return the index of the first view of so many replicas that arrived after a moment; None if there is none."""
        for index, (at, line) in enumerate(list(self.arrivals)):
            if at > since and line.get("event") == "view" and line["replicas"] == replicas:
                return index
        return None

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            with contextlib.suppress(FileNotFoundError):
                self._read()

    def _read(self) -> None:
        status = self._path.stat()
        if status.st_ino != self._inode or status.st_size < self._read_until:  # replaced, or truncated
            self._inode, self._read_until = status.st_ino, 0
        if status.st_size == self._read_until:
            return
        with self._path.open("rb") as file:
            file.seek(self._read_until)
            complete = file.read().rpartition(b"\n")[0]
        now = time.monotonic()
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
        except ValueError:  # truncated and written again since the last look
            self._read_until = 0
            return
        self._read_until += len(complete) + 1 if complete else 0
        for line in lines:
            self._take(Arrival(now, line))

    def _take(self, arrival: Arrival) -> None:
        step, view = arrival.line.get("step", 0), arrival.line.get("view", 0)
        is_new_event = not step and not view and arrival.line["after_step"] >= self._last_step
        if step > self._last_step or view > self._last_view or is_new_event:
            self._last_step, self._last_view = max(step, self._last_step), max(view, self._last_view)
            self.arrivals.append(arrival)
