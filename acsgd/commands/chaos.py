"""The command `acsgd chaos`: faults in a running elastic run, and a check that it continues.

Kills or stops processes of the run that are on this machine and belong to this user, and no others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import tyro

from acsgd.elastic.host.processes import HostProcesses, find_hosts
from acsgd.failures.processes import ProcessIdentity
from acsgd.io.telemetry.json_lines import METRICS

Fault = Literal["kill", "stop", "host"]
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
POLL_S = 0.02
LINE_BYTES = 2**16
"""More than the longest line of metrics.jsonl."""
READS = 5
"""A file that is cut off and written again while it is read may give lines that never were in it; it is read again."""


@dataclass(frozen=True)
class Chaos:
    """Kill or stop processes of a running elastic run on this machine, repeatedly, and report how it continues.

    Ends with the run on this machine, after --count faults, or with Ctrl-C. Exits with 1 if the run did not continue,
    or a step is missing from metrics.jsonl or is there twice.
    """

    run_dir: tyro.conf.Positional[Path]
    """log.dir of the run."""
    every: str = "30s"
    """Mean time between two faults, such as 20s, 5m or 1h; the times are random."""
    faults: str = "kill,stop"
    """What may happen, comma-separated: kill a worker, stop a worker for a while, kill a whole host with its torchrun,
    which does not come back."""
    stop: str = "5s"
    """Longest time for which a worker is stopped."""
    limit: str = "2m"
    """Time within which a step must follow a fault."""
    count: int | None = None
    """Number of faults. Default: no limit."""
    seed: int | None = None
    """Seed of what happens when. Default: another one each time."""

    def run(self) -> None:
        """Run the command. Raises ValueError if an option is invalid, or the run has no processes here."""
        faults = _parse_faults(self.faults)
        every_s, stop_s, limit_s = (_parse_s(name, getattr(self, name)) for name in ("every", "stop", "limit"))
        if self.count is not None and self.count < 1:
            raise ValueError(f"--count {self.count} must be 1 or more")
        if not find_hosts(self.run_dir):
            raise ValueError(
                f"{self.run_dir}: no worker of this user on this machine trains in this run directory under "
                "--rdzv-backend acsgd; start the run first, or run this on one of its hosts"
            )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        injector = Injector(self.run_dir, random.Random(self.seed), stop_s=stop_s, limit_s=limit_s)
        with contextlib.suppress(KeyboardInterrupt):
            injector.run(faults, every_s, self.count)
        sys.exit(injector.summarize())


class Injected(NamedTuple):
    """A fault, and what followed."""

    text: str
    recovery_s: float | None
    """Time until the next step was logged, from the fault or, for a process that was stopped, from its end; None if
    none was."""


class LogMark(NamedTuple):
    """A place in metrics.jsonl that is recognized after the file was cut off and written again."""

    position: int
    """Of the place, which is the start of a line, in bytes."""
    line: bytes
    """The line before it; b"" at the start of the file."""


START = LogMark(0, b"")


class Injector:
    """Injects faults, one after another, each after the run has continued."""

    def __init__(self, run_dir: Path, draw: random.Random, *, stop_s: float, limit_s: float) -> None:
        self._run_dir = run_dir
        self._draw = draw
        self._stop_s = stop_s
        self._limit_s = limit_s
        self.injected: list[Injected] = []

    def run(self, faults: Sequence[Fault], every_s: float, count: int | None) -> None:
        """Inject faults until there are `count`, the run has ended here, or it does not continue."""
        while count is None or len(self.injected) < count:
            time.sleep(self._draw.expovariate(1 / every_s))
            hosts = find_hosts(self._run_dir)
            if not hosts:
                print("the run has no processes on this machine any more")
                return
            fault, view, mark = self._draw.choice(faults), _newest_view(self._run_dir), _end(self._run_dir)
            if (text := self._inject(fault, hosts)) is None:
                continue
            injected = Injected(text, self._wait_for_step(None if fault == "stop" else view, mark))
            self.injected.append(injected)
            print(f"{time.strftime('%H:%M:%S')}  {text}: {_describe(injected)}", flush=True)
            if injected.recovery_s is None and find_hosts(self._run_dir):
                return

    def summarize(self) -> int:
        """Print how the run has continued; return the exit code."""
        steps = _steps(self._run_dir)
        wrong = [step for before, step in itertools.pairwise(steps) if step != before + 1]
        times = sorted(each.recovery_s for each in self.injected if each.recovery_s is not None)
        lost = len(self.injected) - len(times)
        print(f"{len(self.injected)} faults; {len(steps)} steps in {METRICS}", end="")
        if times:
            print(f"; a step followed after {times[len(times) // 2]:.2f} s (median), at most {times[-1]:.2f} s", end="")
        print(f"; after {lost} faults no step followed" if lost else "")
        if wrong:
            print(f"step {wrong[0]} does not follow the one before it: a step is missing, or there twice")
        return 1 if wrong or (lost and find_hosts(self._run_dir)) else 0

    def _inject(self, fault: Fault, hosts: Sequence[HostProcesses]) -> str | None:
        """Inject a fault into one of the hosts; return what happened, None if nothing did."""
        after = f"after step {(_steps(self._run_dir) or [0])[-1]}"
        host = self._draw.choice(hosts)
        if fault == "host":
            for process in (host.agent, *host.workers.values()):  # torchrun first, so that it restarts nothing
                process.send_signal(signal.SIGKILL)
            return f"{after}, host {host.address} killed"
        name = self._draw.choice(sorted(host.workers))
        worker = host.workers[name]
        if fault == "stop":
            seconds = self._draw.uniform(0, self._stop_s)
            with _stopped(worker) as is_there:
                time.sleep(seconds if is_there else 0)
            return f"{after}, worker {name} of {host.address} stopped for {seconds:.1f} s" if is_there else None
        with contextlib.suppress(psutil.NoSuchProcess):
            if host.restarts_left() < 1:
                raise ValueError(
                    f"torchrun of {host.address} has no restarts left, so a killed worker would end the host; start it "
                    "again with a larger --max-restarts, or give --faults stop"
                )
        return f"{after}, worker {name} of {host.address} killed" if worker.send_signal(signal.SIGKILL) else None

    def _wait_for_step(self, view: int | None, mark: LogMark) -> float | None:
        """Wait until another step is logged; return how long that took, None if it does not happen.

        view: of the workers that were killed. A step that was almost complete may still be logged after their end, so
        only steps of a later view count. None = steps of any view. mark: the end of the file before the fault.
        """
        since, last_view = time.monotonic(), -1 if view is None else view
        if view is None:  # a worker was stopped, and the others may have continued
            mark = _end(self._run_dir)
        while time.monotonic() - since < self._limit_s:
            time.sleep(POLL_S)
            if (lines := _lines_after(self._run_dir, mark)) is None:  # the run has returned to a checkpoint
                mark = START if view is not None else _end(self._run_dir)
                continue
            new = itertools.dropwhile(lambda line: line.get("view", 0) <= last_view, lines)
            if any("step" in line for line in new):
                return time.monotonic() - since
            if not find_hosts(self._run_dir):
                return None
        return None


@contextlib.contextmanager
def _stopped(process: ProcessIdentity) -> Iterator[bool]:
    """Stop a process, and continue it at the end, also after an exception. Yields whether the process is there."""
    try:
        yield process.send_signal(signal.SIGSTOP)
    finally:
        process.send_signal(signal.SIGCONT)


def _steps(run_dir: Path) -> list[int]:
    """Return the steps in metrics.jsonl, in the order of its lines."""
    return [line["step"] for line in _lines(run_dir) if "step" in line]


def _newest_view(run_dir: Path) -> int:
    """Return the number of the newest view in metrics.jsonl; 0 if there is none."""
    return max((line["view"] for line in _lines(run_dir) if "view" in line), default=0)


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl. Raises ValueError if it is damaged."""
    for _ in range(READS):
        if (lines := _lines_after(run_dir, START)) is not None:
            return lines
        time.sleep(POLL_S)
    raise ValueError(f"{run_dir / METRICS}: a line is not JSON; is the file damaged?")


def _lines_after(run_dir: Path, mark: LogMark) -> list[dict[str, Any]] | None:
    """Return the complete lines of metrics.jsonl after a mark; None if the file was cut off before it, or just now."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            file.seek(mark.position - len(mark.line))
            text = file.read()
        if not text.startswith(mark.line):
            return None
        return [json.loads(line) for line in text[len(mark.line) : text.rfind(b"\n") + 1].splitlines()]
    except FileNotFoundError:
        return []
    except ValueError:
        return None


def _end(run_dir: Path) -> LogMark:
    """Return the end of the complete lines of metrics.jsonl."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - LINE_BYTES))
            text = file.read(size - start)
    except FileNotFoundError:
        return START
    text = text[: text.rfind(b"\n") + 1]
    return LogMark(start + len(text), text[text.rfind(b"\n", 0, -1) + 1 :])


def _describe(injected: Injected) -> str:
    return "no step followed" if injected.recovery_s is None else f"a step followed after {injected.recovery_s:.2f} s"


def _parse_faults(text: str) -> list[Fault]:
    """Return the kinds of faults. Raises ValueError."""
    known: tuple[Fault, ...] = ("kill", "stop", "host")
    faults = [fault for fault in known if fault in text.split(",")]
    if unknown := set(text.split(",")) - {*known}:
        raise ValueError(f'--faults: "{sorted(unknown)[0]}" is none of {", ".join(known)}')
    return faults


def _parse_s(name: str, text: str) -> float:
    """Return a time in seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+\.?\d*)([smh])", text)
    if match is None or not float(match[1]):
        raise ValueError(f'--{name} {text} is not a time; give a number with a unit, such as "30s" or "5m"')
    return float(match[1]) * UNITS_S[match[2]]
