"""Start torchrun on several hosts over ssh, show what they print, and end all of them together.

Each host runs a supervisor (see `acsgd.commands.launch.supervisor`) as the command of an ssh connection. Nothing is
started before all hosts have answered. Everything that a host prints is appended to a file of its own. The terminal
shows what the first host prints, where rank 0 is, and each error once.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Self

from acsgd.commands.launch.supervisor import BEAT_S, READY, SILENCE_S, TorchrunJob
from acsgd.errors import ReportedError, printable
from acsgd.failures.report import print_error
from acsgd.failures.signals import StopSignals
from acsgd.notes import print_note
from acsgd.versions import installed_versions

SUPERVISOR = "acsgd.commands.launch.supervisor"
BATCH_MODE = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
"""Options of ssh: no terminal, and no question that nobody would answer."""
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6")
"""Options of ssh: a connection that does not answer for 30 s has ended."""
CONNECT_S = 90.0
"""Maximum time until a host has answered, seconds: ssh, and the start of Python from a slow file system."""
OTHERS_S = 30.0
"""Time for the other hosts to end by themselves after torchrun of one has failed, seconds; then they get SIGTERM."""
SSH_FAILED = 255
"""Exit code of ssh for an error of its own. If a signal has ended it, its exit code is negative."""
AGAIN_S = 15.0
"""Time from the end of a connection to the next attempt, seconds, if the run continues without that host."""
ABSENT_S = SILENCE_S + AGAIN_S
"""Time without a connection to any host after which an elastic run counts as ended, seconds: the hosts end it, too."""
NOT_FOUND = (126, 127)
"""Exit codes of a shell that cannot start a command."""


COMPARED = {"code": "code of acsgd", "torch": "torch", "transformers": "transformers"}
"""What must be equal on all hosts, by its key in `installed_versions`; code first, on which the other keys depend."""


@dataclass(frozen=True)
class Remote:
    """How hosts are reached, and where they run torchrun."""

    ssh: str
    """Command that connects, with options."""
    directory: str
    """Working directory on the hosts."""
    python: str
    """Python on the hosts."""

    def command(self, host: str) -> list[str]:
        """Return the command that runs a supervisor on a host. The user's shell there reads what follows the host."""
        remote = f"cd {shlex.quote(self.directory)} && exec {shlex.quote(self.python)} -m {SUPERVISOR}"
        return [*shlex.split(self.ssh), *BATCH_MODE, *ALIVE, host, remote]

    def address(self, host: str) -> str:
        """Return the name or address at which ssh reaches a host: its name may be an alias of ssh's configuration."""
        try:
            shown = subprocess.run(
                [*shlex.split(self.ssh), "-G", host], capture_output=True, text=True, check=True, timeout=CONNECT_S
            ).stdout
        except (OSError, subprocess.SubprocessError):
            shown = ""
        found = re.search(r"^hostname (\S+)$", shown, re.MULTILINE)
        return found[1] if found else host.rpartition("@")[2]

    def explain(self, host: str, code: int, printed: str) -> str:
        """Return a sentence on why a host has not answered. code: exit code of ssh; printed: its last line."""
        login = shlex.join([*shlex.split(self.ssh), *BATCH_MODE[1:3], host, "true"])
        if "Host key verification failed" in printed:
            return f"{host} has a host key that ssh does not know; type {self.ssh} {host} once, and compare it"
        if "Permission denied" in printed:
            return (
                f"{host} asks for a password or a passphrase ({printed}); give it a key that needs none, with "
                f"ssh-copy-id {host}, until this works: {login}"
            )
        if code < 0 or code == SSH_FAILED:
            return f"{host} cannot be reached ({printed or 'ssh printed nothing'}); try {login}"
        if "No module named" in printed:
            return (
                f"{self.python} of {host} cannot import acsgd ({printed}); install it there, or give --python or --dir"
            )
        if code in NOT_FOUND or "cd:" in printed:
            return f"{host} has no {self.python}, or no directory {self.directory} ({printed}); give --python or --dir"
        return f"{host} ended with exit code {code} before torchrun was started ({printed or 'it printed nothing'})"


class _Event(NamedTuple):
    """A line of a host, or the end of its connection."""

    host: RemoteHost | None
    """None: a stop signal to the launcher."""
    line: str = ""
    is_error: bool = False
    """Whether the line came from stderr."""
    code: int | None = None
    """Exit code of ssh, which is that of the supervisor; None = a line."""


class RemoteHost:
    """A host and the connection to it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, events: queue.Queue[_Event]) -> None:
        self.name = name
        self.port: int | None = None
        """A free port there, once it has answered."""
        self.versions: dict[str, str] = {}
        """`installed_versions` there, once it has answered."""
        self.code: int | None = None
        """Exit code, once the connection has ended."""
        self.ended_at = math.inf
        """When the connection has ended, on `time.monotonic`."""
        self.last = ""
        """Last line from stderr."""
        self._log = log.open("a")
        self._events = events
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C must not reach ssh
        )
        threading.Thread(target=self._wait, name=f"host {name}", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended before what runs on the host."""
        return self.code is not None and (self.code < 0 or self.code == SSH_FAILED)

    def send(self, line: str) -> None:
        """Send a line; no-op if the connection has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def log(self, line: str) -> None:
        """Append a line to the log of the host."""
        self._log.write(f"{line}\n")
        self._log.flush()

    def close(self) -> None:
        """End the connection, upon which the host ends what it runs."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if self.port is None:
            self._process.terminate()  # ssh may still connect
        self._log.close()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        errors = threading.Thread(target=self._read, args=(self._process.stderr, True), daemon=True)
        errors.start()
        self._read(self._process.stdout, False)
        errors.join()
        self._events.put(_Event(self, code=self._process.wait()))

    def _read(self, stream: IO[str], is_error: bool) -> None:
        for line in stream:
            self._events.put(_Event(self, line.rstrip("\n"), is_error))


class RemoteLaunch:
    """The hosts of a run, from the first connection to the last end. A context manager that ends all connections.

    logs: directory of the log of each host. may_lack: whether the run continues without a host that ends. Then a host
    whose connection has ended is connected again, until the run ends.
    """

    def __init__(self, names: Sequence[str], remote: Remote, logs: Path, *, may_lack: bool = False) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.remote = remote
        self._logs = logs
        self._may_lack = may_lack
        self._jobs: dict[str, TorchrunJob] = {}
        self._events: queue.Queue[_Event] = queue.Queue()
        self._stops = 0
        self._shown = set[str]()
        self._beat_at = 0.0
        self._connected_at = 0.0
        self._has_ended = False
        self._signals = StopSignals(lambda code: self._events.put(_Event(None)))
        self.hosts = [self._host(name) for name in names]

    def __enter__(self) -> Self:
        self._signals.__enter__()
        self._signals.on_signal(lambda: self._events.put(_Event(None)))
        return self

    def __exit__(self, *exception: object) -> None:
        for host in self.hosts:
            host.close()
        self._signals.__exit__(None, None, None)

    def connect(self) -> None:
        """Wait until all hosts have answered. Raises ValueError with what keeps them from it, or how they differ."""
        deadline = time.monotonic() + CONNECT_S
        while waiting := [host for host in self.hosts if host.port is None and host.code is None]:
            if not self._next(deadline - time.monotonic()):
                raise ValueError(f"{_names(waiting)} did not answer in {CONNECT_S:g} s; nothing was started")
            self._check_stop()
        self._refuse_ended()
        self._refuse_other_versions()

    def _refuse_ended(self) -> None:
        ended = [self.remote.explain(host.name, host.code, host.last) for host in self.hosts if host.code is not None]
        if ended:
            raise ValueError("; ".join(["nothing was started", *ended]))

    def _refuse_other_versions(self) -> None:
        """Raise ValueError if the hosts differ in what is installed, or from this machine in acsgd."""
        first, here = self.hosts[0], installed_versions()
        for host in self.hosts:
            if host.versions.get("torch") == "none":
                raise ValueError(
                    f"nothing was started; {host.name} has no torch for {self.remote.python}; give --python or --dir"
                )
            for name, what in COMPARED.items():
                versions, place = (here, "this machine") if name == "code" else (first.versions, first.name)
                version, expected = host.versions.get(name, "unknown"), versions[name]
                if version.partition("+")[0] != expected.partition("+")[0]:  # 2.13.0+cpu works with 2.13.0+cu126
                    raise ValueError(
                        f"nothing was started; {what} differs: {version} on {host.name}, {expected} on {place}; "
                        "install the same versions, or give --python or --dir"
                    )

    def _check_stop(self) -> None:
        if self._stops:
            print_error(f"stopped by {self._signals.received} before anything was started")
            raise ReportedError(self._exit_code)

    def run(self, jobs: Sequence[TorchrunJob]) -> None:
        """Run a job on each host, until all have ended. Raises ReportedError if the run failed or was stopped."""
        while self._next(0.0):  # one that has gone since it answered
            pass
        self._check_stop()
        self._refuse_ended()
        self._jobs = {host.name: job for host, job in zip(self.hosts, jobs, strict=True)}
        for host in self.hosts:
            host.send(self._jobs[host.name].line())
        while self._is_running():
            stops, running = self._stops, self._running()
            self._next(BEAT_S)
            if time.monotonic() >= self._beat_at:
                self._beat_at = time.monotonic() + BEAT_S
                self._send({}, running)
            if self._stops > stops:
                self._send({"signal": self._signals.received}, running)
            if not self._stops:
                self._end_others()
                self._connect_again()
        if self._stops:
            raise ReportedError(self._exit_code)
        if not (any if self._may_lack else all)(host.code == 0 for host in self.hosts):
            raise ReportedError(1)

    def _is_running(self) -> bool:
        """Return whether a host runs or, for a limited time, a lost host of an elastic run may be back."""
        if self._running():
            self._connected_at = time.monotonic()
            return True
        ends = not self._may_lack or self._stops or any(host.code == 0 for host in self.hosts)
        if ends or not any(host.is_lost or host.code is None for host in self.hosts):
            return False
        if time.monotonic() < self._connected_at + ABSENT_S:
            return True
        print_error(
            f"no host could be reached for {ABSENT_S:g} s; a host that still runs torchrun stops it, which saves; "
            "the same command resumes the run"
        )
        return False

    def _end_others(self) -> None:
        """Stop, once, hosts that would wait in vain for one that has failed or, in an elastic run, has completed."""
        running = self._running()
        ended = [host for host in self.hosts if (host.code == 0 if self._may_lack else host.code)]
        if not running or not ended or self._has_ended:
            return
        others_s = 0.0 if any(host.is_lost for host in ended) else OTHERS_S
        if time.monotonic() >= min(host.ended_at for host in ended) + others_s:
            self._has_ended = True
            print_note(f"{_names(running)}: ends as well, since {_names(ended)} has ended")
            self._send({"signal": "SIGTERM"}, running)

    def _connect_again(self) -> None:
        """Connect to lost hosts of an elastic run that is not complete; each gets its job once it answers."""
        if not self._may_lack or any(host.code == 0 for host in self.hosts):
            return
        for number, host in enumerate(self.hosts):
            if host.is_lost and time.monotonic() >= host.ended_at + AGAIN_S:
                host.close()
                self.hosts[number] = self._host(host.name)

    def _running(self) -> list[RemoteHost]:
        return [host for host in self.hosts if host.port is not None and host.code is None]

    def _host(self, name: str) -> RemoteHost:
        return RemoteHost(name, self.remote.command(name), log_of(self._logs, name), self._events)

    @property
    def _exit_code(self) -> int:
        return 128 + signal.Signals[self._signals.received or "SIGINT"]

    def _send(self, message: dict[str, str | None], hosts: Sequence[RemoteHost]) -> None:
        for host in hosts:
            host.send(json.dumps(message))

    def _next(self, within_s: float) -> bool:
        """Handle the next event; return False if there is none in time."""
        try:
            event = self._events.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return False
        host = event.host
        if host is None:
            self._stops += 1
        elif event.code is not None:
            host.code, host.ended_at = event.code, time.monotonic()
            if self._jobs and not self._stops:
                self._report_end(host)
        elif host.port is None and event.line.startswith(READY):
            host.port, host.versions, host.last = *_read_answer(event.line), ""
            if self._jobs:
                print_note(f"{host.name} is back")
                host.send(self._jobs[host.name].line())
                if self._stops or self._has_ended:
                    self._send({"signal": self._signals.received or "SIGTERM"}, [host])
        else:
            host.log(event.line)
            self._show(host, event.line, event.is_error)
        return True

    def _show(self, host: RemoteHost, line: str, is_error: bool) -> None:
        if is_error and line.strip():
            host.last = printable(line.strip())
        if host.port is None or (is_error and not line):  # an empty line precedes each error
            return
        if is_error and line.startswith("error: "):
            text = line.removeprefix("error: ")
            if text not in self._shown:
                print_error(f"{host.name}: {text}")
            self._shown.add(text)
        elif self._is_shown(host, is_error):
            print(line, file=sys.stderr if is_error else sys.stdout, flush=True)

    def _is_shown(self, host: RemoteHost, is_error: bool) -> bool:
        """Return whether a line is that of rank 0, which may be on any host of an elastic run: only rank 0 prints.

        torchrun's remarks on an end are not shown.
        """
        if self._may_lack:
            return not (is_error and self._stops)
        return host is self.hosts[0] and not (is_error and (self._shown or self._stops))

    def _report_end(self, host: RemoteHost) -> None:
        """Report the end of a host that no error of its own explains."""
        if host.is_lost and host.port is None:  # it is connected again, and again
            return
        if host.is_lost:
            text = f"{host.name}: the connection has ended ({host.last or 'ssh printed nothing'})"
            if self._may_lack:
                text += f"; the run continues without it, and connects again every {AGAIN_S:g} s"
        elif host.port is None:
            text = self.remote.explain(host.name, host.code or 0, host.last)
        elif host.code and not self._shown:
            text = f"{host.name}: torchrun ended with exit code {host.code}: {host.last or 'it printed nothing'}"
        else:
            return
        print_error(text)
        self._shown.add(host.name)


def log_of(logs: Path, host: str) -> Path:
    """Return the log of a host in a directory."""
    return logs / f"host-{re.sub(r'[^A-Za-z0-9.@_*-]', '_', host)}.log"


def _read_answer(line: str) -> tuple[int, dict[str, str]]:
    """Return the port and the versions in a supervisor's first line; 0 and none if its code is of another version."""
    try:
        answer = json.loads(line.removeprefix(READY))
        return int(answer["port"]), dict(answer["versions"])
    except (ValueError, TypeError, KeyError):
        return 0, {}


def _names(hosts: Sequence[RemoteHost]) -> str:
    return ", ".join(host.name for host in hosts)
