"""How a run ends when it cannot go on: one message for one failure, whatever the number of ranks."""

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

from acsgd.errors import RunError
from acsgd.run.signals import WATCH_S
from acsgd.topology import Store, published_host

GRACE_S = 5.0
"""Longest time for which a failure waits for what other ranks say of it. torchrun kills after 30 s, so stay below."""


@contextlib.contextmanager
def report_startup_error(rank: int, local_rank: int) -> Iterator[None]:
    """Report what keeps a run from starting, from one rank; exit with code 2.

    All ranks see the same mistake. Rank 0 tells it and exits, upon which torchrun ends the others while they
    wait here. A mistake that rank 0 does not share (a file missing on one host only) is told after the wait.
    """
    try:
        yield
    except (ValueError, RunError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise  # --help
        if rank:
            time.sleep(10.0 if local_rank == 0 else 20.0)
        if not isinstance(error, SystemExit):
            _tell(f"error: {error}")
        raise SystemExit(2) from None


@contextlib.contextmanager
def report_failure(store: Store, *, rank: int, world_size: int, timeout_s: float) -> Iterator[None]:
    """Report a failure of the running job, once, from the rank that is the first to see it; all end, with code 1.

    A rank that waited for another knows only that one, which may itself wait for a third. So each rank reports for
    whom it waited, those that still wait answer by a thread, and the first tells of the rank that does neither; or,
    if a rank has a fault of its own, that fault, with its traceback unless it is a RunError.
    timeout_s: how long ranks wait for each other (run.timeout); bounds the time for the others' reports and answers.
    """
    board = FailureBoard(store, rank, world_size)
    grace_s = min(GRACE_S, timeout_s / 4)
    try:
        with _answering(board, grace_s):
            yield
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it once one rank has ended; these end anyway
        report = Report.of(error, rank)
        limit_s = 4 * grace_s + 2 * WATCH_S
        text = _within(limit_s, lambda: _settle(board, report, grace_s), report.text)
        if text is not None:
            _tell(f"error: {text}")
            _within(grace_s, board.mark_told, None)
        sys.stdout.flush()
        os._exit(1)  # gloo's destructors would wait for collectives under way, until run.timeout


@dataclass(frozen=True)
class Report:
    """What one rank knows of a failure."""

    text: str
    awaited: tuple[int, ...]
    """As in RunError."""

    @classmethod
    def of(cls, error: Exception, rank: int) -> Report:
        """Describe an error that was raised on `rank` and is being handled."""
        if isinstance(error, RunError):
            return cls(str(error), error.awaited)
        summary = traceback.format_exception_only(error)[-1].strip()
        return cls(f"rank {rank} on {socket.gethostname()}: {summary}\n{traceback.format_exc().rstrip()}", ())


def attribute_failure(
    reports: Mapping[int, Report], silent: Collection[int], first: int, host: Callable[[int], str]
) -> str:
    """Return the message that names the culprit.

    reports: by rank; silent: ranks that neither report nor answer; first: the rank that reported first; host: gives
    the host of a rank.
    """
    faulty = [rank for rank, report in reports.items() if not report.awaited]
    if faulty:
        return reports[first if first in faulty else min(faulty)].text
    awaited = {rank for report in reports.values() for rank in report.awaited}
    if silent:
        culprits, fate = awaited.intersection(silent) or set(silent), "silent: gone, or hanging"
    else:
        culprits, fate = awaited - reports.keys(), "alive, but stuck or slower than run.timeout"
    if not culprits:
        return f"{reports[first].text}; all ranks are alive and waited: a network failed, or run.timeout is too short"
    witnesses = [rank for rank, report in reports.items() if culprits.intersection(report.awaited)] or [first]
    # whoever waited for one rank alone knows better what for than those who waited for a group
    witness = min(witnesses, key=lambda rank: (len(reports[rank].awaited), rank))
    named = " and ".join(f"rank {rank} on {host(rank)}" for rank in sorted(culprits))
    return f"{reports[witness].text}; {named} {'is' if len(culprits) == 1 else 'are'} {fate}; see its log"


class FailureBoard:
    """What the ranks of a failing run tell each other, in its store."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self._world_size = world_size
        self._store = store

    def report(self, report: Report) -> bool:
        """Show this rank's report to the others; return whether it is the first of all."""
        self._store.set(_key("failure", self.rank), json.dumps(asdict(report)))
        return self._store.add("acsgd/failures", 1) == 1

    def reports(self) -> dict[int, Report]:
        """Return what has been reported so far, by rank."""
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
        """Say that this rank is alive, or has ended well."""
        self._store.set(_key("answer", self.rank), "")

    def silent(self) -> list[int]:
        """Return the ranks that have neither reported nor answered."""
        ranks = range(self._world_size)
        quiet = [rank for rank in ranks if not self._store.check([_key("answer", rank)])]
        return [rank for rank in quiet if not self._store.check([_key("failure", rank)])]

    def host(self, rank: int) -> str:
        return published_host(self._store, rank)

    def mark_told(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set("acsgd/told", "")

    def is_told(self) -> bool:
        return self._store.check(["acsgd/told"])


@contextlib.contextmanager
def _answering(board: FailureBoard, grace_s: float) -> Iterator[None]:
    """Answer in a thread when another rank fails, since the main thread may be waiting inside gloo."""
    left = threading.Event()

    def watch() -> None:
        with contextlib.suppress(RuntimeError):  # the store died with its host: the main thread will notice
            while not (board.has_failed() or left.wait(grace_s / 8)):
                pass
            board.answer()

    thread = threading.Thread(target=watch, name="failures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join(grace_s)  # inside the store when Python ends, it would abort the process


def _settle(board: FailureBoard, report: Report, grace_s: float) -> str | None:
    """Return what this rank has to tell: None where another does."""
    try:
        if not board.report(report):
            # the first may have died meanwhile; better told twice than not at all
            return None if _wait_for(board.is_told, 2 * grace_s) else report.text
        if report.awaited:
            _wait_for(board.all_reported, grace_s)
        return attribute_failure(board.reports(), board.silent(), board.rank, board.host)
    except RuntimeError:  # the store died with its host, or with the torchrun of this process, which then tells that
        time.sleep(2 * WATCH_S)
        return report.text


def _wait_for(happened: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether something happens in time."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(timeout_s / 50)
    return True


def _within(timeout_s: float, ask: Callable[[], str | None], otherwise: str | None) -> str | None:
    """Return what `ask` returns, or `otherwise` if it takes too long: a store that is cut off never answers."""
    answers: list[str | None] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else otherwise


def _key(what: str, rank: int) -> str:
    return f"acsgd/{what}/{rank}"


def _tell(message: str) -> None:
    print(f"\n{message}", file=sys.stderr, flush=True)
