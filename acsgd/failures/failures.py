"""Failure reports: one message per failure, whatever the number of ranks."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from acsgd.comm.liveness import FAILURES
from acsgd.comm.store import CallThread, Store, StoreClient, StoreError
from acsgd.errors import BEFORE_TRAINING, IN_TRAINING, RefusedError, ReportedError, RunError
from acsgd.failures.report import is_first_of_host, message_of, print_error, record_error
from acsgd.failures.signals import WATCH_S, StopSignals
from acsgd.groups import STORE_TIMEOUT_S
from acsgd.launch import Launch, forbid_restart

GRACE_S = 5.0
"""Upper limit, seconds, for one wait for other ranks' reports. torchrun kills after 30 s: all waits must fit in."""
_CAUSE = "acsgd/cause"
_OUTCOME = "acsgd/set-up"
_STEPS = "steps"
"""Outcome of the set-up of all ranks: they train. Any other outcome is the name of the stop signal that came first."""
POLL_S = 0.25
"""Seconds between two reads of the store while no rank has failed; one read takes about 0.1 ms."""


@dataclass
class RunContext:
    """What a failure report needs to know about the run; completed while the run starts."""

    run_dir: Path | None = None
    """Run directory; None until it is known."""
    timeout_s: float = 4 * GRACE_S
    """Limit of one communication (run.timeout); bounds the waits for reports and answers."""
    cleanup: Callable[[], None] = lambda: None
    """Called, for a limited time, after a failure is reported and before the process ends."""
    is_training: bool = False
    """Whether all ranks have finished their set-up."""
    signals: StopSignals | None = None
    """Stop signals of this rank. Until `end_set_up`, they end all ranks; from then on, the caller handles them."""
    decide: Callable[[str], str] = lambda outcome: outcome
    """Proposes the outcome of the set-up of all ranks, and returns that of the first rank that has proposed one."""

    @property
    def grace_s(self) -> float:
        """Upper limit of one wait, seconds."""
        return min(GRACE_S, self.timeout_s / 4)

    @property
    def exit_code(self) -> int:
        """Exit code of a failure at this time."""
        return IN_TRAINING if self.is_training else BEFORE_TRAINING

    def start_training(self) -> None:
        """Note that all ranks have finished their set-up."""
        self.is_training = True

    def end_set_up(self) -> None:
        """Leave stop signals to the caller from now on. All ranks have finished their set-up.

        If one came before, on any rank, this does not return: the thread that answers for this rank ends the process.
        """
        if self.decide(_STEPS) != _STEPS:
            time.sleep(2 * GRACE_S)
            raise RunError("another rank was stopped during the set-up")


@contextlib.contextmanager
def report_failure(store: Store, launch: Launch, end: Callable[[int], None]) -> Iterator[RunContext]:
    """Print an exception raised in the context, on one rank; end all ranks. Raises ReportedError instead.

    Before training, an error of one rank ends all others, which may wait for it. In training, a rank that waited for
    a peer knows only that peer, which may itself wait for a third. So each rank reports to the store for which ranks
    it waited, a thread of each rank that still runs answers, and the rank that failed first prints the error of the
    rank that does neither. An error that is no wait for a peer takes precedence over waits.
    store: a connection that nothing else uses, since calls of others may wait. end: ends the process with an exit code,
    from a thread, while the main thread may be waiting inside gloo.
    """
    client = StoreClient(store, CallThread("failures"), timeout_s=STORE_TIMEOUT_S)
    board = FailureBoard(client, launch.rank, launch.world_size)
    context = RunContext(decide=board.decide)
    try:
        with _answering(board, launch, context, end):
            yield context
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a Rust extension that panics raises a BaseException
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first rank ends; this one ends, too
        report = FailureReport.of(error, launch, context)
        board = FailureBoard(client.with_timeout(context.grace_s), launch.rank, launch.world_size)
        with contextlib.suppress(StoreError):  # a rank that a stop signal ends first leaves connections that fail here
            if (name := board.stop_signal()) is not None:
                _end_by_signal(name, launch, context, end)
        is_printer, text = _settle(board, report, context, launch)
        record_error(text, launch, is_cause=is_printer)
        if is_printer:
            print_error(text)
            with contextlib.suppress(StoreError):
                board.publish(text)
                if not (context.is_training or launch.is_one_host):  # the store may end with this rank's host
                    _wait_for(lambda: not board.silent(), context.grace_s)
        _clean_up(context)
        raise ReportedError(BEFORE_TRAINING if isinstance(error, RefusedError) else context.exit_code) from error


@dataclass(frozen=True)
class FailureReport:
    """What one rank knows about a failure."""

    text: str
    awaited: tuple[int, ...]
    """Ranks this rank waited for in vain, as in RunError."""

    @classmethod
    def of(cls, error: BaseException, launch: Launch, context: RunContext) -> FailureReport:
        """Describe an exception that was raised on this rank."""
        text = message_of(error, launch, context.run_dir, checks_input=not context.is_training)
        return cls(text, error.awaited if isinstance(error, RunError) else ())


def attribute_failure(
    reports: Mapping[int, FailureReport], silent: Collection[int], first: int, host: Callable[[int], str]
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
        return _describe_network(reports, first, host)
    witnesses = [rank for rank, report in reports.items() if culprits.intersection(report.awaited)] or [first]
    # a rank that waited for one peer has the more specific message than one that waited for a group
    witness = min(witnesses, key=lambda rank: (len(reports[rank].awaited), rank))
    names = " and ".join(f"rank {rank} on {host(rank)}" for rank in sorted(culprits))
    return f"{reports[witness].text}; {names} {'is' if len(culprits) == 1 else 'are'} {state}; see its log"


def _describe_network(reports: Mapping[int, FailureReport], first: int, host: Callable[[int], str]) -> str:
    """Return the message where all ranks are alive: the link between the only two that wait for each other has failed.

    Others may wait for a rank that relays their messages, and that waits itself. See `attribute_failure`.
    """
    pairs = [
        (rank, other)
        for rank, report in reports.items()
        for other in report.awaited
        if rank < other and rank in reports[other].awaited
    ]
    where, what = reports[first].text, "the network"
    if len(pairs) == 1:
        ((rank, other),) = pairs
        where, what = reports[rank].text, f"the network between {host(rank)} and rank {other} on {host(other)}"
    return f"{where}; all ranks are alive: {what} failed, or run.timeout is too short"


class FailureBoard:
    """Failure reports of all ranks, in the store of the run. Every method may raise StoreError."""

    def __init__(self, store: StoreClient, rank: int, world_size: int) -> None:
        self.rank = rank
        self._world_size = world_size
        self._store = store
        self._outcome: str | None = None
        """That of the set-up of all ranks; None until it is known here."""

    def report(self, report: FailureReport) -> bool:
        """Store this rank's report; return whether it is the first of all."""
        self._store.set(_key("failure", self.rank), json.dumps(asdict(report)))
        return self._store.add(FAILURES, 1) == 1

    def reports(self) -> dict[int, FailureReport]:
        """Return the reports so far, by rank."""
        found = {}
        for rank in range(self._world_size):
            if self._store.has(_key("failure", rank)):
                fields = json.loads(self._store.get(_key("failure", rank)))
                found[rank] = FailureReport(fields["text"], tuple(fields["awaited"]))
        return found

    def all_reported(self) -> bool:
        return self._store.add(FAILURES, 0) == self._world_size

    def has_failed(self) -> bool:
        return self._store.has(FAILURES)

    def decide(self, outcome: str) -> str:
        """Propose the outcome of the set-up of all ranks; return that of the first rank that has proposed one."""
        return self._store.set_once(_OUTCOME, outcome)

    def stop_signal(self) -> str | None:
        """Return the stop signal that ends the set-up of all ranks; None if there is none."""
        if self._outcome is None and self._store.has(_OUTCOME):
            self._outcome = self._store.get(_OUTCOME)  # for good
        return self._outcome if self._outcome != _STEPS else None

    def answer(self) -> None:
        """Record that this rank is alive, or has finished."""
        self._store.set(_key("answer", self.rank), "")

    def silent(self) -> list[int]:
        """Return the ranks that have neither reported nor answered."""
        ranks = range(self._world_size)
        unanswered = [rank for rank in ranks if not self._store.has(_key("answer", rank))]
        return [rank for rank in unanswered if not self._store.has(_key("failure", rank))]

    def publish_host(self) -> None:
        """Store this rank's host name, for messages of other ranks."""
        self._store.set(_key("host", self.rank), socket.gethostname())

    def host(self, rank: int) -> str:
        """Return a rank's host name."""
        key = _key("host", rank)
        return self._store.get(key) if self._store.has(key) else "an unknown host"

    def publish(self, text: str) -> None:
        """Store the message that was printed."""
        self._store.set(_CAUSE, text)

    def published(self) -> str | None:
        """Return the message that was printed, if any was."""
        return self._store.get(_CAUSE) if self._store.has(_CAUSE) else None


@contextlib.contextmanager
def _answering(board: FailureBoard, launch: Launch, context: RunContext, end: Callable[[int], None]) -> Iterator[None]:
    """Answer from a thread when another rank fails, since the main thread may be waiting inside gloo.

    Before training, the thread then ends the process, unless the main thread fails as well. It also ends the process
    when this or another rank gets a stop signal during the set-up, whatever the main thread does.
    """
    finished = threading.Event()

    def watch() -> None:
        with contextlib.suppress(StoreError):  # the main thread will notice
            board.publish_host()
            while not (finished.wait(POLL_S) or board.has_failed()):
                if context.signals is not None and context.signals.received is not None:
                    board.decide(context.signals.received)
                if (name := board.stop_signal()) is not None:
                    _end_by_signal(name, launch, context, end)
            board.answer()
            if not context.is_training:
                _wait_for(lambda: finished.is_set() or board.published() is not None, 2 * context.grace_s)
                if not finished.is_set():
                    _report_cause(board, launch)
                    _clean_up(context)
                    end(context.exit_code)

    thread = threading.Thread(target=watch, name="failures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join(context.grace_s)  # a thread inside the store when Python ends would abort the process


def _end_by_signal(name: str, launch: Launch, context: RunContext, end: Callable[[int], None]) -> None:
    """End this process, since a stop signal ends all ranks during their set-up, or a command with nothing to save."""
    has_steps = context.run_dir is not None and not context.is_training
    when = " before the first step, after which there is something to save" if has_steps else ""
    text = f"stopped by {name}{when}; start the same command again"
    record_error(text, launch)
    forbid_restart()
    if launch.rank == launch.local_rank == 0:
        print_error(text)
    _clean_up(context)
    end(128 + signal.Signals[name])


def _report_cause(board: FailureBoard, launch: Launch) -> None:
    """Record the failure of another rank; print its error if that rank could not."""
    cause = board.published()
    text = cause or "; ".join(report.text for report in board.reports().values())
    record_error(text, launch, is_cause=cause is None)
    if cause is None:
        print_error(text)


def _clean_up(context: RunContext) -> None:
    _within(context.grace_s, context.cleanup)
    sys.stdout.flush()


def _settle(board: FailureBoard, report: FailureReport, context: RunContext, launch: Launch) -> tuple[bool, str]:
    """Return whether this rank prints the message, and the message. If the store is gone, one rank per host prints.

    In an elastic run, each host is a run of its own, whose workers share no store.
    """
    if launch.daemon:
        return is_first_of_host(launch), report.text
    try:
        if not board.report(report):
            _wait_for(lambda: board.published() is not None, 2 * context.grace_s)
            cause = board.published()  # None if the first rank died meanwhile: then print twice rather than never
            return cause is None, cause or report.text
        if report.awaited:
            _wait_for(board.all_reported, context.grace_s)
        return True, attribute_failure(board.reports(), board.silent(), board.rank, board.host)
    except StoreError:  # maybe this host's torchrun has died: then the watch thread prints that instead
        time.sleep(2 * WATCH_S)
        return is_first_of_host(launch), report.text


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(timeout_s / 50)


def _within(timeout_s: float, call: Callable[[], None]) -> None:
    """Call a function; return after a timeout even if it still runs, such as on a file system that is cut off."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)


def _key(name: str, rank: int) -> str:
    return f"acsgd/{name}/{rank}"
