"""Campaigns: cases of several areas, each in a process that may crash, hang or exhaust its memory.

Case n of an area is drawn from (seed, area, n) alone. A worker runs the cases of one area in order, for a slice of
time; then the area that has had the least time is next. A worker that dies is replaced, and its death is the failure of
the case that it was running.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from acsgd.streams import mix_seed
from tests.lib.patience import Patience, stretched
from tests.soak.area import Area, Case, UnavailableError

PRELOAD = ["tests.soak.preload"]
DUMP_S = 10.0
"""Time in which a process that hangs writes its stack, seconds."""
SLICE_S = 5.0
"""Duration of a slice, seconds; a case in progress is completed."""
PREPARE_S = 300.0
"""Maximum duration of an area's preparation, seconds."""
EXAMPLES = 3
"""Number of failures recorded of each kind."""
TAIL_CHARS = 3000
"""Length of the recorded end of a failed case's traceback and output, characters."""


@dataclass(frozen=True)
class Failure:
    """An illegal end of a case."""

    area: str
    case: int
    change: str
    """What the case changed, in one line."""
    reason: str
    """What was illegal, in one line."""
    detail: str
    """End of the traceback or of the output."""

    @property
    def kind(self) -> str:
        """Reason without numbers, paths and quotations, by which failures are counted."""
        return re.sub(r'\S*/\S+|"[^"]*"|\'[^\']*\'|-?\d[\w.+-]*|\b(inf|nan)\b', "*", self.reason)[:160]


@dataclass
class Tally:
    """What has been run of one area."""

    cases: int = 0
    """Number of cases; also the number of the next case."""
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    seconds: float = 0.0
    unavailable: str = ""
    """Why the area cannot be run here."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Number of failures of each kind."""
    failures: list[Failure] = field(default_factory=list)
    """The first EXAMPLES failures of each kind."""
    rows: list[list[str]] = field(default_factory=list)
    """Results of the cases of an area that prints them."""

    def add(self, failure: Failure) -> bool:
        """Count a failure; return whether it is recorded."""
        self.failed += 1
        self.kinds[failure.kind] = self.kinds.get(failure.kind, 0) + 1
        is_recorded = self.kinds[failure.kind] <= EXAMPLES
        if is_recorded:
            self.failures.append(failure)
        return is_recorded

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Tally:
        """Inverse of dataclasses.asdict."""
        return cls(**{**fields, "failures": [Failure(**failure) for failure in fields["failures"]]})


@dataclass
class _Worker:
    """A process that runs a slice of an area, and the case it is at."""

    area: str
    process: BaseProcess
    connection: Connection
    log: Path
    started_at: float
    case: int | None = None
    case_at: float = 0.0
    change: str = ""


class Campaign:
    """A campaign over some areas; resumes the one that `state` holds if that has the same seed."""

    def __init__(self, areas: Mapping[str, type[Area]], *, seed: int, state: Path | None = None) -> None:
        self._areas = areas
        self._seed = seed
        self._state = state
        saved = json.loads(state.read_text()) if state and state.exists() else {"seed": seed, "areas": {}}
        if saved["seed"] != seed:
            raise ValueError(f"{state} is of seed {saved['seed']}, not {seed}; give another --state, or remove it")
        self._others = {name: fields for name, fields in saved["areas"].items() if name not in areas}
        self.tallies = {name: Tally.from_dict(saved["areas"].get(name, asdict(Tally()))) for name in areas}

    def run(
        self, *, seconds: float, cases: int | None = None, limits: Mapping[str, int] | None = None, workers: int = 1
    ) -> None:
        """Run cases for `seconds` after the preparation.

        cases: maximum number per area, over all resumptions; limits: default of that, by area.
        """
        most = {name: cases if cases is not None else (limits or {}).get(name) for name in self._areas}
        with _base_directory() as base:
            self._prepare(base)
            until = time.monotonic() + seconds
            spent = dict.fromkeys(self._areas, 0.0)
            running: dict[Connection, _Worker] = {}
            while True:
                idle = [
                    name
                    for name, tally in self.tallies.items()
                    if not tally.unavailable
                    and ((limit := most[name]) is None or tally.cases < limit)
                    and name not in {worker.area for worker in running.values()}
                ]
                while idle and len(running) < workers and time.monotonic() < until:
                    name = min(idle, key=spent.__getitem__)
                    idle.remove(name)
                    worker = self._start(name, base, until, most[name])
                    running[worker.connection] = worker
                if not running:
                    break
                for worker in self._step(running):
                    del running[worker.connection]
                    elapsed = time.monotonic() - worker.started_at
                    spent[worker.area] += elapsed
                    self.tallies[worker.area].seconds += elapsed
                    self._save()

    def run_case(self, name: str, number: int) -> Failure | str:
        """Run one case alone; return its failure, or its outcome."""
        tally = self.tallies[name] = Tally(cases=number)
        with _base_directory() as base:
            self._prepare(base)
            if tally.unavailable:
                return tally.unavailable
            worker = self._start(name, base, time.monotonic() + 1e6, number + 1)
            running = {worker.connection: worker}
            while not self._step(running):
                pass
        if tally.failures:
            return tally.failures[0]
        return f"{worker.change}: {'accepted' if tally.accepted else 'refused'}"

    def _prepare(self, base: Path) -> None:
        """Prepare each area in a process of its own."""
        for name, area in self._areas.items():
            (base / name).mkdir()
            ours, theirs = _context().Pipe()
            log = base / f"{name}.log"
            log.touch()
            process = _context().Process(target=_prepare, args=(area, base / name, log, theirs))
            process.start()
            theirs.close()
            process.join(PREPARE_S)
            if process.exitcode != 0:
                _kill(process)
                raise RuntimeError(f"area {name} cannot be prepared: {log.read_text()[-TAIL_CHARS:]}")
            self.tallies[name].unavailable = ours.recv_bytes().decode()
            ours.close()

    def _start(self, name: str, base: Path, until: float, cases: int | None) -> _Worker:
        ours, theirs = _context().Pipe()
        until = min(until, time.monotonic() + SLICE_S)
        log = base / f"{name}.log"
        args = (name, self._areas[name], base, log, self._seed, self.tallies[name].cases, until, cases, theirs)
        process = _context().Process(target=_run_slice, args=args)
        process.start()
        theirs.close()
        return _Worker(name, process, ours, log, time.monotonic(), case_at=time.monotonic())

    def _step(self, running: Mapping[Connection, _Worker]) -> list[_Worker]:
        """Take over what workers report; return those that have ended."""
        for connection in wait(list(running), timeout=0.2):
            assert isinstance(connection, Connection)
            worker = running[connection]
            with contextlib.suppress(EOFError, ConnectionResetError):
                while connection.poll():
                    self._take(worker, json.loads(connection.recv_bytes()))
                continue
            worker.process.join()
            self._check_end(worker)
            connection.close()
            return [worker]
        for worker in running.values():
            deadline_s = self._areas[worker.area].deadline_s
            if time.monotonic() - worker.case_at > stretched(deadline_s):
                _dump_stack(worker)
                _kill(worker.process)
                self._fail(worker, f"hangs: more than {deadline_s:g} s", _tail(worker.log))
                worker.connection.close()
                return [worker]
        return []

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        tally = self.tallies[worker.area]
        if "case" in message:
            worker.case, worker.case_at, worker.change = message["case"], time.monotonic(), ""
        elif "change" in message:
            worker.change = message["change"]
        elif "verdict" in message:
            tally.cases, worker.case = tally.cases + 1, None
            tally.accepted += message["verdict"] == "accepted"
            tally.refused += message["verdict"] == "refused"
            if message["row"]:
                tally.rows.append(message["row"])
                print(f"{worker.area} {tally.cases - 1}: {' | '.join(message['row'])}", flush=True)
        else:
            self._fail(worker, message["reason"], message["detail"])

    def _check_end(self, worker: _Worker) -> None:
        """Count a failure if a worker has ended within a case; raise RuntimeError if it has ended before."""
        code = worker.process.exitcode
        assert code is not None
        end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if worker.case is not None:
            self._fail(worker, f"the process {end}", _tail(worker.log))
        elif code:
            raise RuntimeError(f"a worker of area {worker.area} {end}: {_tail(worker.log)}")

    def _fail(self, worker: _Worker, reason: str, detail: str) -> None:
        assert worker.case is not None, f"area {worker.area}: {reason}: {detail}"
        failure = Failure(worker.area, worker.case, worker.change, reason, detail)
        tally = self.tallies[worker.area]
        tally.cases, worker.case = tally.cases + 1, None
        if tally.add(failure):
            print(f"{failure.area} {failure.case}: {failure.change}: {failure.reason}", flush=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the seed, and the tallies of all areas, as JSON values."""
        areas = self._others | {name: asdict(tally) for name, tally in self.tallies.items()}
        return {"seed": self._seed, "areas": areas}

    def _save(self) -> None:
        if self._state is not None:
            self._state.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._state.with_name(f".{self._state.name}")
            unfinished.write_text(json.dumps(self.to_dict(), indent=1))
            unfinished.rename(self._state)


def case_of(area: str, number: int, seed: int, directory: Path) -> Case:
    """Return a case of an area."""
    return Case(random.Random(mix_seed(seed, zlib.crc32(area.encode()), number)), directory, number)


def _context() -> multiprocessing.context.ForkServerContext:
    """Return what starts processes that have imported PRELOAD; in a process with another server, what that has."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@contextlib.contextmanager
def _base_directory() -> Iterator[Path]:
    """Create a directory for what areas prepare and cases write; remove it on exit."""
    base = Path(tempfile.mkdtemp(prefix="acsgd-soak-"))
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _prepare(area: type[Area], directory: Path, log: Path, connection: Connection) -> None:
    """Run `area.prepare`, and send the reason why the area is unavailable, or nothing."""
    _begin_process(log)
    os.chdir(directory)
    reason = ""
    try:
        area.prepare(directory)
    except UnavailableError as error:
        reason = str(error)
    connection.send_bytes(reason.encode())


def _run_slice(
    name: str,
    area: type[Area],
    base: Path,
    log: Path,
    seed: int,
    first: int,
    until: float,
    cases: int | None,
    connection: Connection,
) -> None:
    """Run the cases of an area from number `first` until a time (time.monotonic) or a number of cases."""
    _begin_process(log)
    limit_memory(area.memory_bytes)
    loaded, number = area(base / name), first

    def send(**message: object) -> None:
        connection.send_bytes(json.dumps(message).encode())

    while number == first or (time.monotonic() < until and number != cases):
        send(case=number)
        with tempfile.TemporaryDirectory(dir=base, ignore_cleanup_errors=True) as directory:
            os.chdir(directory)
            case = case_of(name, number, seed, Path(directory))
            case.report = lambda change: send(change=change)
            try:
                outcome = loaded.run(case)
            except Exception as error:
                send(reason=_reason(error), detail=traceback.format_exc()[-TAIL_CHARS:])
            else:
                send(verdict=outcome.verdict, row=outcome.row)
            os.chdir(base)
        number += 1
    connection.close()
    os._exit(0)  # threads that a case left behind would keep the process


def _begin_process(log: Path) -> None:
    """Make this process the leader of a group; let it write its output, and temporary files, beside `log`."""
    os.setsid()
    os.environ["TMPDIR"] = tempfile.tempdir = str(log.parent)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR2, file=2)


def _dump_stack(worker: _Worker) -> None:
    """Let a worker that hangs write its stack to its log, and wait until it has, for a while."""
    assert worker.process.pid is not None
    before = size = worker.log.stat().st_size
    os.kill(worker.process.pid, signal.SIGUSR2)
    patience = Patience(DUMP_S)
    while not patience.is_over:
        time.sleep(0.1)
        last, size = size, worker.log.stat().st_size
        if before < last == size:
            return


def limit_memory(nbytes: int) -> None:
    """Limit the memory that this process may allocate from now on, bytes; not that of files it maps."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _reason(error: Exception) -> str:
    """Return a failure in one line: an assertion's message, or type and message of an exception."""
    text = str(error) if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:3000]


def _kill(process: BaseProcess) -> None:
    """Kill a process and all that it has started."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL_CHARS:]


def all_failures(tallies: Mapping[str, Tally]) -> Sequence[Failure]:
    """Return the recorded failures of all areas."""
    return [failure for tally in tallies.values() for failure in tally.failures]
