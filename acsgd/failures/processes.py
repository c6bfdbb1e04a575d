"""Processes of this host. Imports no torch, so that it can be called before slow imports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_ALL_PIDS = "pid:[4026531836]"
"""Linux: the pid namespace of a machine, of which those of containers are parts."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process, to be stored in a file that other processes read, also those of other hosts."""

    host: str
    pid: int
    machine: str
    """Boot and pid namespace: processes that see the same pids have the same value. Empty = unknown."""
    started: str
    """Start time of the process in clock ticks since boot, which distinguishes reused pids. Empty = unknown."""
    since: str
    """Local time at which this object was created. For messages only."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return a process of this host."""
        return cls(socket.gethostname(), pid, _machine(), start_time(pid), time.strftime("%Y-%m-%d %H:%M:%S"))

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return this process."""
        return cls.of(os.getpid())

    @property
    def is_in_container(self) -> bool:
        """Whether the process sees only a part of the processes of its machine, by other pids."""
        return "pid:[" in self.machine and not self.machine.endswith(_ALL_PIDS)

    def is_alive(self) -> bool | None:
        """Return whether the process exists; None if it cannot be checked from here."""
        if not self.machine or self.machine != _machine():
            return None
        if not (started := start_time(self.pid)) and _is_hidden(self.pid):
            return None
        return bool(self.started) and started == self.started

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal; return whether the process exists."""
        try:
            process = psutil.Process(self.pid)  # never signals a later process with the same pid
            if not self.is_alive():
                return False
            process.send_signal(number)
        except psutil.Error:
            return False
        return True


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if it does not exist or has ended."""
    # psutil adds the time of the boot, which moves whenever the clock is set: not the same for all who read a lease
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19] if fields[0] not in "ZX" else ""


def _is_hidden(pid: int) -> bool:
    """Return whether a process of another user exists: /proc may not show it (hidepid=1 or 2)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def find_torchrun(parent: int) -> int | None:
    """Return the pid of torchrun's agent; None if it has ended. parent: this process's parent.

    torchrun starts each rank as the leader of a new session, directly or through a profiler or a shell script. So it
    is an ancestor of this process, at most the parent of the session's leader.
    """
    session, child = os.getsid(0), os.getpid()
    with contextlib.suppress(psutil.Error):
        ancestor = psutil.Process(parent)
        for process in (ancestor, *ancestor.parents()):
            if _is_agent(process.pid):
                return process.pid
            if child == session:
                return None
            child = process.pid
    return None


def has_proc() -> bool:
    """Return whether this system shows processes in /proc."""
    return bool(start_time(os.getpid()))


def _is_agent(pid: int) -> bool:
    """Return whether a process has torchrun's name, or has loaded torch, as a script that calls torchrun's API.

    A process whose memory cannot be read is another user's, and therefore not the agent of this rank.
    """
    process = Path(f"/proc/{pid}")
    try:  # psutil's memory_maps() takes 50 ms, since it also counts the pages
        return (process / "comm").read_text().strip() == "pt_elastic" or "libtorch" in (process / "maps").read_text()
    except OSError:
        return False


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
