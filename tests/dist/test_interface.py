"""Hosts of an elastic run whose own names resolve to a loopback address, in network namespaces. Needs root."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks

from acsgd.comm.addresses import find_interface
from acsgd.groups import connect
from acsgd.launch import publish_daemon
from acsgd.topology import Topology
from benchmarks.common import netlab


def connect_between_hosts(rank: int, world_size: int, store: Path, namespaces: tuple[str, ...]) -> float:
    """Sum the ranks of all hosts; each rank is a host."""
    netlab.enter(namespaces[rank])
    others = [f"{netlab.address(host)}:29400" for host in range(world_size) if host != rank]
    publish_daemon(Path("socket"), interface=find_interface(netlab.address(rank), others))
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology.of(rank, world_size, world_size), timeout=timedelta(seconds=10), store=file_store) as groups:
        total = torch.tensor(float(rank))
        groups.waits.wait(groups.pp.all_reduce(total))
    return total.item()


def test_gloo_uses_the_interface_towards_the_other_hosts(tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            netlab.check(needs_tun=False)
            lab = stack.enter_context(netlab.lab(hosts=3))
        except RuntimeError as error:
            pytest.skip(f"no network namespaces: {error}")
        assert on_ranks(3, connect_between_hosts, tmp_path / "store", lab.namespaces) == [3.0, 3.0, 3.0]
