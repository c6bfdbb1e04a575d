"""The processes of elastic runs on this machine. Each daemon describes those of its host in a file by its socket."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from acsgd.failures.processes import ProcessIdentity
from acsgd.io.files.fields import from_json
from acsgd.launch import daemon_of


@dataclass(frozen=True)
class HostProcesses:
    """The processes of one host of an elastic run."""

    run_dir: str
    """Absolute path."""
    address: str
    """host:port at which the other hosts reach it."""
    agent: ProcessIdentity
    """torchrun."""
    workers: dict[str, ProcessIdentity]
    """By number on the host."""

    def restarts_left(self) -> int:
        """Return how often torchrun will start these workers again. Raises psutil.Error if they have ended."""
        environment = psutil.Process(next(iter(self.workers.values())).pid).environ()
        return int(environment["TORCHELASTIC_MAX_RESTARTS"]) - int(environment["TORCHELASTIC_RESTART_COUNT"])


def started_at() -> float:
    """Return when this process was started, maybe as another program that it has replaced; a time.monotonic()."""
    return time.monotonic() - (time.time() - psutil.Process().create_time())


def describe(socket: Path, run_dir: str, address: str, workers: Mapping[str, int]) -> None:
    """Describe the processes of a host, of which this one is the agent.

    socket: of its daemon; workers: pids by number on the host. Raises OSError.
    """
    processes = {name: ProcessIdentity.of(pid) for name, pid in workers.items()}
    host = HostProcesses(str(Path(run_dir).resolve()), address, ProcessIdentity.current(), processes)
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
    environments = (process.info["environ"] or {} for process in psutil.process_iter(["environ"]))  # None: not readable
    return {Path(socket) for environment in environments if (socket := daemon_of(environment))}


def _description(socket: Path) -> Path:
    return socket.with_suffix(".json")
