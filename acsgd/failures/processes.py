"""Processes of this host, as /proc shows them. Imports no torch, so that it can be called before slow imports."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process, to be stored in a file that processes of other hosts read."""

    host: str
    pid: int
    machine: str
    """Boot and pid namespace: processes that see the same pids have the same value. Empty = unknown."""
    started: str
    """Start time of the process in clock ticks since boot, which distinguishes reused pids."""
    since: str
    """Local time at which this object was created. For messages only."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _machine(), start_time(pid), time.strftime("%Y-%m-%d %H:%M:%S"))

    def is_alive(self) -> bool | None:
        """Return whether the process exists; None if it cannot be checked from here."""
        if not self.machine or self.machine != _machine():
            return None
        return start_time(self.pid) == self.started


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if it does not exist or has ended."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def find_torchrun(parent: int) -> int | None:
    """Return the pid of torchrun's agent; None if it has ended. parent: this process's parent.

    torchrun starts each rank as the leader of a new session, directly or through a profiler or a shell script. So it
    is an ancestor of this process, at most the parent of the session's leader.
    """
    session, child, pid = os.getsid(0), os.getpid(), parent
    while pid > 0:
        if _is_agent(pid):
            return pid
        fields = _stat(pid)
        if child == session or not fields:
            return None
        child, pid = pid, int(fields[1])
    return None


def has_proc() -> bool:
    """Return whether this system shows processes in /proc."""
    return bool(_stat(os.getpid()))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (the state); empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _is_agent(pid: int) -> bool:
    """Return whether a process has torchrun's name, or has loaded torch, as a script that calls torchrun's API.

    A process whose memory cannot be read is another user's, and therefore not the agent of this rank.
    """
    process = Path(f"/proc/{pid}")
    try:
        return (process / "comm").read_text().strip() == "pt_elastic" or "libtorch" in (process / "maps").read_text()
    except OSError:
        return False


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
