"""torchrun and its workers, forked from a server that has imported everything: a host trains within a second.

The agent is torchrun's own code and starts workers as ever, with its arguments and environment. But where it would
start an interpreter, a process without threads forks: the helper of the agent, which ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from acsgd.failures.processes import start_time
from tests.lib.launched import MARGIN_S, Output
from tests.lib.processes import CONTEXT

PIDS = "pids"
"""File in the directory of a host: role, pid and start time of each of its processes, one per line."""
AGENT, HELPER, WORKER = "agent", "helper", "worker"
POLL_S = 0.01
PR_SET_PDEATHSIG = 1

Setup = Callable[[], None]
"""Function that runs first in a process, e.g. to inject a fault."""


def nothing() -> None:
    """Set up nothing."""


@dataclass(frozen=True)
class Host:
    """How a host is started."""

    arguments: list[str]
    """Of torchrun."""
    environment: Mapping[str, str]
    """Added to that of this process."""
    directory: Path
    """Current directory of all processes; their stdout, stderr and pids are written there."""
    namespace: str | None = None
    """Network namespace."""
    agent: Setup = nothing
    worker: Setup = nothing
    mounts: Setup = nothing
    """Run first in a process from which those of torchrun and of the workers are forked."""


class ForkedTorchrun(Output):
    """A running torchrun with all processes of its host."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.directory)
        for name in (PIDS, "stdout", "stderr"):
            (host.directory / name).touch()
        self._agent = CONTEXT.Process(target=_run_agent, args=(host,), daemon=True)
        self._agent.start()

    def pids(self, *roles: str) -> list[int]:
        """Return the processes with some roles, by default all, that still run."""
        lines = [line.split() for line in (self.directory / PIDS).read_text().splitlines()]
        alive = [(role, int(pid)) for role, pid, started in lines if start_time(int(pid)) == started]
        return [pid for role, pid in alive if role in (roles or (AGENT, HELPER, WORKER))]

    @property
    def workers(self) -> list[int]:
        """The workers that run."""
        return self.pids(WORKER)

    @property
    def exit_code(self) -> int | None:
        """Exit code of torchrun; minus the number of the signal that ended it; None while it runs."""
        return self._agent.exitcode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to torchrun alone, once it has begun and does not ignore it."""
        assert self._agent.pid is not None
        self.wait_until(lambda: self.exit_code is not None or self.pids(AGENT), MARGIN_S)
        send(number, [self._agent.pid])

    def kill(self) -> None:
        """End all processes at once, as a power failure does."""
        assert self._agent.pid is not None
        pids = [self._agent.pid]  # it may not have noted itself yet
        while pids:
            send(signal.SIGKILL, pids)
            time.sleep(POLL_S)
            pids = self.pids()
        self._agent.join()

    def wait(self, limit_s: float) -> int:
        """Wait for the end of torchrun, and then of its helper; return its exit code."""
        self.wait_until(lambda: self.exit_code is not None and not self.pids(HELPER), limit_s)
        assert self.exit_code is not None
        return self.exit_code


@contextlib.contextmanager
def forked_torchrun(host: Host) -> Iterator[ForkedTorchrun]:
    """Start torchrun on a host; kill all of its processes on exit."""
    run = ForkedTorchrun(host)
    try:
        yield run
    finally:
        run.kill()


def send(number: signal.Signals, pids: Sequence[int]) -> float:
    """Send a signal to processes; return the time.monotonic() just before. Those that have ended are skipped."""
    started = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return started


def _run_agent(host: Host) -> NoReturn:
    """Be torchrun of a host."""
    os.setsid()
    # with the server, which ends with the process that has started it: that of all tests
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(host.directory)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(host.directory / name, os.O_WRONLY | os.O_APPEND), number)
    if host.namespace is not None:
        from benchmarks.common.netlab import enter

        enter(host.namespace)
    host.mounts()
    os.environ.update(host.environment)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _fork_workers(theirs, host)
    theirs.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it
    _note_pid(AGENT)
    helper = _Helper(ours)
    subprocess_handler.SubprocessHandler._popen = lambda self, args, env: helper.start(args, env)  # type: ignore[method-assign,return-value,assignment]
    host.agent()
    _exit_with(lambda: torchrun.main(host.arguments))


class _Helper:
    """The agent's connection to the process that forks its workers, and is their parent.

    Requests have numbers: torchrun's signal handlers raise an exception, so the answer to one may not be read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers = connection.makefile("r")
        self._number = 0

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Worker:
        """Start a worker."""
        return Worker(self._request([list(arguments), dict(environment)]), self)

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a worker, None while it runs."""
        return self._request(pid)

    def _request(self, request: object) -> Any:
        self._number += 1
        self._connection.sendall(json.dumps([self._number, request]).encode() + b"\n")
        while True:
            number, answer = json.loads(self._answers.readline())
            if number == self._number:
                return answer


@dataclass
class Worker:
    """A worker, as torchrun uses it: the part of subprocess.Popen that it calls."""

    pid: int
    helper: _Helper
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.helper.poll(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(POLL_S)
        return code


def _fork_workers(connection: socket.socket, host: Host) -> NoReturn:
    """Serve the requests of the agent; end with it."""
    _note_pid(HELPER)
    exit_codes: dict[int, int] = {}
    for line in connection.makefile("r"):
        number, request = json.loads(line)
        if isinstance(request, int):
            if request not in exit_codes:
                ended, status = os.waitpid(request, os.WNOHANG)
                if ended:
                    exit_codes[request] = os.waitstatus_to_exitcode(status)
            answer = exit_codes.get(request)
        elif (answer := os.fork()) == 0:
            connection.close()
            _run_worker(*request, host)
        else:
            exit_codes.pop(answer, None)  # of an earlier process with this number
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(json.dumps([number, answer]).encode() + b"\n")
    os._exit(0)


def _run_worker(arguments: Sequence[str], environment: Mapping[str, str], host: Host) -> NoReturn:
    """Be a worker. arguments: python -u PROGRAM ARGUMENT..., or python -u -m MODULE ARGUMENT..."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _note_pid(WORKER)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as by -u
    run, program = (runpy.run_module, arguments[3:]) if arguments[2] == "-m" else (runpy.run_path, arguments[2:])
    sys.argv = [*program]
    host.worker()
    _exit_with(lambda: run(program[0], run_name="__main__"))


def _exit_with(function: Callable[[], Any]) -> NoReturn:
    """Run a program, and end this process as the interpreter would."""
    code = 0
    try:
        function()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _note_pid(role: str) -> None:
    with open(PIDS, "a") as file:
        file.write(f"{role} {os.getpid()} {start_time(os.getpid())}\n")
