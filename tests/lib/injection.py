"""Faults that a process of an elastic run inflicts on itself at an exact point, and a trace of what it does.

Each is a callable that patches the process in which it runs first: see `agent` and `worker` of `Hosts.start`. Files are
in the parent of the directory of the host.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acsgd.comm import host_links
from acsgd.elastic import worker
from acsgd.elastic.control import Control
from acsgd.elastic.host.register import DiskRegister
from acsgd.elastic.host.transport import Connections
from acsgd.elastic.membership.messages import Decided, Hello, Prepare, View, VoteRequest
from acsgd.elastic.membership.views import Membership
from acsgd.elastic.state import handover
from acsgd.elastic.state.transfer import HeldLayers
from acsgd.elastic.view_resources import ViewLock
from acsgd.groups import Groups
from acsgd.io.checkpoint import saver
from acsgd.optim.adamw import AdamWOptimizer
from acsgd.run.plan.transports import Endpoint
from acsgd.run.report import Gather, StepExchange
from acsgd.run.session import Session
from acsgd.run.setup import build, measured
from acsgd.run.step.hooks import LoopState
from tests.lib.forked_torchrun import PIDS, Setup
from tests.lib.ordered import ordered_transport

FAULTS, TRACE, RETURNS = "faults", "trace", "returns"
"""Files with the time and the dead host of each fault, and with what workers do: see `trace`."""

Hit = Callable[[], None]


@dataclass(frozen=True)
class Death:
    """A process kills itself, or its whole host, when it reaches a point.

    point: key of WORKER_POINTS or AGENT_POINTS; call: how often it must get there; view: first view that counts;
    once: name of a file: of all processes with this fault, only the first one that gets there dies.
    """

    point: str
    call: int = 1
    view: int = 0
    whole_host: bool = True
    once: str | None = None

    def __call__(self) -> None:
        calls = 0

        def hit() -> None:
            nonlocal calls
            calls += _epoch >= self.view
            if calls == self.call and (self.once is None or _is_first(Path("..", self.once))):
                die(whole_host=self.whole_host)

        (WORKER_POINTS | AGENT_POINTS)[self.point](hit)


def die(*, whole_host: bool) -> None:
    """Kill this process, or all processes of its host."""
    note_fault(Path.cwd().name if whole_host else None)
    if whole_host:
        for line in Path(PIDS).read_text().splitlines():
            if (pid := int(line.split()[1])) != os.getpid():
                _kill(pid)
    _kill(os.getpid())


def note_fault(host: str | None = None) -> None:
    """Note the time of a fault. host: which dies of it."""
    _append(FAULTS, f"{time.monotonic()} {host}")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_first(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _append(name: str, line: str) -> None:
    """Add a line to a file that other processes write, too."""
    descriptor = os.open(Path("..", name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


# The view in which a worker is, or to which an agent belongs.

_epoch = 0


def _note_view(view: View) -> None:
    global _epoch
    _epoch = view.epoch
    if view.plan.origin != "memory":
        _append(RETURNS, str(_epoch))


def _before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Call a function with the arguments of another one before each call of that one."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def _after(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Call a function with the arguments of another one after each call of that one."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call(*args, **kwargs)
        return result

    setattr(owner, name, patched)


# Points of a worker.


def trace() -> None:
    """Trace the steps of a worker, a line for each, with the fields of scenes.TracedStep.

    A second file has the epochs of views that return to an earlier step, or of which a rank repeats some.
    """

    def step(state: LoopState, result: Any, *, is_synced: bool) -> None:
        if is_synced:
            files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident = pages * os.sysconf("SC_PAGE_SIZE")
            fields = (_epoch, os.getpid(), result.progress.step, files, threads, resident)
            _append(TRACE, " ".join(map(str, fields)))

    _before(worker.ElasticWorker, "_run_view", lambda self, run, *rest: _note_view(run.view))
    _after(LoopState, "complete", step)


def _row_sent_to_one(hit: Hit) -> None:
    """The report of a step has been sent to one other rank."""

    original = Gather.rows

    def rows(gather: Gather, mine: Any) -> Any:
        first = gather._rounds[0]
        for message in first.sent[:1]:
            gather._of(message.ranks).copy_(mine)
            gather._wait(gather._send(message))
            hit()
        gather._rounds[0] = first._replace(sent=first.sent[1:])  # the other rank has it
        return original(gather, mine)

    Gather.rows = rows  # type: ignore[method-assign]


def _in_update(hit: Hit) -> None:
    """Matrices are updated, vectors are not."""
    update = AdamWOptimizer._update

    def in_two_parts(self: AdamWOptimizer, *args: Any) -> None:
        groups = self._optimizer.param_groups
        for group in groups:
            self._optimizer.param_groups = [group]
            update(self, *args)
            if group is groups[0]:
                hit()
        self._optimizer.param_groups = groups

    AdamWOptimizer._update = in_two_parts  # type: ignore[method-assign]


def _announced_store(hit: Hit) -> None:
    """This worker becomes rank 0 of a view, whose store the others connect to."""
    _before(worker.ElasticWorker, "_train", lambda self, run, rank, *rest: hit() if rank == 0 else None)


def _in_transfer(owner: Any, name: str) -> Callable[[Hit], None]:
    """Return the point in the middle of sending or receiving state by a function."""

    def point(hit: Hit) -> None:
        transfer = getattr(owner, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            waits = next(each for each in args if isinstance(each, Groups)).waits
            calls, wait = 0, waits.wait

            def counted(work: Any) -> None:
                nonlocal calls
                wait(work)
                calls += 1
                if calls == 4:
                    hit()

            waits.wait = counted
            return transfer(*args, **kwargs)

        setattr(owner, name, patched)

    return point


def _hello(place: Callable[..., None]) -> Callable[[Hit], None]:
    return lambda hit: place(Control, "send", lambda self, message: hit() if isinstance(message, Hello) else None)


WORKER_POINTS: dict[str, Callable[[Hit], None]] = {
    "inputs are open": _hello(_before),
    "asks to join": _hello(_after),
    "has a rank": lambda hit: _before(worker.ElasticWorker, "_train", lambda *_: hit()),
    "groups are formed": lambda hit: _before(ViewLock, "of", lambda *_: hit()),
    "gradients ready": lambda hit: _before(StepExchange, "exchange", lambda *_: hit()),
    "row sent to one": _row_sent_to_one,
    "all rows sent": lambda hit: _after(Gather, "rows", lambda *_: hit()),
    "in the update": _in_update,
    "new rank 0 with its store": _announced_store,
    "sends state": _in_transfer(HeldLayers, "send"),
    "receives state": _in_transfer(handover, "receive_layers"),
    "evaluates": lambda hit: _before(Session, "evaluate", lambda *_: hit()),
}


# Points of an agent.


def _sent(kind: type[Prepare] | type[Decided]) -> Callable[[Hit], None]:
    """Return the point at which a message of the second or a later view has been sent to another host."""

    def point(hit: Hit) -> None:
        send = Connections.send

        async def patched(self: Connections, address: str, message: Any, host_id: str | None) -> None:
            await send(self, address, message, host_id)
            view = getattr(message, "base", None) or getattr(message, "view", None)
            if isinstance(message, kind) and view is not None:
                _note_view(view)
                hit()

        Connections.send = patched  # type: ignore[method-assign]

    return point


def _recorded(hit: Hit) -> None:
    """The next view is recorded, and no other host knows it."""

    def call(membership: Membership, view: View, now: float) -> None:
        _note_view(view)
        hit()

    _before(Membership, "recorded", call)


AGENT_POINTS: dict[str, Callable[[Hit], None]] = {
    "has proposed a view": _sent(Prepare),
    "has recorded a view": _recorded,
    "has announced a view to one": _sent(Decided),
}


# Other faults of a worker, or of an agent.


@dataclass(frozen=True)
class Pace:
    """Each step takes longer.

    seconds: added to each; factor: of what it takes; sleep_at: step in which the main thread sleeps for ever, None = in
    no step; once: as for `Death`.
    """

    seconds: float = 0.0
    factor: float = 1.0
    sleep_at: int | None = None
    once: str = "slept"

    def __call__(self) -> None:
        original, calls = Session.forward_backward, 0

        def patched(session: Session, *args: Any) -> Any:
            nonlocal calls
            started = time.monotonic()
            loss = original(session, *args)
            taken, calls = time.monotonic() - started, calls + 1
            time.sleep(self.seconds + (self.factor - 1) * taken)
            if calls == self.sleep_at and _is_first(Path("..", self.once)):
                note_fault()
                time.sleep(1e6)
            return loss

        Session.forward_backward = patched  # type: ignore[method-assign]


@dataclass(frozen=True)
class OverOrderedTransport:
    """Each worker is taken to have a GPU, and tensors of the device travel over a transport that has the semantics of
    NCCL; measured between hosts, it is taken to be faster."""

    def __call__(self) -> None:
        measured.endpoint_of = lambda _: Endpoint(f"host {os.getppid()}", f"gpu {os.getpid()}", "2")
        measured.NCCL = build.NCCL = ordered_transport(os.getpid())
        host_links.ADVANTAGE = 0.0


@dataclass(frozen=True)
class SlowDisk:
    """Each fsync takes longer."""

    seconds: float

    def __call__(self) -> None:
        _before(os, "fsync", lambda descriptor: time.sleep(self.seconds))


@dataclass(frozen=True)
class FullDisk:
    """No layer of a checkpoint can be written."""

    def __call__(self) -> None:
        _before(saver, "write_layer", self._fail)

    def _fail(self, directory: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


@dataclass(frozen=True)
class NoRegister:
    """Views cannot be recorded while a file exists."""

    name: str

    def __call__(self) -> None:
        path = Path("..", self.name).resolve()

        def check(register: DiskRegister, request: VoteRequest) -> None:
            if path.exists():
                raise OSError(5, "the file server does not answer")

        _before(DiskRegister, "answer", check)


@dataclass(frozen=True)
class All:
    """Several of these, one after another."""

    setups: tuple[Setup, ...]

    def __call__(self) -> None:
        for setup in self.setups:
            setup()
