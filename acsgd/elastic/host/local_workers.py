"""The workers of one host, as its daemon sees them: connections over a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from acsgd.elastic.host.processes import describe
from acsgd.elastic.membership.messages import (
    Broken,
    Done,
    End,
    FromWorker,
    Hello,
    Idle,
    Leave,
    Run,
    Setup,
    SharedFiles,
    Stop,
    Stopped,
    Tick,
    ToWorker,
    View,
    from_line,
    to_line,
)
from acsgd.elastic.membership.plan import WorkerState
from acsgd.notes import print_note

log = logging.getLogger(__name__)

STOP_S = 8.0
"""Time for workers to stop, seconds; then they are killed, and torchrun starts them again."""


class WorkerEvents(Protocol):
    """What happens to the workers of a host; implemented by the daemon."""

    def on_ready(self) -> None:
        """All workers of the host are connected and have no state."""
        ...

    def on_stopped(self) -> None:
        """All workers have stopped."""
        ...

    def on_lost(self, name: str) -> None:
        """A worker has ended, and not because the run has."""
        ...

    def on_broken(self, epoch: int, reason: str) -> None:
        """A worker cannot continue in a view."""
        ...

    def on_leave(self) -> None:
        """A worker has received a stop signal."""
        ...

    def on_done(self) -> None:
        """A worker has completed the run."""
        ...

    def on_idle(self) -> None:
        """Stop signals to all ranks have ended training on a worker."""
        ...


@dataclass
class _Worker:
    """A worker that is connected."""

    name: str
    """Its number on the host and that of its connection: "1.4". A worker that torchrun starts again has another one,
    so that no view takes it for the one before, whose state it does not have."""
    hello: Hello
    writer: asyncio.StreamWriter
    state: WorkerState | None
    """None while it trains."""
    tick: Tick
    ticked_at: float
    """Time of `tick`, a time.monotonic()."""
    is_done: bool = False

    def send(self, message: ToWorker) -> None:
        with contextlib.suppress(OSError):  # its connection ends, which is noticed
            self.writer.write(to_line(message))

    def take_tick(self, tick: Tick) -> None:
        self.tick, self.ticked_at = tick, time.monotonic()

    def working_s(self, silence_s: float) -> float | None:
        """Return for how long it has worked without a wait, or been silent; None if it waits or does not train."""
        age_s = time.monotonic() - self.ticked_at
        if self.state is not None or (self.tick.is_waiting and age_s < silence_s):
            return None
        return self.tick.idle_s + age_s

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.hello.pid, signal.SIGKILL)


class LocalWorkers:
    """The connected workers of a host. The host takes part in a run while all of its workers are connected."""

    def __init__(self, events: WorkerEvents, name: str = "", secret: bytes = b"") -> None:
        """Create the table of no workers. name, secret: of the run."""
        self._events = events
        self._run, self._key = name, secret.hex()
        self._workers: dict[str, _Worker] = {}
        """By number on the host."""
        self._connections = itertools.count()
        self._server: asyncio.Server | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def listen(self, path: Path, address: str) -> None:
        """Listen at a path that only this user can open. address: of this host, in the description of its processes."""
        self._path, self._address = path, address
        self._server = await asyncio.start_unix_server(self._serve, path)
        os.chmod(path, 0o600)

    def close(self) -> None:
        """Close the server. From now on, there are no events."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()

    def _describe_processes(self) -> None:
        pids = {name: worker.hello.pid for name, worker in self._workers.items()}
        with contextlib.suppress(OSError):  # only `acsgd chaos` reads it
            describe(self._path, self.setup.run_dir, self._address, pids)

    @property
    def setup(self) -> Setup:
        """Setup of the workers, of which there is at least one."""
        return next(iter(self._workers.values())).hello.setup

    @property
    def files(self) -> SharedFiles:
        """Files of the run that other members can get; none before workers are connected."""
        return self.setup.files if self._workers else SharedFiles()

    @property
    def are_complete(self) -> bool:
        """Whether all workers of the host are connected."""
        return {worker.hello.local_world_size for worker in self._workers.values()} == {len(self._workers)}

    @property
    def states(self) -> dict[str, WorkerState] | None:
        """States of all workers by `_Worker.name`; None while any of them trains or is missing."""
        if not self.are_complete or any(worker.state is None for worker in self._workers.values()):
            return None
        return {worker.name: worker.state for worker in self._workers.values() if worker.state is not None}

    def forget_states(self) -> None:
        """Note that what the workers hold is out of date, since the run continued without them."""
        for worker in self._workers.values():
            if worker.state is not None:
                worker.state = WorkerState(store_port=worker.state.store_port, domain=worker.state.domain)

    def run(self, view: View, host_id: str, started_at: float | None = None) -> bool:
        """Let all workers train in a view; return whether it has them, and not others that have ended since.

        host_id: of this host in the view; started_at: as in `Run`, for the first of them.
        """
        names = {f"{host_id}/{worker.name}": worker for worker in self._workers.values()}
        if not self.are_complete or not names.keys() <= {*view.plan.ranks, *view.plan.spares}:
            return False
        self._cancel_deadline()
        first = next(name for name in (*view.plan.ranks, *view.plan.spares) if name in names)
        for name, worker in names.items():
            worker.state = None
            worker.take_tick(Tick(is_waiting=False, idle_s=0.0))
            worker.send(Run(view, name, self._run, self._key, started_at if name == first else None))
        return True

    def stop(self, *, at_step_end: bool) -> None:
        """Request all workers to stop; kill those that do not within STOP_S.

        at_step_end: after their step, which has no limit of its own: a step may take minutes, a save even longer.
        """
        self._cancel_deadline()
        for worker in self._workers.values():
            worker.send(Stop(at_step_end))
        if not at_step_end:
            self._deadline = asyncio.get_running_loop().call_later(STOP_S, self._kill_late)

    def end(self, error: str | None, *, is_over: bool = False) -> None:
        """Request all workers to end. error: why, if it is a failure; one of them reports it. is_over: see `End`."""
        for number, worker in enumerate(self._workers.values()):
            worker.is_done = True
            worker.send(End(error if number == 0 else None, is_over))

    def working_s(self, silence_s: float) -> float | None:
        """Return for how long all workers that do not wait have worked; None if all wait."""
        worked = [worker.working_s(silence_s) for worker in self._workers.values()]
        return min((seconds for seconds in worked if seconds is not None), default=None)

    def kill_hung(self, hang_s: float, silence_s: float) -> None:
        """Kill the workers that have worked for too long."""
        for name, worker in self._workers.items():
            seconds = worker.working_s(silence_s)
            if seconds is not None and seconds >= hang_s:
                print_note(f"worker {name} is killed: it has not moved for {seconds:.0f} s, and all others wait")
                worker.kill()

    def _kill_late(self) -> None:
        for name, worker in self._workers.items():
            if worker.state is None:
                print_note(f"worker {name} is killed: it did not stop within {STOP_S:g} s")
                worker.kill()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = None
        try:
            while line := await reader.readline():
                message = from_line(line, FromWorker)
                if isinstance(message, Hello):
                    tick = Tick(is_waiting=False, idle_s=0.0)
                    name = f"{message.name}.{next(self._connections)}"
                    worker = _Worker(name, message, writer, message.state, tick, time.monotonic())
                    self._workers[message.name] = worker
                    if self.are_complete:
                        self._describe_processes()
                        self._events.on_ready()
                elif worker is not None:
                    self._handle(worker, message)
        except asyncio.CancelledError:
            pass  # the daemon ends
        except (OSError, ValueError) as error:
            log.warning("a worker's message: %s", error)
        finally:
            writer.close()
            if worker is not None and self._workers.get(worker.hello.name) is worker:
                del self._workers[worker.hello.name]
                if not (worker.is_done or self._is_closed):
                    self._events.on_lost(worker.hello.name)

    def _handle(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case Stopped(state):
                worker.state = state
                if self.states is not None:
                    self._events.on_stopped()
            case Tick():
                worker.take_tick(message)
            case Broken(epoch, reason):
                self._events.on_broken(epoch, reason)
            case Leave():
                if self.are_complete:  # else torchrun ends this worker because another one has ended
                    self._events.on_leave()
            case Done():
                worker.is_done = True
                self._events.on_done()
            case Idle():
                self._events.on_idle()
