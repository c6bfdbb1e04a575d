"""Connections of gloo, found by the event loops of this process. Here, sockets and an epoll like those of gloo."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from acsgd.comm import connections
from acsgd.comm.connections import GlooConnections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Loop:
    """An event loop as gloo makes it for one group: a listening socket, and a connection to a peer."""

    def __init__(self, stack: ExitStack) -> None:
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.peer = stack.enter_context(socket.create_connection(self.listener.getsockname()))
        self.connection = stack.enter_context(self.listener.accept()[0])
        self._epoll = stack.enter_context(select.epoll())
        for watched in (self.listener, self.connection):
            self._epoll.register(watched)
        self.peer.settimeout(10)

    def is_shut_down(self) -> bool:
        """Return whether the connection carries nothing any more."""
        try:
            self.connection.send(b"x")
        except BrokenPipeError:
            return True
        return self.peer.recv(1) != b"x"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_connections_opened_between_construction_and_seal_are_shut_down_and_no_others(stack: ExitStack) -> None:
    earlier = Loop(stack)
    found = GlooConnections()
    groups = [Loop(stack), Loop(stack)]
    found.seal()
    later = Loop(stack)
    found.shut_down()
    assert [loop.is_shut_down() for loop in (earlier, *groups, later)] == [False, True, True, False]
    with socket.create_connection(groups[0].listener.getsockname()):
        groups[0].listener.accept()[0].close()  # the listening socket is as before


def test_connections_are_shut_down_before_seal(stack: ExitStack) -> None:
    earlier = Loop(stack)
    found = GlooConnections()
    loop = Loop(stack)
    found.shut_down()
    assert [earlier.is_shut_down(), loop.is_shut_down()] == [False, True]


def test_nothing_is_shut_down_after_close(stack: ExitStack) -> None:
    found = GlooConnections()
    loop = Loop(stack)
    found.seal()
    found.close()
    found.shut_down()
    assert not loop.is_shut_down()


def test_a_file_descriptor_that_is_used_again_is_left_alone(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    found = GlooConnections()
    loop, other = Loop(stack), Loop(stack)
    found.seal()
    read = connections._watched

    def read_and_reuse(link: str) -> list[tuple[int, int]]:
        """As `_watched`; then another thread closes the connection, and opens one that gets its number."""
        watched = read(link)
        if loop.connection.fileno() in [descriptor for descriptor, _ in watched]:
            os.dup2(reused.fileno(), loop.connection.fileno())
        return watched

    reused, far = (stack.enter_context(each) for each in tcp_pair())
    monkeypatch.setattr(connections, "_watched", read_and_reuse)
    found.shut_down()
    reused.send(b"x")
    assert far.recv(1) == b"x"
    assert other.is_shut_down()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=10)
        far, _ = server.accept()
    far.settimeout(10)
    return near, far


def test_a_group_beside_the_mesh_is_refused(stack: ExitStack) -> None:
    """One that listens at another address than the virtual address of this host."""
    Loop(stack)
    found = GlooConnections()
    found.check_address("127.88.1.2")
    Loop(stack)
    found.check_address("127.0.0.1")
    with pytest.raises(RuntimeError, match=r"listens at 127\.0\.0\.1, beside the mesh, and not at 127\.88\.1\.2"):
        found.check_address("127.88.1.2")
