"""Where each rank stands: pure arithmetic, plus one function that opens the process groups.

    rank = replica * stages + stage rank        4 stages x 2 replicas:   replica 0:  0 1 2 3
                                                                         replica 1:  4 5 6 7

Neighbours in a pipeline are adjacent ranks, so torchrun's numbering puts them on one host first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from acsgd.errors import RunError, reason
from acsgd.run.failures import publish_host

POLL_S = 0.01
"""Seconds between looks into the store; a look costs about 0.1 ms."""


@dataclass(frozen=True)
class Launch:
    """What torchrun told this process. Without torchrun it is a run of one process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Processes of the run on this host."""
    under_torchrun: bool = False
    """Whether the parent process is torchrun's agent, without which this process has no business."""

    @classmethod
    def from_env(cls) -> Launch:
        """Read torchrun's environment; the only place of the package that reads the environment."""
        env = os.environ
        return cls(
            rank=int(env.get("RANK", 0)),
            local_rank=int(env.get("LOCAL_RANK", 0)),
            world_size=int(env.get("WORLD_SIZE", 1)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
            under_torchrun="TORCHELASTIC_RUN_ID" in env,
        )


@dataclass(frozen=True)
class Topology:
    """This rank's place in the grid of replicas x pipeline stages."""

    rank: int
    world_size: int
    stages: int
    """Ranks per pipeline."""

    def __post_init__(self) -> None:
        if self.world_size % self.stages:
            fitting = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            raise ValueError(
                f"pp.stages={self.stages} does not divide the number of processes, {self.world_size}; use "
                f"--pp.stages {' or '.join(str(n) for n in fitting)}, or launch a multiple of {self.stages} "
                f"processes: torchrun --nproc-per-node {self.stages * max(1, self.world_size // self.stages)} ..."
            )

    @property
    def replicas(self) -> int:
        """Number of copies of the pipeline."""
        return self.world_size // self.stages

    @property
    def replica(self) -> int:
        """Which copy of the pipeline this rank belongs to."""
        return self.rank // self.stages

    @property
    def stage_rank(self) -> int:
        """This rank's place in its pipeline, 0 = first."""
        return self.rank % self.stages

    def pipeline(self, replica: int) -> list[int]:
        """Ranks of one pipeline, first stage first."""
        return list(range(replica * self.stages, (replica + 1) * self.stages))

    def peers(self, stage_rank: int) -> list[int]:
        """Ranks that hold the same stages, one per replica."""
        return list(range(stage_rank, self.world_size, self.stages))


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank. A group that timed out or lost a peer is broken for good."""

    pp: dist.ProcessGroup
    """This rank's pipeline."""
    dp: dist.ProcessGroup
    """The ranks of all replicas that hold the same stages."""
    world: dist.ProcessGroup
    """All ranks."""
    store: Store

    def are_equal(self, text: str) -> bool:
        """Whether all ranks of the run, each of which must ask, give the same text."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        extremes = torch.tensor([digest, -digest])
        for group in (self.dp, self.pp):
            with together("comparing configurations", group):
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        return extremes.tolist() == [digest, -digest]

    def exchange(self, name: str, text: str, *, timeout_s: float) -> list[str]:
        """Say something to all ranks and return what each says under this name, by rank.

        For what is rare, or must not disturb the collectives: it goes through the store, and any thread may call it.
        name: used once in a run. Raises RunError that names the ranks that keep silent for `timeout_s` seconds.
        """
        keys = [f"acsgd/{name}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        deadline = time.monotonic() + timeout_s
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                silent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise RunError(
                    f"rank {dist.get_rank()} on {socket.gethostname()}: {name}: ranks {silent} did not answer within "
                    f"{timeout_s:.0f} s",
                    awaited=silent,
                )
            time.sleep(POLL_S)
        return [self.store.get(key).decode() for key in keys]


@contextlib.contextmanager
def together(doing: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Name what a collective was for, and with whom, if one of its ranks does not do its part."""
    try:
        yield
    except RuntimeError as error:
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        raise RunError(
            f"rank {rank} on {socket.gethostname()}: {doing} with ranks {ranks} failed ({reason(error)})",
            awaited=[other for other in ranks if other != rank],
        ) from error


@contextlib.contextmanager
def connect(topology: Topology, *, timeout: timedelta, store: Store | None = None) -> Iterator[Groups]:
    """Open this rank's groups over gloo and close them at the end.

    timeout: how long any operation of any group may wait for a peer. store: torchrun's, unless given.
    Raises RunError when not all ranks appear in time.
    """
    rank, world_size = topology.rank, topology.world_size
    try:
        if store is None and world_size > 1:
            store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
        elif store is None:
            store = HashStore()
        publish_host(store, rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} on {socket.gethostname()} could not meet the other {world_size - 1} processes "
            f"within {timeout.total_seconds():g} s (run.timeout): {reason(error)}"
        ) from error
    try:
        # Every rank opens every group, in the same order, and keeps its own two.
        pipelines = [dist.new_group(topology.pipeline(r), timeout=timeout) for r in range(topology.replicas)]
        peers = [dist.new_group(topology.peers(s), timeout=timeout) for s in range(topology.stages)]
        world = dist.group.WORLD
        assert world is not None
        yield Groups(pp=pipelines[topology.replica], dp=peers[topology.stage_rank], world=world, store=store)
    finally:
        dist.destroy_process_group()
