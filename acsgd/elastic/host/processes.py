"""The processes of elastic runs on this machine. Each daemon describes those of its host in a file by its socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from acsgd.io.files.fields import Natural, from_json
from acsgd.launch import daemon_of


@dataclass(frozen=True)
class LocalProcess:
    """A process, also after another one has got its number."""

    pid: Natural
    started: Natural
    """When it started, clock ticks after the start of the machine."""

    @classmethod
    def of(cls, pid: int) -> LocalProcess:
        """Return a running process. Raises OSError."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return cls(pid, int(fields[19]))

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal; return whether the process is there."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if LocalProcess.of(self.pid) != self:
                return False
            signal.pidfd_send_signal(handle, number)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


@dataclass(frozen=True)
class HostProcesses:
    """The processes of one host of an elastic run."""

    run_dir: str
    """Absolute path."""
    address: str
    """host:port at which the other hosts reach it."""
    agent: LocalProcess
    """torchrun."""
    workers: dict[str, LocalProcess]
    """By number on the host."""

    def restarts_left(self) -> int:
        """Return how often torchrun will start these workers again. Raises OSError if they have ended."""
        environment = _environment(next(iter(self.workers.values())).pid)
        return int(environment["TORCHELASTIC_MAX_RESTARTS"]) - int(environment["TORCHELASTIC_RESTART_COUNT"])


def describe(socket: Path, run_dir: str, address: str, workers: Mapping[str, int]) -> None:
    """Describe the processes of a host, of which this one is the agent.

    socket: of its daemon; workers: pids by number on the host. Raises OSError, also if a worker has ended.
    """
    processes = {name: LocalProcess.of(pid) for name, pid in workers.items()}
    host = HostProcesses(str(Path(run_dir).resolve()), address, LocalProcess.of(os.getpid()), processes)
    unfinished = socket.with_suffix(".new")
    unfinished.write_text(json.dumps(asdict(host)))
    unfinished.replace(_description(socket))


def find_hosts(run_dir: Path) -> list[HostProcesses]:
    """Return the hosts of a run that are on this machine and belong to this user, by address."""
    hosts = []
    for socket in _sockets():
        with contextlib.suppress(OSError, ValueError):  # the host ends, or has no workers yet
            host = from_json(HostProcesses, json.loads(_description(socket).read_bytes()))
            if host.run_dir == str(run_dir.resolve()):
                hosts.append(host)
    return sorted(hosts, key=lambda host: host.address)


def _sockets() -> set[Path]:
    """Return the sockets of all daemons with workers on this machine."""
    sockets = set()
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if socket := daemon_of(_environment(int(directory.name))):
                    sockets.add(Path(socket))
    return sockets


def _environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started. Raises OSError."""
    entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)


def _description(socket: Path) -> Path:
    return socket.with_suffix(".json")
