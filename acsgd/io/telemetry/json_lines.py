"""metrics.jsonl: one JSON object per optimizer step, and one per event."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.config.options import Config
from acsgd.io.files.atomic import rename
from acsgd.io.telemetry.record import RunEvent, StepRecord

METRICS = "metrics.jsonl"
"""Name of the file in the run directory."""
BLOCK_BYTES = 1 << 16
"""Size of the parts in which a file is read from its end."""
RANKS_PER_STEP = 8
"""Largest number of ranks whose numbers are in every line; those of more ranks are in every k-th, as few per step."""


class LoggedStart(NamedTuple):
    """What identifies the start of a view, or of a run without views; later ones are greater.

    What follows it in the files of two hosts, up to the next start, has been executed once.
    """

    view: int = 0
    """Number of the view, or of the newest one before a run without views; 0 = none."""
    started_at: float = 0.0
    """When the run without views has started, Unix time; 0 = a view."""


class JsonLinesSink:
    """Writes metrics.jsonl: every step once, in order, written when `log` returns.

    If training returns to an earlier step, the lines after it are dropped, at the next step or event. If the last step
    is logged again, the events after it are kept: a view may begin with the evaluation of a step whose line is there.
    The event of the newest start is never dropped: after a return to a step before it, and in a new file, it follows
    the step from which on its lines are there. A full disk does not end the run: lines that cannot be written are kept
    and written later. If the file is removed, a new one begins.

    resumed_at: completed steps of the checkpoint the run resumed from; 0 = a new run, whose file starts empty.
    notify: prints a sentence for the user.
    """

    def __init__(self, path: Path, *, resumed_at: int, notify: Callable[[str], None]) -> None:
        if path.exists():
            truncate_after(path, resumed_at)
        path.touch()
        self._path, self._notify, self._has_warned = path, notify, False
        self._unwritten, self._last_step = b"", resumed_at
        self._start_line = _last_start(path)

    @classmethod
    def open(cls, config: Config, run_dir: Path, resumed_at: int, notify: Callable[[str], None]) -> JsonLinesSink:
        """Open the sink of a run, as a `Tracker` does."""
        return cls(run_dir / METRICS, resumed_at=resumed_at, notify=notify)

    @property
    def start(self) -> LoggedStart:
        """The newest start in the file."""
        return _start_of(self._start_line) or LoggedStart()

    def log(self, record: StepRecord) -> None:
        events = b""
        with self._errors_reported():
            self._begin_again_if_removed()
            if record.step <= self._last_step:
                events = self._events_after(record.step) if record.step == self._last_step else b""
                self._rewind(record.step - 1)
                if self._start_line not in events and _after(self._start_line) >= record.step:
                    self._start_line = _moved(self._start_line, record.step - 1)
                    self._unwritten += self._start_line
        self._last_step = record.step
        num_ranks = max((sum(map(len, grid)) for grid in record.ranks.values()), default=0)
        has_ranks = record.step % max(1, math.ceil(num_ranks / RANKS_PER_STEP)) == 0
        self._append((record if has_ranks else record._replace(ranks={})).line(), then=events)

    def note(self, text: str) -> None:
        pass

    def event(self, event: RunEvent) -> None:
        if event.after_step < self._last_step:
            with self._errors_reported():
                self._begin_again_if_removed()
                self._rewind(event.after_step)
            self._last_step = event.after_step
        self._append(event.line())
        if _start_of(line := _encoded(event.line())):
            self._start_line = line

    def close(self, *, failed: bool) -> None:
        self.flush()

    def flush(self) -> None:
        """Write lines that could not be written before, as far as there is room now."""
        with contextlib.suppress(OSError):
            self._write()

    def replace_after(self, step: int, lines: bytes) -> None:
        """Replace the lines in the file that follow that of a step, and those that are not written yet."""
        with self._errors_reported():
            self._begin_again_if_removed()
            os.truncate(self._path, _end_of(self._path, step))
            self._unwritten = lines
            self._last_step = max([step, *filter(None, map(_quick_step_of, lines.splitlines()))])
            starts = [line for line in lines.splitlines(keepends=True) if _start_of(line)]
            self._start_line = starts[-1] if starts else _last_start(self._path)
            self._write()

    def _append(self, line: Mapping[str, object], then: bytes = b"") -> None:
        self._unwritten += _encoded(line) + then
        with self._errors_reported():
            self._begin_again_if_removed()
            self._write()

    @contextlib.contextmanager
    def _errors_reported(self) -> Iterator[None]:
        """Report the first OSError raised in the context, and suppress all."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._notify(f"{self._path} cannot be written ({error.strerror}); its lines are kept until it can")
            self._has_warned = True

    def _begin_again_if_removed(self) -> None:
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            self._notify(f"{self._path} was removed during the run; a new file begins, without earlier lines")
            if self._start_line:
                self._start_line = _moved(self._start_line, self._last_step)
                self._unwritten = self._start_line + self._unwritten

    def _events_after(self, step: int) -> bytes:
        """Return the lines of the events after the last step."""
        lines = [*_lines_until((self._path.read_bytes() + self._unwritten).splitlines(), step)]
        return b"".join(line for line in lines if _fields_of(line).get("after_step") == step)

    def _rewind(self, step: int) -> None:
        """Drop the lines after `step`, written and unwritten.

        Events between them that follow an earlier step are written again behind the truncated part, so that a full disk
        has room for them.
        """
        written = self._path.read_bytes()
        kept = list(_lines_until((written + self._unwritten).splitlines(), step))
        unchanged = _count_common(written.splitlines(keepends=True), kept)
        os.truncate(self._path, sum(map(len, kept[:unchanged])))
        self._unwritten = b"".join(kept[unchanged:])

    def _write(self) -> None:
        # unbuffered, so that `write` returns how much of a line was written
        with self._path.open("ab", buffering=0) as file:
            while self._unwritten:
                self._unwritten = self._unwritten[file.write(self._unwritten) :]


class StepLines:
    """The lines of a metrics.jsonl, read from its end as far as needed. A file that is missing has none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def last_step(self) -> int:
        """Return the last step; 0 = there is none."""
        return next(filter(None, (_step_of(line) for line, _ in _backwards(self.path))), 0)

    def starts_after(self, start: LoggedStart) -> list[tuple[LoggedStart, int]]:
        """Return the starts that are later than a given one, the latest first, and the steps that they follow."""
        found = ((_start_of(line), line) for line, _ in _backwards(self.path))
        starts = ((each, _after(line)) for each, line in found if each is not None)
        return [*takewhile(lambda pair: pair[0] > start, starts)]

    def after(self, step: int) -> bytes:
        """Return the lines that follow that of a step. Raises FileNotFoundError."""
        with self.path.open("rb") as file:
            file.seek(_end_of(self.path, step))
            return file.read()


def _fields_of(line: bytes) -> dict[str, Any]:
    """Return the fields of a line of metrics.jsonl; empty if it is incomplete or damaged."""
    with contextlib.suppress(RecursionError, ValueError):
        fields = json.loads(line)
        return fields if isinstance(fields, dict) else {}
    return {}


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of metrics.jsonl; None for an event, and for an incomplete line."""
    step = _fields_of(line).get("step")
    return step if isinstance(step, int) else None


_STEP = re.compile(rb'\{"step": (\d+)[,}]')


def _quick_step_of(line: bytes) -> int | None:
    """Return the step of a line that a sink has written, maybe incomplete, by its first field; None for an event."""
    match = _STEP.match(line)
    return int(match[1]) if match else None


def _start_of(line: bytes) -> LoggedStart | None:
    """Return the start of which a line of metrics.jsonl is the event; None for others."""
    if not line.startswith(b'{"event"'):
        return None
    fields = _fields_of(line)
    view, started_at = fields.get("view", fields.get("after_view")), fields.get("started_at", 0.0)
    return LoggedStart(view, started_at) if isinstance(view, int) and isinstance(started_at, float) else None


def _last_start(path: Path) -> bytes:
    """Return the line of the last start; empty if there is none."""
    return next((line for line, _ in _backwards(path) if _start_of(line)), b"")


def _after(line: bytes) -> int:
    """Return the step that an event follows; -1 for an empty line."""
    return int(_fields_of(line).get("after_step", -1))


def _moved(line: bytes, step: int) -> bytes:
    """Return the line of an event that follows another step."""
    return _encoded(_fields_of(line) | {"after_step": step})


def _encoded(line: Mapping[str, object]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _end_of(path: Path, step: int) -> int:
    """Return the length of the lines up to the last one of a step that is not after `step`; 0 if there is none."""
    ends = (end for line, end in _backwards(path) if (found := _quick_step_of(line)) is not None and found <= step)
    return next(ends, 0)


def _backwards(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file from the last one, each with the offset of its end; none if the file is missing."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""
        while start:
            size = min(start, BLOCK_BYTES)
            start -= size
            file.seek(start)
            lines = (file.read(size) + rest).splitlines(keepends=True)
            end = start + sum(map(len, lines))
            rest = lines.pop(0) if start else b""  # whose begin is in the block before
            for line in reversed(lines):
                yield line, end
                end -= len(line)


def truncate_after(path: Path, step: int) -> None:
    """Keep the complete lines of metrics.jsonl up to the step of the checkpoint, and the event of the newest start.

    Replaces the file atomically.
    """
    start = _last_start(path)
    partial = path.with_name(f".{path.name}.partial")
    with path.open("rb") as lines, partial.open("wb") as file:
        file.writelines(_lines_until(lines, step))
        if _after(start) > step:
            file.write(_moved(start, step))
        file.flush()
        os.fsync(file.fileno())
    rename(partial, path)


def _lines_until(lines: Iterable[bytes], step: int) -> Iterator[bytes]:
    """Yield the lines up to that of `step` and the events after it, without incomplete lines."""
    for line in lines:
        fields = _fields_of(line)
        after = fields.get("after_step" if "event" in fields else "step")
        if isinstance(after, int) and after <= step:
            yield line.rstrip() + b"\n"


def _count_common(lines: list[bytes], others: list[bytes]) -> int:
    """Return the number of lines at the start that are the same in both lists."""
    pairs = zip(lines, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
