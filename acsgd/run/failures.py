"""Failure reports: one message per failure, whatever the number of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from acsgd.errors import RunError
from acsgd.launch import Launch
from acsgd.run.signals import WATCH_S
from acsgd.topology import Store, published_host

T = TypeVar("T")

GRACE_S = 5.0
"""Upper limit, seconds, for one wait for other ranks' reports. torchrun kills after 30 s: all waits must fit in."""


@contextlib.contextmanager
def report_startup_error(launch: Launch) -> Iterator[None]:
    """Print an error that keeps the run from starting, on one rank; exit with code 2.

    Usually all ranks have the same error. Rank 0 prints it and exits, and torchrun ends the other ranks while they
    wait here. An error that rank 0 does not have (a file missing on one host only) is printed after the wait.
    """
    try:
        yield
    except (ValueError, RunError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise  # --help
        if launch.rank:
            time.sleep(10.0 if launch.local_rank == 0 else 20.0)
        if not isinstance(error, SystemExit):
            _record(str(error), launch)
            _print_error(str(error))
        raise SystemExit(2) from None


@contextlib.contextmanager
def report_failure(
    store: Store, launch: Launch, *, timeout_s: float, cleanup: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Print an exception raised in the context, on one rank; exit all ranks with code 1.

    A rank that waited for a peer knows only that peer, which may itself wait for a third. So each rank reports to the
    store for which ranks it waited, a thread of each rank that still runs answers, and the rank that failed first
    prints the error of the rank that does neither. If a rank has an error of its own, that is printed instead, with
    its traceback unless it is a RunError.
    timeout_s: limit of one communication (run.timeout); bounds the waits for reports and answers. cleanup: called
    before the exit, which runs no context managers.
    """
    board = FailureBoard(store, launch.rank, launch.world_size)
    grace_s = min(GRACE_S, timeout_s / 4)
    try:
        with _answering(board, grace_s):
            yield
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first rank ends; this one ends, too
        report = Report.of(error, launch.rank)
        limit_s = 4 * grace_s + 2 * WATCH_S
        is_printer, text = _within(limit_s, lambda: _settle(board, report, grace_s), (True, report.text))
        _record(text, launch, is_cause=is_printer)
        if is_printer:
            _print_error(text)
            _within(grace_s, lambda: board.publish(text), None)
        _within(grace_s, cleanup, None)
        sys.stdout.flush()
        os._exit(1)  # gloo's destructors would wait for pending collectives, until run.timeout


@dataclass(frozen=True)
class Report:
    """What one rank knows about a failure."""

    text: str
    awaited: tuple[int, ...]
    """Ranks this rank waited for in vain, as in RunError."""

    @classmethod
    def of(cls, error: Exception, rank: int) -> Report:
        """Describe the exception that is being handled on `rank`."""
        if isinstance(error, RunError):
            return cls(str(error), error.awaited)
        summary = traceback.format_exception_only(error)[-1].strip()
        return cls(f"rank {rank} on {socket.gethostname()}: {summary}\n{traceback.format_exc().rstrip()}", ())


def attribute_failure(
    reports: Mapping[int, Report], silent: Collection[int], first: int, host: Callable[[int], str]
) -> str:
    """Return the message that names the rank at fault.

    reports: by rank; silent: ranks that neither report nor answer; first: the rank that reported first; host: returns
    the host name of a rank.
    """
    faulty = [rank for rank, report in reports.items() if not report.awaited]
    if faulty:
        return reports[first if first in faulty else min(faulty)].text
    awaited = {rank for report in reports.values() for rank in report.awaited}
    if silent:
        culprits, state = awaited.intersection(silent) or set(silent), "silent: ended or hanging"
    else:
        culprits, state = awaited - reports.keys(), "alive, but stuck or slower than run.timeout"
    if not culprits:
        return f"{reports[first].text}; all ranks are alive: the network failed, or run.timeout is too short"
    witnesses = [rank for rank, report in reports.items() if culprits.intersection(report.awaited)] or [first]
    # a rank that waited for one peer has the more specific message than one that waited for a group
    witness = min(witnesses, key=lambda rank: (len(reports[rank].awaited), rank))
    names = " and ".join(f"rank {rank} on {host(rank)}" for rank in sorted(culprits))
    return f"{reports[witness].text}; {names} {'is' if len(culprits) == 1 else 'are'} {state}; see its log"


class FailureBoard:
    """Failure reports of all ranks, in the store of the run."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self._world_size = world_size
        self._store = store

    def report(self, report: Report) -> bool:
        """Store this rank's report; return whether it is the first of all."""
        self._store.set(_key("failure", self.rank), json.dumps(asdict(report)))
        return self._store.add("acsgd/failures", 1) == 1

    def reports(self) -> dict[int, Report]:
        """Return the reports so far, by rank."""
        found = {}
        for rank in range(self._world_size):
            if self._store.check([_key("failure", rank)]):
                fields = json.loads(self._store.get(_key("failure", rank)))
                found[rank] = Report(fields["text"], tuple(fields["awaited"]))
        return found

    def all_reported(self) -> bool:
        return self._store.add("acsgd/failures", 0) == self._world_size

    def has_failed(self) -> bool:
        return self._store.check(["acsgd/failures"])

    def answer(self) -> None:
        """Record that this rank is alive, or has finished."""
        self._store.set(_key("answer", self.rank), "")

    def silent(self) -> list[int]:
        """Return the ranks that have neither reported nor answered."""
        ranks = range(self._world_size)
        unanswered = [rank for rank in ranks if not self._store.check([_key("answer", rank)])]
        return [rank for rank in unanswered if not self._store.check([_key("failure", rank)])]

    def host(self, rank: int) -> str:
        return published_host(self._store, rank)

    def publish(self, text: str) -> None:
        """Store the message that was printed."""
        with contextlib.suppress(RuntimeError):
            self._store.set("acsgd/cause", text)

    def published(self) -> str | None:
        """Return the message that was printed, if any was."""
        return self._store.get("acsgd/cause").decode() if self._store.check(["acsgd/cause"]) else None


@contextlib.contextmanager
def _answering(board: FailureBoard, grace_s: float) -> Iterator[None]:
    """Answer from a thread when another rank fails, since the main thread may be waiting inside gloo."""
    finished = threading.Event()

    def watch() -> None:
        with contextlib.suppress(RuntimeError):  # the store died with its host: the main thread will notice
            while not (board.has_failed() or finished.wait(grace_s / 8)):
                pass
            board.answer()

    thread = threading.Thread(target=watch, name="failures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join(grace_s)  # a thread inside the store when Python ends would abort the process


def _settle(board: FailureBoard, report: Report, grace_s: float) -> tuple[bool, str]:
    """Return whether this rank prints the message, and the message."""
    try:
        if not board.report(report):
            _wait_for(lambda: board.published() is not None, 2 * grace_s)
            cause = board.published()  # None if the first rank died meanwhile: then print twice rather than never
            return cause is None, cause or report.text
        if report.awaited:
            _wait_for(board.all_reported, grace_s)
        return True, attribute_failure(board.reports(), board.silent(), board.rank, board.host)
    except RuntimeError:  # the store died, maybe with this host's torchrun: then the watch thread prints that instead
        time.sleep(2 * WATCH_S)
        return True, report.text


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(timeout_s / 50)


def _within(timeout_s: float, call: Callable[[], T], default: T) -> T:
    """Return what `call` returns, or `default` after a timeout: a store that is cut off never answers."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else default


def _record(text: str, launch: Launch, *, is_cause: bool = True) -> None:
    """Write the error file that torchrun's summary at the end quotes, in torch.distributed.elastic's format.

    torchrun takes the file with the smallest timestamp, in seconds, for the root cause.
    """
    if launch.error_file:
        extra = {"py_callstack": f"error: {text}", "timestamp": str(int(time.time()) + (0 if is_cause else 60))}
        with contextlib.suppress(OSError):
            Path(launch.error_file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _key(name: str, rank: int) -> str:
    return f"acsgd/{name}/{rank}"


def _print_error(text: str) -> None:
    print(f"\nerror: {text}", file=sys.stderr, flush=True)
