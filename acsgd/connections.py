"""The TCP connections of gloo in this process, which torch does not give access to."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

_FDS = Path("/proc/self/fd")
_FD_INFO = Path("/proc/self/fdinfo")


class GlooConnections:
    """The connections of the groups that are opened between construction and `seal`. Linux only; elsewhere none.

    Each gloo group has an event loop: an epoll instance that watches a listening socket and the connections of the
    group. Connections of others, such as those of a store or of a download, are in no such event loop.
    """

    def __init__(self) -> None:
        self._others = {listener for listener, _ in _event_loops()}
        self._listeners: set[str] | None = None
        """Names of the groups' listening sockets; None before `seal`."""
        self._lock = threading.Lock()

    def seal(self) -> None:
        """End the time in which new event loops count as those of the groups."""
        with self._lock:
            self._listeners = {listener for listener, _ in _event_loops()} - self._others

    def shut_down(self) -> None:
        """Shut down all connections, so that peers and the threads that wait in gloo notice at once. From any thread.

        Listening sockets stay open: gloo would abort the process.
        """
        with self._lock:
            for listener, connections in _event_loops():
                if listener not in self._others if self._listeners is None else listener in self._listeners:
                    for connection in connections:
                        with contextlib.suppress(OSError):  # the peer has closed it
                            connection.shutdown(socket.SHUT_RDWR)


def _event_loops() -> Iterator[tuple[str, list[socket.socket]]]:
    """Return each event loop with a listening socket: the name of that socket, and the connections.

    The name is unique, unlike the number of a file descriptor, which is used again. Connections are closed afterwards.
    """
    for link in _FDS.iterdir() if _FDS.is_dir() else ():
        if _target(link.name) != "anon_inode:[eventpoll]":
            continue
        with contextlib.ExitStack() as stack:
            listener, connections = "", []
            for descriptor in _watched(link.name):
                name = _target(descriptor)
                duplicate = _duplicate(descriptor)
                if duplicate is None:
                    continue
                stack.enter_context(duplicate)
                if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listener = name
                else:
                    connections.append(duplicate)
            if listener:
                yield listener, connections


def _target(descriptor: str) -> str:
    """Return what a file descriptor refers to, such as "socket:[1234]"; empty if it was closed meanwhile."""
    try:
        return os.readlink(_FDS / descriptor)
    except OSError:
        return ""


def _watched(loop: str) -> list[str]:
    """Return the file descriptors that an epoll instance watches."""
    try:
        lines = (_FD_INFO / loop).read_text().splitlines()
    except OSError:
        return []
    return [line.split()[1] for line in lines if line.startswith("tfd:")]  # as in "tfd:       10 events:       19 ..."


def _duplicate(descriptor: str) -> socket.socket | None:
    """Return a duplicate of a TCP socket; None for any other file."""
    try:
        duplicate = os.dup(int(descriptor))
    except OSError:
        return None
    if stat.S_ISSOCK(os.fstat(duplicate).st_mode):
        found = socket.socket(fileno=duplicate)
        if found.family in (socket.AF_INET, socket.AF_INET6):
            return found
        found.close()
    else:
        os.close(duplicate)
    return None
