"""The grid of replicas x pipeline stages, and the process groups over it.

    rank = replica * stages + stage rank        4 stages x 2 replicas:   replica 0:  0 1 2 3
                                                                         replica 1:  4 5 6 7

Neighbours in a pipeline are adjacent ranks, so torchrun places them on one host first.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from acsgd.errors import RunError, reason
from acsgd.launch import Launch

POLL_S = 0.01
"""Seconds between two reads of the store while waiting; one read takes about 0.1 ms."""
STORE_TIMEOUT = timedelta(seconds=60)
"""Maximum time to connect to torchrun's store."""


@dataclass(frozen=True)
class Topology:
    """This rank's position in the grid of replicas x pipeline stages."""

    rank: int
    world_size: int
    stages: int
    """Ranks per pipeline."""

    def __post_init__(self) -> None:
        if self.world_size % self.stages:
            divisors = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            raise ValueError(
                f"pp.stages={self.stages} does not divide the number of processes, {self.world_size}; use "
                f"--pp.stages {' or '.join(str(n) for n in divisors)}, or launch a multiple of {self.stages} "
                f"processes: torchrun --nproc-per-node {self.stages * max(1, self.world_size // self.stages)} ..."
            )

    @property
    def replicas(self) -> int:
        """Number of copies of the pipeline."""
        return self.world_size // self.stages

    @property
    def replica(self) -> int:
        """Index of the replica this rank belongs to."""
        return self.rank // self.stages

    @property
    def stage_rank(self) -> int:
        """This rank's position in its pipeline, 0 = first."""
        return self.rank % self.stages

    def pipeline(self, replica: int) -> list[int]:
        """Ranks of one pipeline, first stage first."""
        return list(range(replica * self.stages, (replica + 1) * self.stages))

    def peers(self, stage_rank: int) -> list[int]:
        """Ranks that hold the same stages, one per replica."""
        return list(range(stage_rank, self.world_size, self.stages))


class Store(Protocol):
    """The methods of torch.distributed.Store used here. Each raises RuntimeError once the store's host is gone."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank. A group that timed out or lost a peer cannot be used again."""

    pp: dist.ProcessGroup
    """The ranks of this rank's pipeline."""
    dp: dist.ProcessGroup
    """The ranks of all replicas that hold the same stages."""
    world: dist.ProcessGroup
    """All ranks."""
    store: dist.Store

    def all_equal(self, text: str) -> bool:
        """Return whether all ranks passed the same text. A collective: every rank must call it."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        extremes = torch.tensor([digest, -digest])
        for group in (self.dp, self.pp):
            with collective_errors("comparing configurations", group):
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        return extremes.tolist() == [digest, -digest]

    def all_gather_text(self, name: str, text: str, *, timeout_s: float) -> list[str]:
        """Gather one text per rank, through the store: for rare messages, from any thread.

        name: identifies the exchange; unique within a run. Returns the texts by rank. Raises RunError that names the
        missing ranks after `timeout_s` seconds.
        """
        keys = [f"acsgd/{name}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        deadline = time.monotonic() + timeout_s
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise RunError(
                    f"rank {dist.get_rank()} on {socket.gethostname()}: {name}: ranks {missing} did not answer within "
                    f"{timeout_s:.0f} s",
                    awaited=missing,
                )
            time.sleep(POLL_S)
        return [self.store.get(key).decode() for key in keys]

    def wait_for_all(self, name: str, *, timeout_s: float) -> None:
        """Wait until every rank has called this. name, timeout_s: as in `all_gather_text`."""
        self.all_gather_text(name, "", timeout_s=timeout_s)


@contextlib.contextmanager
def collective_errors(purpose: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turn a RuntimeError of a collective into a RunError with its purpose and its ranks."""
    try:
        yield
    except RuntimeError as error:
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        raise RunError(
            f"rank {rank} on {socket.gethostname()}: {purpose} with ranks {ranks} failed ({reason(error)})",
            awaited=[other for other in ranks if other != rank],
        ) from error


def open_store(launch: Launch, *, timeout: timedelta = STORE_TIMEOUT) -> dist.Store:
    """Connect to the store of the run, torchrun's. Raises RunError if it does not answer in time."""
    if launch.world_size == 1:
        return dist.HashStore()
    with _connection_errors(launch.rank, launch.world_size, timeout):
        store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout)))
        return store


def clone_store(store: dist.Store) -> dist.Store:
    """Return another connection to a store: a call that waits blocks all other calls of its connection."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone


@contextlib.contextmanager
def connect(topology: Topology, *, timeout: timedelta, store: dist.Store) -> Iterator[Groups]:
    """Open this rank's process groups over gloo; close them on exit.

    timeout: limit of each operation of each group. Raises RunError if not all ranks connect in time.
    """
    rank, world_size = topology.rank, topology.world_size
    with _connection_errors(rank, world_size, timeout):
        publish_host(store, rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        # new_group is a collective of all ranks: each opens every group, in the same order, and keeps its own two.
        pipelines = [dist.new_group(topology.pipeline(r), timeout=timeout) for r in range(topology.replicas)]
        peers = [dist.new_group(topology.peers(s), timeout=timeout) for s in range(topology.stages)]
        world = dist.group.WORLD
        assert world is not None
        yield Groups(pp=pipelines[topology.replica], dp=peers[topology.stage_rank], world=world, store=store)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _connection_errors(rank: int, world_size: int, timeout: timedelta) -> Iterator[None]:
    """Turn a RuntimeError while connecting into a RunError."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} on {socket.gethostname()} could not connect to the other {world_size - 1} processes "
            f"within {timeout.total_seconds():g} s: {reason(error)}"
        ) from error


def publish_host(store: Store, rank: int) -> None:
    """Store this rank's host name, for error messages of other ranks."""
    store.set(_host_key(rank), socket.gethostname())


def published_host(store: Store, rank: int) -> str:
    """Return a rank's host name."""
    key = _host_key(rank)
    return store.get(key).decode() if store.check([key]) else "an unknown host"


def _host_key(rank: int) -> str:
    return f"acsgd/host/{rank}"
