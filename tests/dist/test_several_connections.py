"""Laws of run.connections and run.congestion: messages take turns on several connections, of the given control."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks

from acsgd.comm import connections as gloo
from acsgd.comm.waits import Meter
from acsgd.dp.peers import Peers
from acsgd.errors import ConnectError, RunError
from acsgd.groups import Groups, connect
from acsgd.topology import Topology

TIMEOUT, COUNT, MESSAGES = timedelta(seconds=60), 3, 7
LENGTHS = ((1, 1), (2, 2), (0, 9), (1, 1024), (2, 1024), (3, 1024), (4, 1024), (1000, 1024), (1024, 1024))
"""Bytes of messages between replicas, and how many a replica expects at most."""


@contextlib.contextmanager
def opened(rank: int, store: Path, stages: int = 2, **options: Any) -> Iterator[Groups]:
    """Connect two stages, or two replicas."""
    files = dist.FileStore(str(store), 2)
    with connect(Topology.of(rank, 2, stages), timeout=TIMEOUT, store=files, **options) as groups:
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


def exchange_updates(rank: int, world_size: int, store: Path) -> None:
    with opened(rank, store, stages=1, connections=COUNT) as groups:
        peers, meter = Peers(groups.dp, groups.waits), Meter()
        of_turn = itertools.cycle([groups.dp.process_group, *groups.dp.more])
        for number, (length, longest) in enumerate(LENGTHS):
            of_rank = [torch.arange(start, start + length).to(torch.uint8) for start in (number, number + 100)]
            with mock.patch.object(dist, "isend", wraps=dist.isend) as spy:
                received = peers.exchange({1 - rank: of_rank[rank]}, {1 - rank: longest}, meter)
            assert torch.equal(received[1 - rank], of_rank[1 - rank])
            assert [call.args[2] for call in spy.call_args_list] == [*itertools.islice(of_turn, 1 + COUNT)]
            header, *parts = (call.args[0].numel() for call in spy.call_args_list)
            assert header == 16
            assert sum(parts) == length
            assert max(parts) - min(parts) <= 1
        assert meter.sent_bytes == sum(length + 16 for length, _ in LENGTHS)
        if rank:
            peers.abort()
        else:
            with pytest.raises(RunError, match=r"replica 1 \(rank 1\) has failed; see its own error"):
                peers.exchange({1: of_rank[0]}, {1: 1024}, meter)
        groups.wait_for_all("the end", timeout_s=TIMEOUT.total_seconds())
        peers.close()


def refused(rank: int, world_size: int, store: Path) -> list[str]:
    found = []
    in_a_mesh = {"congestion": "reno", "host": mock.Mock() if rank else None}
    for number, options in enumerate(({"connections": 1 + rank}, {"congestion": "unknown"}, in_a_mesh)):
        try:
            with opened(rank, store.with_name(f"{store.name}-{number}"), **options):
                found.append("")
        except ConnectError as error:
            found.append(str(error))
    return found


def test_messages_take_turns_on_connections_of_the_given_control(tmp_path: Path) -> None:
    on_ranks(2, exchange, tmp_path / "store")


def test_updates_of_replicas_are_divided_over_the_connections(tmp_path: Path) -> None:
    on_ranks(2, exchange_updates, tmp_path / "store")


def test_connections_that_differ_and_a_control_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for differ, unknown, in_a_mesh in on_ranks(2, refused, tmp_path / "store"):
        assert differ.startswith("ranks differ in run.connections: 1, 2")
        assert unknown.startswith("run.congestion=unknown on")
        assert "reno" in unknown
        assert in_a_mesh.startswith("run.congestion=reno: ranks connect to the mesh of their host")
