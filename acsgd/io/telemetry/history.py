"""The files of a run directory, read while the run writes them or after it: steps, events, options, text log."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.io.telemetry.json_lines import METRICS
from acsgd.io.telemetry.text_log import LogEntry, parse_text_log

KINDS = {
    "resume": re.compile(r"resuming from .*?step-0*(?P<step>\d+)"),
    "save": re.compile(r"saved .*step-0*(?P<step>\d+), on disk"),
    "spike": re.compile(r"step (?P<step>\d+): loss .* is a spike"),
    "evaluation": re.compile(r"step (?P<step>\d+): .*\(\d+ sequences"),
    "end": re.compile(r"(done:|stopped|nothing left).*?step (?P<step>\d+)"),
}
"""Kinds of sentences in the text log that have a step."""


class LoggedEvent(NamedTuple):
    """Something that happened after a step."""

    step: int
    kind: str
    text: str
    time: str
    """Wall-clock time; empty if it is not known."""


@dataclass
class RunHistory:
    """What a run directory says about its run."""

    directory: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl, one per step, in order."""
    events: list[LoggedEvent] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)
    """Options of config.toml as "section.key"."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each file that is missing or damaged."""

    @property
    def last_step(self) -> int:
        """Step of the last line; 0 if there is none."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def num_steps(self) -> int | None:
        """Number of steps of the run (optim.steps); None if it is not known."""
        text = self.config.get("optim.steps", "")
        return int(text) if text.isdecimal() and len(text) < 20 else None


def read_run(directory: Path, *, last_bytes: int | None = None) -> RunHistory:
    """Read a run directory, as far as its files can be read. Raises ValueError if it is no directory.

    last_bytes: of each file with a line per step, how much of its end to read. None = all.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give the run directory, log.dir of the run")
    run = RunHistory(directory)
    run.config = _read_config(run)
    events = [*_read_metrics(run, last_bytes), *_read_log(run, last_bytes)]
    run.events = sorted(events, key=lambda event: event.step)
    return run


def _read_lines(path: Path, last_bytes: int | None) -> list[bytes]:
    """Return the lines of a file, or the complete ones in its end. Raises OSError."""
    with path.open("rb") as file:
        if last_bytes is not None and file.seek(0, os.SEEK_END) > last_bytes:
            file.seek(-last_bytes, os.SEEK_END)
            file.readline()
        else:
            file.seek(0)
        return file.read().splitlines(keepends=True)


def _read_metrics(run: RunHistory, last_bytes: int | None) -> list[LoggedEvent]:
    """Read the steps of metrics.jsonl into `run`; return its events."""
    path, steps, events = run.directory / METRICS, dict[int, dict[str, Any]](), list[LoggedEvent]()
    try:
        lines = _read_lines(path, last_bytes)
    except OSError as error:
        run.problems.append(f"{path} cannot be read ({error.strerror}): no steps are known; log.to needs jsonl")
        return []
    damaged = []
    for index, text in enumerate(lines, start=1):
        try:
            line = json.loads(text, parse_constant=lambda _: None)
            if "event" in line:
                details = ", ".join(f"{name} {value}" for name, value in line.items() if name not in _EVENT_FIELDS)
                name, details = (each.encode(errors="replace").decode() for each in (str(line["event"]), details))
                events.append(LoggedEvent(int(line["after_step"]), name, details, ""))
            else:
                number = int(line["step"])
                steps[number] = line | {"step": number}
        except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
            if index < len(lines) or text.endswith(b"\n"):
                damaged.append(index)  # else the run is writing it
    if damaged:
        run.problems.append(f"{path}: {len(damaged)} damaged lines are left out, the first is line {damaged[0]}")
    run.steps = [steps[step] for step in sorted(steps)]
    if not steps:
        run.problems.append(f"{path} has no step yet")
    return events


_EVENT_FIELDS = ("event", "after_step")


def _read_config(run: RunHistory) -> dict[str, str]:
    path = run.directory / "config.toml"
    try:
        return dict(_flatten(tomllib.loads(path.read_text())))
    except OSError as error:
        run.problems.append(f"{path} cannot be read ({error.strerror}): the options are not known")
    except (RecursionError, ValueError) as error:
        run.problems.append(f"{path} is damaged ({error}): the options are not known")
    return {}


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _read_log(run: RunHistory, last_bytes: int | None) -> Iterator[LoggedEvent]:
    """Yield the sentences for the user in the text log of the first rank; nothing without one."""
    path = next(iter(sorted(run.directory.glob("logs/rank-*.log"))), None)
    if path is None:
        return
    try:
        entries = parse_text_log(_read_lines(path, last_bytes))
        yield from filter(None, map(_event_of, entries))
    except OSError as error:
        run.problems.append(f"{path} cannot be read ({error.strerror}): saves and resumes are not known")


def _event_of(entry: LogEntry) -> LoggedEvent | None:
    if entry.function != "note":
        return None
    for kind, pattern in KINDS.items():
        if match := pattern.match(entry.message):
            return LoggedEvent(int(match["step"]), kind, entry.message, entry.time)
    return None


def finite(value: object) -> float | None:
    """Return a number of a line; None if it is none, or not finite."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


class RankNumber(NamedTuple):
    """A number of one rank."""

    rank: int
    size: int
    """Number of ranks of its pipeline."""
    value: float


def numbers_by_rank(line: Mapping[str, Any], name: str) -> list[RankNumber]:
    """Return the number of each rank in a line of metrics.jsonl; nothing if it is not there, or damaged."""
    ranks = line.get("ranks")
    grid = ranks.get(name) if isinstance(ranks, dict) else None
    rows = grid if isinstance(grid, list) and all(isinstance(row, list) for row in grid) else []
    cells = [(len(row), finite(cell)) for row in rows for cell in row]
    return [RankNumber(rank, size, value) for rank, (size, value) in enumerate(cells) if value is not None]
