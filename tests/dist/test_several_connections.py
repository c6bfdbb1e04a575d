"""Laws of run.connections and run.congestion: messages take turns on several connections, of the given control."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lib.ranks import on_ranks

from acsgd.comm import connections as gloo
from acsgd.errors import ConnectError
from acsgd.groups import Groups, connect
from acsgd.topology import Topology

TIMEOUT, COUNT, MESSAGES = timedelta(seconds=60), 3, 7


@contextlib.contextmanager
def opened(rank: int, store: Path, **options: Any) -> Iterator[Groups]:
    """Connect two stages."""
    files = dist.FileStore(str(store), 2)
    with connect(Topology.of(rank, 2, 2), timeout=TIMEOUT, store=files, **options) as groups:
        yield groups


def exchange(rank: int, world_size: int, store: Path) -> None:
    with opened(rank, store, connections=COUNT, congestion="reno") as groups:
        group = groups.pp
        of_turn = [group.process_group, *group.more]
        assert group.connections == len({*of_turn}) == COUNT
        for operation, start in ("isend", group.isend), ("irecv", group.irecv):
            with mock.patch.object(dist, operation, wraps=getattr(dist, operation)) as spy:
                buffers = [torch.full((1000,), float(number)) for number in range(MESSAGES)]
                if (operation == "isend") == (rank == 0):
                    works = [start(buffer, 1 - rank, 5) for buffer in buffers]
                    for work in works:
                        groups.waits.wait(work)
                    used = [call.args[2] for call in spy.call_args_list]
                    assert used == [of_turn[number % COUNT] for number in range(MESSAGES)]
        controls = {
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
            for _, _, connections in gloo._event_loops()
            for connection in connections
        }
        assert controls == {b"reno"}
        received = torch.zeros(4)
        work = group.irecv(received, 0) if rank else group.isend(torch.arange(4.0), 1)
        groups.waits.wait(work)
        assert received.tolist() == [0, 1, 2, 3] or rank == 0


def refused(rank: int, world_size: int, store: Path) -> list[str]:
    found = []
    for number, options in enumerate(({"connections": 1 + rank}, {"congestion": "unknown"})):
        try:
            with opened(rank, store.with_name(f"{store.name}-{number}"), **options):
                found.append("")
        except ConnectError as error:
            found.append(str(error))
    return found


def test_messages_take_turns_on_connections_of_the_given_control(tmp_path: Path) -> None:
    on_ranks(2, exchange, tmp_path / "store")


def test_connections_that_differ_and_an_unknown_control_are_refused(tmp_path: Path) -> None:
    for differ, unknown in on_ranks(2, refused, tmp_path / "store"):
        assert differ.startswith("ranks differ in run.connections: 1, 2")
        assert unknown.startswith("run.congestion=unknown on")
        assert "reno" in unknown
