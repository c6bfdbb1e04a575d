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
    """The connections of the groups that are opened between construction and `seal`. Linux 4.13 or newer; else none.

    Each gloo group has an event loop: an epoll instance that watches a listening socket and the connections of the
    group. Connections of others, such as those of a store or of a download, are in no such event loop.
    """

    def __init__(self) -> None:
        self._others = {listener for listener, _, _ in _event_loops()}
        self._listeners: set[int] | None = None
        """The groups' listening sockets; None before `seal`."""
        self._is_closed = False
        self._lock = threading.Lock()

    def seal(self) -> None:
        """End the time in which new event loops count as those of the groups."""
        with self._lock:
            self._listeners = {listener for listener, _, _ in _event_loops()} - self._others

    def check_address(self, address: str) -> None:
        """Raise RuntimeError if one of the groups so far listens at another address."""
        for listener, found, _ in _event_loops():
            if listener not in self._others and found != address:
                raise RuntimeError(f"a group listens at {found}, beside the mesh, and not at {address}")

    def use_congestion(self, control: str) -> None:
        """Set the congestion control of all connections of the groups, which the system has."""
        for listener, _, connections in _event_loops():
            if listener not in self._others:
                for connection in connections:
                    with contextlib.suppress(OSError):  # the peer has closed it
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())

    def shut_down(self) -> None:
        """Shut down all connections, so that peers and the threads that wait in gloo notice at once. From any thread.

        Listening sockets stay open: gloo would abort the process. Does nothing after `close`.
        """
        with self._lock:
            if self._is_closed:
                return
            for listener, _, connections in _event_loops():
                if listener not in self._others if self._listeners is None else listener in self._listeners:
                    for connection in connections:
                        with contextlib.suppress(OSError):  # the peer has closed it
                            connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Wait for a `shut_down` in another thread, and let later ones do nothing: the groups are about to go."""
        with self._lock:
            self._is_closed = True


def _event_loops() -> Iterator[tuple[int, str, list[socket.socket]]]:
    """Return each event loop with a listening socket: the inode and the address of that socket, and the connections.

    Connections are closed afterwards.
    """
    for link in _FDS.iterdir() if _FDS.is_dir() else ():
        if not _is_epoll(link):
            continue
        with contextlib.ExitStack() as stack:
            listener, address, connections = None, "", []
            for descriptor, inode in _watched(link.name):
                duplicate = _duplicate(descriptor, inode)
                if duplicate is None:
                    continue
                stack.enter_context(duplicate)
                if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listener, address = inode, duplicate.getsockname()[0]
                else:
                    connections.append(duplicate)
            if listener is not None:
                yield listener, address, connections


def _is_epoll(link: Path) -> bool:
    try:
        return os.readlink(link) == "anon_inode:[eventpoll]"
    except OSError:  # closed meanwhile
        return False


def _watched(loop: str) -> list[tuple[int, int]]:
    """Return the file descriptor and the inode of each file that an epoll instance watches."""
    try:
        lines = (_FD_INFO / loop).read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines if line.startswith("tfd:")]
    # such as "tfd:  10 events:  19 data:  7f2c  pos:0 ino:26d08 sdev:9"
    return [(int(each[1]), int(each[7].removeprefix("ino:"), 16)) for each in fields if len(each) > 7]


def _duplicate(descriptor: int, inode: int) -> socket.socket | None:
    """Return a duplicate of a TCP socket; None for any other file.

    inode: of the socket. Another thread may close the descriptor meanwhile, and open another file with its number.
    """
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    status = os.fstat(duplicate)
    if stat.S_ISSOCK(status.st_mode) and status.st_ino == inode:
        found = socket.socket(fileno=duplicate)
        if found.family in (socket.AF_INET, socket.AF_INET6):
            return found
        found.close()
    else:
        os.close(duplicate)
    return None
