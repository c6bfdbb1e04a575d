"""metrics.jsonl: one JSON object per optimizer step, and one per event."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.config.options import Config
from acsgd.io.files.atomic import rename
from acsgd.io.telemetry.record import RunEvent, StepRecord

METRICS = "metrics.jsonl"
"""Name of the file in the run directory."""
LAST_BYTES = 1 << 16
"""Size of the end of the file in which the last step is looked for first."""
COMPARED_STEPS = 100
"""Number of steps of which two files are compared at once: as many lines at most are sent without need."""
RANKS_PER_STEP = 8
"""Largest number of ranks whose numbers are in every line; those of more ranks are in every k-th, as few per step."""


class JsonLinesSink:
    """Writes metrics.jsonl: every step once, in order, written when `log` returns.

    If training returns to an earlier step, the lines after it are dropped, at the next step or event. If the last step
    is logged again, the events after it are kept: a view may begin with the evaluation of a step whose line is there. A
    full disk does not end the run: lines that cannot be written are kept and written later. If the file is removed, a
    new one begins.

    resumed_at: completed steps of the checkpoint the run resumed from; 0 = a new run, whose file starts empty.
    notify: prints a sentence for the user.
    """

    def __init__(self, path: Path, *, resumed_at: int, notify: Callable[[str], None]) -> None:
        if path.exists():
            truncate_after(path, resumed_at)
        path.touch()
        self._path, self._notify, self._has_warned = path, notify, False
        self._unwritten, self._last_step = b"", resumed_at

    @classmethod
    def open(cls, config: Config, run_dir: Path, resumed_at: int, notify: Callable[[str], None]) -> JsonLinesSink:
        """Open the sink of a run, as a `Tracker` does."""
        return cls(run_dir / METRICS, resumed_at=resumed_at, notify=notify)

    def log(self, record: StepRecord) -> None:
        events = b""
        with self._errors_reported():
            self._begin_again_if_removed()
            if record.step <= self._last_step:
                events = self._events_after(record.step) if record.step == self._last_step else b""
                self._rewind(record.step - 1)
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
            os.truncate(self._path, _end_of(self._path.read_bytes(), step))
            self._unwritten = lines
            self._last_step = max([step, *filter(None, map(_step_of, lines.splitlines()))])
            self._write()

    def _append(self, line: Mapping[str, object], then: bytes = b"") -> None:
        self._unwritten += json.dumps(line, allow_nan=False).encode() + b"\n" + then
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


class LastLines(NamedTuple):
    """Where a metrics.jsonl ends. That of the newest view has the last execution of each step; of two, the longer."""

    view: int
    """Number of its newest view; 0 = it has none."""
    step: int
    """Its last step; 0 = it has none."""


class StepLines:
    """The lines of a metrics.jsonl, by the steps that they follow. A file that is missing has none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def last(self) -> LastLines:
        """Return where the file ends."""
        view = step = 0
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for length in (min(size, LAST_BYTES), size):
                file.seek(size - length)
                lines = file.read().splitlines()[::-1]
                step = next(filter(None, map(_step_of, lines)), 0)
                view = next(filter(None, map(_view_of, lines)), 0)
                if step and view:
                    break
        return LastLines(view, step)

    def after(self, step: int) -> bytes:
        """Return the lines that follow that of a step."""
        raw = self.path.read_bytes()
        return raw[_end_of(raw, step) :]

    def digests(self) -> dict[str, str]:
        """Return what identifies the executions of each span of COMPARED_STEPS steps, by the number of the span."""
        digests = defaultdict[int, Any](partial(hashlib.blake2b, digest_size=8))
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            for fields in map(_fields_of, file):
                if isinstance(step := fields.get("step"), int):
                    executed = json.dumps([step, fields.get("loss"), fields.get("grad_norm")])
                    digests[(step - 1) // COMPARED_STEPS].update(executed.encode())
        return {str(span): digest.hexdigest() for span, digest in digests.items()}


def last_common_step(mine: Mapping[str, str], others: Mapping[str, str]) -> float:
    """Return the last step up to which no span of two files differs; infinite if none does. Of `StepLines.digests`."""
    differing = [int(span) for span in mine if others.get(span, mine[span]) != mine[span]]
    return min(differing) * COMPARED_STEPS if differing else math.inf


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


def _view_of(line: bytes) -> int | None:
    """Return the number of the view that a line of metrics.jsonl begins; None for others."""
    view = _fields_of(line).get("view") if b'"view"' in line else None
    return view if isinstance(view, int) else None


def _end_of(raw: bytes, step: int) -> int:
    """Return the length of the lines up to the last one of a step that is not after `step`; 0 for step 0."""
    end = length = 0
    for line in raw.splitlines(keepends=True):
        length += len(line)
        if (found := _step_of(line)) is not None:
            if found > step:
                break
            end = length
    return end


def truncate_after(path: Path, step: int) -> None:
    """Keep the complete lines of metrics.jsonl up to the step of the checkpoint; replaces the file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    with path.open("rb") as lines, partial.open("wb") as file:
        file.writelines(_lines_until(lines, step))
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
