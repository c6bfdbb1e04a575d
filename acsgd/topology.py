"""The grid of replicas x pipeline stages, and the process groups over it.

    rank = replica * stages + stage rank        4 stages x 2 replicas:   replica 0:  0 1 2 3
                                                                         replica 1:  4 5 6 7

Neighbours in a pipeline are adjacent ranks, so torchrun places them on one host first.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from acsgd.connections import GlooConnections
from acsgd.errors import RunError, reason
from acsgd.launch import Launch
from acsgd.liveness import Heartbeat, PeerWatch, heartbeat_interval_s
from acsgd.store import CallThread, StoreClient
from acsgd.waits import DIRECT, SLICE_S, Waits

T = TypeVar("T")

_RUN_ID = "acsgd/run"
POLL_S = 0.01
"""Seconds between two reads of the store while waiting; one read takes about 0.2 ms."""
MIN_CONNECT_POLL_S, MAX_CONNECT_POLL_S = 0.002, 0.05
"""Seconds between two reads of the store while groups are opened: fewer if ranks start seconds apart, which would load
the store of many ranks."""
STORE_TIMEOUT_S = 60.0
"""Maximum time to connect to torchrun's store, seconds."""
MARGIN_S = 1.0
"""Time that torch gets beyond the timeout of an operation to raise its own error, which has a reason, seconds."""


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


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank. A group that timed out or lost a peer cannot be used again."""

    pp: dist.ProcessGroup
    """The ranks of this rank's pipeline."""
    dp: dist.ProcessGroup
    """The ranks of all replicas that hold the same stages."""
    world: dist.ProcessGroup
    """All ranks."""
    store: StoreClient
    timeout_s: float
    """Maximum time to wait for a peer (run.timeout), seconds."""
    run_id: str
    """Random text, equal on all ranks and different for each start."""
    waits: Waits
    """All waits of this rank for others."""
    _connection: _Connection
    _rounds: Counter[str] = field(default_factory=Counter)
    """Number of text exchanges so far, by name."""

    def all_equal(self, text: str) -> bool:
        """Return whether all ranks passed the same text. A collective: every rank must call it."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        extremes = torch.tensor([digest, -digest])
        for group in (self.dp, self.pp):
            with collective_errors("comparing configurations", group):
                work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group, async_op=True)
                assert work is not None
                self.waits.wait(work)
        return extremes.tolist() == [digest, -digest]

    def all_gather_text(self, name: str, text: str, *, timeout_s: float) -> list[str]:
        """Gather one text per rank, through the store: for rare messages, from any thread.

        name: purpose of the exchange. Exchanges of one name must have one order on all ranks. Returns the texts by
        rank. Raises RunError that names the missing ranks after `timeout_s` seconds, or earlier if one of them had no
        heartbeat for run.timeout seconds or any rank has failed; StoreError if the store does not answer.
        """
        number = self._rounds[name]
        self._rounds[name] += 1
        keys = [_text_key(name, number, rank) for rank in range(self.world.size())]
        try:
            self.store.set(keys[self.world.rank()], text)
            self._wait_for(keys, timeout_s)
            texts = [self.store.get(key) for key in keys]
            if number:  # all ranks have read the texts before these
                self.store.delete(_text_key(name, number - 1, self.world.rank()))
        except RunError as error:
            where = f"rank {self.world.rank()} on {socket.gethostname()}: {name}"
            raise type(error)(f"{where}: {error}", awaited=error.awaited) from error
        return texts

    def publish_text(self, name: str, text: str) -> None:
        """Store a text of rank 0, once per run, for the ranks that call `published_text`."""
        self.store.set(_published_key(name, self.run_id), text)

    def published_text(self, name: str, *, timeout_s: float) -> str:
        """Wait for a text that rank 0 publishes. Raises errors as `all_gather_text` does."""
        key = _published_key(name, self.run_id)
        try:
            self._wait_for([key], timeout_s)
        except RunError as error:
            where = f"rank {self.world.rank()} on {socket.gethostname()}: {name}"
            raise type(error)(f"{where}: {error}", awaited=error.awaited) from error
        return self.store.get(key)

    def _wait_for(self, keys: list[str], timeout_s: float) -> None:
        """Wait until the store has the keys of the first ranks, or of all."""
        deadline, watch = time.monotonic() + timeout_s, PeerWatch(self.store, self.timeout_s)
        while not self._has_all(keys, within_s=heartbeat_interval_s(self.timeout_s)):
            missing = [rank for rank, key in enumerate(keys) if not self.store.has(key)]
            watch.check(missing)
            if time.monotonic() > deadline:
                raise RunError(f"ranks {missing} did not answer within {timeout_s:g} s", awaited=missing)

    def _has_all(self, keys: list[str], *, within_s: float) -> bool:
        """Poll the store for keys; return whether it has all of them within some seconds."""
        until = time.monotonic() + within_s
        while not (found := self.store.has(*keys)) and time.monotonic() < until:
            time.sleep(POLL_S)
        return found

    def wait_for_all(self, name: str, *, timeout_s: float) -> None:
        """Wait until every rank has called this. name, timeout_s: as in `all_gather_text`."""
        self.all_gather_text(name, "", timeout_s=timeout_s)

    def interrupt(self, reason: str) -> None:
        """End all waits with WaitInterruptedError, and shut down the connections to other ranks. From any thread.

        An operation that is posted afterwards may also fail as if its peer had ended.
        """
        self.waits.interrupt(reason)
        self._connection.connections.shut_down()  # which direct waits do not

    def abort(self, reason: str) -> None:
        """Interrupt, and drop the groups, without waiting for any rank; `connect` may then form new ones.

        Call it in the training thread, once its threads have left their waits. Only the first call has an effect.
        """
        self.interrupt(reason)
        self._connection.abort(self.timeout_s)


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


def open_store(launch: Launch, *, timeout_s: float = STORE_TIMEOUT_S) -> dist.Store:
    """Connect to the store of the run, torchrun's. Raises RunError if it does not answer in time."""
    if launch.world_size == 1:
        return dist.HashStore()

    def connect_to_torchrun() -> dist.Store:
        timeout = timedelta(seconds=timeout_s)
        store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout)))
        return store

    with _connection_errors(launch.rank, launch.world_size, timeout_s):
        return _bounded(connect_to_torchrun, timeout_s)


def clone_store(store: dist.Store, launch: Launch) -> dist.Store:
    """Return another connection to a store: a call that waits blocks all other calls of its connection."""
    with _connection_errors(launch.rank, launch.world_size, STORE_TIMEOUT_S):
        clone: dist.Store = _bounded(store.clone, STORE_TIMEOUT_S)  # type: ignore[attr-defined]  # not in torch's stubs
        return clone


@contextlib.contextmanager
def connect(topology: Topology, *, timeout: timedelta, store: dist.Store, waits: Waits = DIRECT) -> Iterator[Groups]:
    """Open this rank's process groups over gloo; close them on exit, or abort them if an exception is raised.

    timeout: limit of each operation of each group, and of each call of the store. waits: all waits of these groups,
    also while they are opened. A process may connect again after exit, with other ranks, with another store (such as a
    dist.PrefixStore of a new prefix) and with other interruptible waits. Raises RunError if not all ranks connect in
    time.
    """
    rank, timeout_s = topology.rank, timeout.total_seconds()
    connection = _Connection(store, waits, rank, timeout_s)
    waits.on_interrupt(connection.connections.shut_down)
    try:
        with _connection_errors(rank, topology.world_size, timeout_s):
            groups = connection.open(topology, timeout)
        yield groups
    except BaseException:
        waits.interrupt("the groups are closed after an error")
        connection.abort(timeout_s)
        raise
    connection.close()
    waits.interrupt("the groups are closed")


class _Connection:
    """What a rank opens to communicate with the others: threads, connections and groups."""

    def __init__(self, store: dist.Store, waits: Waits, rank: int, timeout_s: float) -> None:
        self.connections = GlooConnections()
        self._thread = CallThread("store", waits)
        self._client = StoreClient(store, self._thread, timeout_s=timeout_s)
        self._store = _GroupStore(self._client, timeout_s)
        self._waits = waits
        self._rank = rank
        self._heartbeat: Heartbeat | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._is_open = False

    def open(self, topology: Topology, timeout: timedelta) -> Groups:
        """Open all groups together with the other ranks."""
        rank, timeout_s = self._rank, timeout.total_seconds()
        publish_host(self._client, rank)
        if rank == 0:
            self._client.set(_RUN_ID, secrets.token_hex(4))
        thread = CallThread("connect", self._waits)  # torch's timeouts do not hold everywhere

        def bounded(call: Callable[[], T]) -> T:
            return thread.call(call, timeout_s=timeout_s + MARGIN_S)

        def init() -> None:
            dist.init_process_group(
                "gloo", store=self._store, rank=rank, world_size=topology.world_size, timeout=timeout
            )

        def open_group(ranks: list[int]) -> dist.ProcessGroup:
            group = bounded(partial(dist.new_group, ranks, timeout=timeout))
            if rank in ranks:
                self._groups.append(group)
            return group

        self._is_open = True
        try:
            bounded(init)
            world = dist.group.WORLD
            assert world is not None
            self._groups.append(world)
            # new_group is a collective of all ranks: each opens every group, in the same order, and keeps its own two.
            pipelines = [open_group(topology.pipeline(replica)) for replica in range(topology.replicas)]
            peers = [open_group(topology.peers(stage_rank)) for stage_rank in range(topology.stages)]
        except BaseException:
            self.connections.shut_down()
            thread.close(within_s=MARGIN_S)  # torch's state is global: leave no thread that changes it
            raise
        thread.close()
        self.connections.seal()
        run_id = self._client.get(_RUN_ID)
        self._heartbeat = Heartbeat(self._client, rank, heartbeat_interval_s(timeout_s))
        pp, dp = pipelines[topology.replica], peers[topology.stage_rank]
        return Groups(pp, dp, world, self._client, timeout_s, run_id, self._waits, self)

    def close(self) -> None:
        """Close the groups, which are not in use any more."""
        self.connections.close()
        if self._is_open:
            self._is_open = False
            if self._heartbeat is not None:
                self._heartbeat.close()
            dist.destroy_process_group()
        self._thread.close()

    def abort(self, timeout_s: float) -> None:
        """Drop the groups, as far as they are open, without waiting for other ranks. timeout_s: of the groups."""
        self.connections.shut_down()
        self.connections.close()
        if self._is_open:
            self._is_open = False
            if self._heartbeat is not None:
                self._heartbeat.close(within_s=SLICE_S)
            if not dist.is_initialized():  # torch numbers groups; only a destroyed world resets the number
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
            args = self._groups, time.monotonic() + timeout_s
            threading.Thread(target=_drop, args=args, name="aborted groups", daemon=True).start()
        self._thread.close()


def _drop(groups: list[dist.ProcessGroup], deadline: float) -> None:
    """Drop each group after all other references to it, so that its destructor runs in this thread.

    It waits for the collectives in progress, which may last until the timeout of the group, the deadline.
    """
    while groups and time.monotonic() < deadline:
        groups[:] = [group for group in groups if sys.getrefcount(group) > _REFERENCES]
        time.sleep(POLL_S)


_REFERENCES = 3
"""References to a group that only `_drop` refers to: the list, the variable, the argument of getrefcount."""


class _GroupStore(dist.Store):
    """Store that groups are opened with: each of its waits ends in time, and at an interrupt."""

    def __init__(self, client: StoreClient, timeout_s: float) -> None:
        super().__init__()
        self._client = client
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch calls it with bytes
        self._client.set_bytes(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._client.get_bytes(key)

    def add(self, key: str, value: int) -> int:
        return self._client.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._client.has(*keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        started = time.monotonic()
        while not self._client.has(*keys):
            waited_s = time.monotonic() - started
            if waited_s > limit_s:
                raise RuntimeError(f"a process has not started, or has ended: {' '.join(keys)} is not in the store")
            time.sleep(min(MAX_CONNECT_POLL_S, MIN_CONNECT_POLL_S + waited_s / 20))


@contextlib.contextmanager
def _connection_errors(rank: int, world_size: int, timeout_s: float) -> Iterator[None]:
    """Turn an error while connecting into a RunError."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        raise RunError(
            f"rank {rank} on {socket.gethostname()} could not connect to the other {world_size - 1} processes "
            f"within {timeout_s:g} s: {reason(error) or 'the store, which torchrun hosts, does not answer'}"
        ) from error


def _bounded(call: Callable[[], T], timeout_s: float) -> T:
    """Call a function in a thread of its own: torch's timeouts do not hold if the store stops answering."""
    thread = CallThread("connect")
    try:
        return thread.call(call, timeout_s=timeout_s + MARGIN_S)
    finally:
        thread.close()


def publish_host(store: StoreClient, rank: int) -> None:
    """Store this rank's host name, for error messages of other ranks."""
    store.set(_host_key(rank), socket.gethostname())


def published_host(store: StoreClient, rank: int) -> str:
    """Return a rank's host name."""
    key = _host_key(rank)
    return store.get(key) if store.has(key) else "an unknown host"


def _host_key(rank: int) -> str:
    return f"acsgd/host/{rank}"


def _published_key(name: str, run_id: str) -> str:
    return f"acsgd/published/{run_id}/{name}"


def _text_key(name: str, number: int, rank: int) -> str:
    return f"acsgd/{name}/{number}/{rank}"
