"""Segments of a streamed source near those that are trained on: on disk, written ahead by one process of each host.

    segment-00000012    directory, as of `write_segment`
    end.json            number of rows of the source, once its end was read

Every process of a run that needs tokens has a SegmentCache on the same directory. One process of each host holds a lock
and writes; when it ends or stands still, another one takes over. Two that write do no harm: their segments are equal,
and appear complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from acsgd.errors import CorruptFileError, RunError, WaitInterruptedError, explain
from acsgd.io.data.stream.segment_files import OpenSegment, open_segment, read_about, write_segment
from acsgd.io.data.stream.segments import StreamSegment
from acsgd.io.data.stream.state import SegmentStart
from acsgd.io.files.atomic import build_atomically
from acsgd.io.files.cache import HostLock
from acsgd.notes import print_note, report_if_slow

AHEAD = 8
"""Number of segments that are written ahead of the one that was read last."""
BEHIND = 32
"""Number of segments that are kept behind it. Those further away are removed."""
STALL_S = 30.0
"""Time without a new segment after which a process that waits for one writes it without the lock, seconds."""
POLL_S = 0.05
"""Seconds between two looks for a segment that another process writes."""
JOIN_S = 5.0
"""Maximum time to wait for the thread that writes at the end, seconds."""
NAME = "segment-"
END = "end.json"


class Known(NamedTuple):
    """The position of a segment."""

    segment: int
    position: SegmentStart


class SegmentCache:
    """Segments by index, from 0. Used by one thread at a time, besides the one that writes.

    name: of the source; rows: number of rows of every segment but the last; read: yields the segments from a position
    on, and raises ValueError if it cannot; span: number of consecutive segments that are read at a time.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        rows: int,
        read: Callable[[SegmentStart], Iterator[StreamSegment]],
        token_dtype: np.dtype[np.unsignedinteger],
        *,
        span: int = 1,
    ) -> None:
        self._directory = directory
        self._name = name
        self._rows = rows
        self._read = read
        self._token_dtype = token_dtype
        self._ahead, self._behind = AHEAD * span, BEHIND * span
        self._saved = Known(0, SegmentStart())
        """From the checkpoint that the run resumed from."""
        self._total: int | None = None
        self._wanted = 0
        self._lock = HostLock(directory)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_closed = False

    @property
    def total(self) -> int | None:
        """Number of rows of the source; None until its end was read."""
        if self._total is None:
            with contextlib.suppress(OSError, ValueError):
                self._total = int(json.loads((self._directory / END).read_bytes())["rows"])
        return self._total

    @property
    def _count(self) -> int | None:
        """Number of segments of the source; None until its end was read."""
        return None if self.total is None else -(-self.total // self._rows)

    @property
    def writes(self) -> bool:
        """Whether this process writes the segments of its host."""
        return self._thread is not None and self._thread.is_alive()

    def restore(self, index: int, position: SegmentStart, total: int | None) -> None:
        """Set what a checkpoint records: the position of a segment, and `total`."""
        self._saved = Known(index, position)
        if total is not None:
            self._total = total

    def segment(self, index: int) -> OpenSegment | None:
        """Return a segment, waiting until it is written; None if the source ends before it.

        Raises RunError if the source cannot be read or the segment cannot be written, WaitInterruptedError after
        `close`.
        """
        started = time.monotonic()
        with self._changed:
            self._wanted = index
            self._changed.notify_all()
        with report_if_slow(print_note, lambda: f"waiting for sequences of {self._name}", enabled=self.writes):
            while (found := self._open(index)) is None:
                if self.total is not None and index * self._rows >= self.total:
                    return None
                if self._error is not None:
                    raise self._error
                if self._is_closed:
                    raise WaitInterruptedError("reading has ended")
                self._start_thread(must_write=time.monotonic() - started > STALL_S)
                with self._changed:
                    self._changed.wait(POLL_S)
        return found

    def position(self, index: int) -> Known:
        """Return the nearest known position of a segment up to `index`."""
        known = [Known(0, SegmentStart()), self._saved, *self._on_disk(index)]
        return max((each for each in known if each.segment <= index), key=lambda each: each.segment)

    def close(self, *, wait: bool = True) -> None:
        """Stop to write, and let another process write. From any thread.

        wait: for the thread that writes, for at most JOIN_S; else it ends after the segment that it reads.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if wait and self._thread is not None:
            self._thread.join(JOIN_S)

    def _path(self, index: int) -> Path:
        return self._directory / f"{NAME}{index:08d}"

    def _open(self, index: int) -> OpenSegment | None:
        path = self._path(index)
        if not path.is_dir():
            return None
        try:
            segment = open_segment(path, self._name)
        except CorruptFileError:
            shutil.rmtree(path, ignore_errors=True)  # and it is written again
            return None
        if segment.about.rows < self._rows:
            self._total = index * self._rows + segment.about.rows  # before the thread that writes has stored it
        return segment

    def _indices(self) -> list[int]:
        """Return the indices of the segments on disk."""
        names = os.listdir(self._directory) if self._directory.is_dir() else []
        return sorted(int(name.removeprefix(NAME)) for name in names if name.startswith(NAME))

    def _on_disk(self, index: int) -> list[Known]:
        """Return the position of a segment if it, or the one before it, is on disk; else of one before it."""
        before = [each for each in self._indices() if each <= index]
        for each in reversed(before):
            with contextlib.suppress(CorruptFileError):
                about = read_about(self._path(each))
                return [Known(each, about.start) if each == index else Known(each + 1, about.after)]
        return []

    def _start_thread(self, *, must_write: bool) -> None:
        """Start to write if no process of this host does, or if this one must."""
        if self.writes:
            return
        if not (self._lock.acquire(0.0) or must_write):
            return
        self._thread = threading.Thread(target=self._run, name="streaming", daemon=True)
        self._thread.start()

    # The rest runs in the thread.

    def _run(self) -> None:
        try:
            self._write()
        except ValueError as error:
            self._error = RunError(str(error))
        except OSError as error:
            self._error = RunError(f"segments of {self._name} cannot be written: {explain(error)}")
        except Exception as error:
            self._error = error
        finally:
            self._lock.release()
            with self._changed:
                self._changed.notify_all()

    def _write(self) -> None:
        segments: Iterator[StreamSegment] = iter(())
        at = -1
        while not self._is_closed:
            index = self._first_missing()
            if index is None:
                with self._changed:
                    self._changed.wait(POLL_S)
                continue
            known = self.position(index)
            if not known.segment <= at <= index:  # else the segments that follow lead to it, without a new start
                at, segments = known.segment, self._read(known.position)
            segment = next(segments, None)
            if segment is not None and at == index:
                self._store(index, segment)
            if segment is None or segment.rows < self._rows:
                self._set_total(at * self._rows + (segment.rows if segment else 0))
                segments, at = iter(()), -1
            else:
                at += 1

    def _first_missing(self) -> int | None:
        """Return the next segment to write; None if enough are there."""
        count, wanted = self._count, range(self._wanted, self._wanted + 1 + self._ahead)
        indices = dict.fromkeys(each if count is None else each % count for each in wanted)
        return next((each for each in indices if not self._path(each).is_dir()), None)

    def _store(self, index: int, segment: StreamSegment) -> None:
        build_atomically(self._path(index), lambda path: write_segment(path, segment, self._token_dtype))
        for each in self._indices():
            age = self._wanted + self._ahead - each
            if (age if self._count is None else age % self._count) > self._behind + self._ahead:
                shutil.rmtree(self._path(each), ignore_errors=True)
        with self._changed:
            self._changed.notify_all()

    def _set_total(self, total: int) -> None:
        if not total:
            raise ValueError(
                f"data.sources: {self._name} has no sequence; give a longer text, or a shorter data.sequence"
            )

        def build(path: Path) -> None:
            path.write_text(json.dumps({"rows": total}))

        build_atomically(self._directory / END, build)
        self._total = total
        with self._changed:
            self._changed.notify_all()
