"""Groups of ranks and their transports; opening, closing and aborting the groups of a rank."""

from __future__ import annotations

import atexit
import itertools
import json
import secrets
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.communicators import Communicator, CommunicatorWatch, OrderedTransport
from acsgd.comm.connections import GlooConnections
from acsgd.comm.liveness import Heartbeat, PeerWatch, heartbeat_interval_s, wait_for_key
from acsgd.comm.store import CallThread, StoreClient, TextExchange, poll_pause_s, start_in_thread
from acsgd.comm.waits import SLICE_S, Waits, Work
from acsgd.errors import ConnectError, RunError

T = TypeVar("T")

_RUN_ID = "acsgd/run"
POLL_S = 0.01
"""Seconds between two looks at whether an aborted group can be dropped."""
MARGIN_S = 1.0
"""Time that torch gets beyond the timeout of an operation to raise its own error, which has a reason, seconds."""


class Transport(NamedTuple):
    """What carries the messages of a group."""

    backend: str
    """Name in torch.distributed."""
    device: torch.device
    """Device of the tensors that are sent and received."""


GLOO = Transport("gloo", torch.device("cpu"))
_CONNECTED = "acsgd_gloo"
"""Name in torch.distributed of gloo's groups that are connected before torch numbers them, all at the same time."""
PORT_ATTEMPTS = 5
"""Number of ports that are tried, in a run with a mesh."""
_THREADS = 2
"""Number of threads of a gloo group, as torch has."""


class VirtualHost:
    """Where the groups of this process listen, in a run with a mesh.

    publish: lets the other hosts open new ports of the address, waits for that, and returns the ports that other
    programs have taken there.
    """

    def __init__(self, address: str, publish: Callable[[], set[int]]) -> None:
        self.address = address
        self._publish = publish
        self._taken = set[int]()

    def publish(self) -> None:
        """Let other hosts open new ports, and wait for that. Raises ConnectError if another program has one there."""
        before, self._taken = self._taken, self._publish()
        if new := self._taken - before:
            ports = ", ".join(map(str, sorted(new)))
            raise ConnectError(f"port {ports} of {self.address} is taken by another program on another host")

    def open(self, create: Callable[[], T], attempts: int = PORT_ATTEMPTS) -> T:
        """Return what opens a free port at the address, which other hosts have opened, too. Raises ConnectError."""
        opened = create()
        try:
            self.publish()
        except ConnectError:
            if attempts == 1:
                raise
            return self.open(create, attempts - 1)  # the port that is taken is still in use, and not chosen again
        return opened

    def device(self) -> Any:
        """Return a new device of gloo at the address, whose port other hosts have opened. Raises ConnectError."""
        return self.open(lambda: dist.ProcessGroupGloo.create_device(hostname=self.address))


@dataclass(frozen=True)
class Group:
    """Ranks that exchange messages. One that timed out or lost a peer cannot be used again.

    Operations return at once; they raise RuntimeError, as their works do, if a peer fails or times out.
    """

    process_group: dist.ProcessGroup
    transport: Transport
    members: tuple[int, ...] = ()
    """Global ranks in the order of the group; empty = ascending, in which torch has them."""
    open_communicator: Callable[[str, Sequence[int]], Communicator | None] | None = None
    """Opens a communicator of some of the ranks, together with them, for messages between stages; takes a name that is
    its own. Returns None for ranks between which these travel over gloo. None = they do so between all."""
    reductions: Communicator | None = None
    """Sums gradients on the device. None = `all_reduce` does."""
    updates: Communicator | None = None
    """Carries compressed updates on the device. None = they are sent as other messages."""
    more: tuple[dist.ProcessGroup, ...] = ()
    """Groups of the same ranks, whose connections carry messages in turn with those of `process_group`: of the messages
    between two ranks with a tag, and of the reductions, each the next."""
    _turns: defaultdict[tuple[str, int, int], Iterator[int]] = field(
        default_factory=lambda: defaultdict(itertools.count), compare=False
    )
    """By operation, rank and tag, the numbers of the next messages."""

    @property
    def connections(self) -> int:
        """Number of connections between two ranks."""
        return 1 + len(self.more)

    @property
    def device(self) -> torch.device:
        """Device of the tensors that are sent and received."""
        return self.transport.device

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, in the order of the group."""
        return [*self.members] or dist.get_process_group_ranks(self.process_group)

    def size(self) -> int:
        """Return the number of members."""
        return self.process_group.size()

    def rank(self) -> int:
        """Return the position of this rank among the members."""
        return self.members.index(dist.get_rank()) if self.members else self.process_group.rank()

    def isend(self, tensor: Tensor, rank: int, tag: int = 0) -> Work:
        """Start to send a tensor to a global rank."""
        return _started(dist.isend(tensor, rank, self._next("send", rank, tag), tag))

    def irecv(self, buffer: Tensor, rank: int, tag: int = 0) -> Work:
        """Start to receive a tensor from a global rank."""
        return _started(dist.irecv(buffer, rank, self._next("receive", rank, tag), tag))

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Start to reduce a tensor of each member, in place. gloo also takes those of another device."""
        return _started(dist.all_reduce(tensor, op, group=self._next("reduce", 0, 0), async_op=True))

    def _next(self, operation: str, rank: int, tag: int) -> dist.ProcessGroup:
        """Return the group whose turn it is, which is the same one at both ends."""
        if not self.more:
            return self.process_group
        number = next(self._turns[operation, rank, tag]) % self.connections
        return self.more[number - 1] if number else self.process_group


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "None is returned to ranks outside of the group"
    return work


class ProcessGroups:
    """The process groups of a rank with their threads and connections, which are closed or aborted together.

    store: shared by the ranks; waits: all waits of the groups, also while they are opened; rank: this one of
    `world_size`; timeout: limit of each operation of each group, and of each call of the store; host: where the groups
    listen; None = where gloo chooses.
    """

    def __init__(
        self,
        store: dist.Store,
        waits: Waits,
        rank: int,
        world_size: int,
        timeout: timedelta,
        host: VirtualHost | None = None,
    ) -> None:
        self.connections = GlooConnections()
        self._thread = CallThread("store", waits)
        self.client = StoreClient(store, self._thread, timeout_s=timeout.total_seconds())
        self._store = _GroupStore(self.client, timeout.total_seconds(), world_size)
        self._timeout = timeout
        self._waits = waits
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._heartbeat: Heartbeat | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._communicators: list[Communicator] = []
        self._are_aborted = False
        """Whether no communicator can be used any more."""
        self._lock = threading.Lock()
        """Guards the communicators, which another thread may abort."""
        self._watch: CommunicatorWatch | None = None
        """Of the communicators, once there is one."""
        self.is_stopping = threading.Event()
        """Is set once this process has a stop signal."""
        self._is_open = False

    def open(self, members: Sequence[list[int]]) -> tuple[str, list[Group]]:
        """Open the group of all ranks, and one for each list of ranks, together with the other ranks.

        Returns the id of the run and the groups that this rank is in, that of all ranks first.
        """
        rank, size = self._rank, self._world_size
        # before this rank connects to others: once the groups are open, each rank has a heartbeat
        self._heartbeat = Heartbeat(self.client, rank, heartbeat_interval_s(self._timeout.total_seconds()))
        self._is_open = True
        run_id, connected = self._connect([[*range(size)], *members])
        devices = dist.Backend.backend_capability[GLOO.backend]
        dist.Backend.register_backend(_CONNECTED, lambda *_: connected.pop(0), devices=devices)
        dist.init_process_group(_CONNECTED, store=self._store, rank=rank, world_size=size, timeout=self._timeout)
        world = dist.group.WORLD
        assert world is not None
        self._groups.append(world)
        opened = [Group(world, GLOO)]
        for ranks in members:
            group = dist.new_group(ranks, timeout=self._timeout, backend=_CONNECTED)
            if rank in ranks:
                self._groups.append(group)
                opened.append(Group(group, GLOO, tuple(ranks)))
        return run_id, opened

    def _connect(self, members: Sequence[Sequence[int]]) -> tuple[str, list[dist.ProcessGroupGloo]]:
        """Connect the groups of this rank, all at the same time; return the id of the run and these groups.

        Each takes round trips, and a thread of its own. The addresses of all take one exchange.
        """
        device = None if self._host is None else self._host.device()
        own = [number for number, ranks in enumerate(members) if self._rank in ranks]
        addresses = _Addresses(len(own), self._store)

        def connect(number: int) -> dist.ProcessGroupGloo:
            store, ranks = dist.PrefixStore(str(number), addresses), sorted(members[number])
            return _connect_gloo(store, ranks.index(self._rank), len(ranks), self._timeout, device)

        groups = [start_in_thread(partial(connect, number)) for number in own]
        try:
            self._wait_for([addresses.own, *groups], FIRST_COMPLETED)
            found = self._exchange_addresses(addresses.own.result())
            addresses.all.set_result(found)
            self._wait_for(groups, FIRST_EXCEPTION)
        except BaseException:
            addresses.all.cancel()
            self.connections.shut_down()
            raise
        self.connections.seal()
        if self._host is not None:
            self.connections.check_address(self._host.address)
        run_id = found[_RUN_ID].decode()
        found.clear()  # gloo keeps the store
        return run_id, [each.result() for each in groups]

    def _wait_for(self, futures: Sequence[Future[Any]], until: str) -> None:
        """Wait for futures. Raises the error of one that is done, and TimeoutError: torch's do not hold everywhere."""

        def are_done(seconds: float) -> bool:
            done, waiting = wait(futures, seconds, until)
            for each in done:
                each.result()
            return bool(done) and (until == FIRST_COMPLETED or not waiting)

        if not self._waits.poll(are_done, self._timeout.total_seconds() + MARGIN_S):
            raise TimeoutError("gloo has not connected the groups of all ranks")

    def _exchange_addresses(self, own: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the addresses of all ranks, and the id of the run, which rank 0 draws."""
        run_id = {_RUN_ID: secrets.token_hex(4).encode()} if self._rank == 0 else {}
        sent = {key: value.hex() for key, value in {**own, **run_id}.items()}
        texts = self.gather_before("addresses", json.dumps(sent))
        return {key: bytes.fromhex(value) for text in texts for key, value in json.loads(text).items()}

    def open_communicator(
        self, transport: OrderedTransport, device: torch.device, name: str, ranks: Sequence[int]
    ) -> Communicator:
        """Open a communicator of tensors of a device, together with its other ranks.

        name: of what it carries, given to no other one of this run.
        """
        communicator = self.open_unwatched(transport, device, name, ranks)
        with self._lock:
            self._communicators.append(communicator)
            self._watch = self._watch or self._open_watch()
            is_late = self._are_aborted
        if is_late:
            communicator.abort()
        return communicator

    def open_unwatched(
        self, transport: OrderedTransport, device: torch.device, name: str, ranks: Sequence[int]
    ) -> Communicator:
        """Open a communicator whose failure does not end the run, and which the caller aborts."""
        store = dist.PrefixStore(f"{transport.name}/{name}", self._store)
        backend = transport.open(store, ranks.index(self._rank), len(ranks), self._timeout)
        return Communicator(backend, ranks, ranks.index(self._rank), name, device)

    @property
    def lost(self) -> RunError | None:
        """Why the operations of communicators were ended; None before."""
        return None if self._watch is None else self._watch.lost

    def _open_watch(self) -> CommunicatorWatch:
        timeout_s = self._timeout.total_seconds()
        peers = PeerWatch(self.client, timeout_s, self.is_stopping.is_set)
        return CommunicatorWatch(self._open_communicators, self._rank, peers, timeout_s, self.interrupt)

    def _open_communicators(self) -> list[Communicator]:
        with self._lock:
            return [*self._communicators]

    def interrupt(self) -> None:
        """Shut down the connections, and abort the communicators, so that all waits of this rank end. From any thread.

        Does nothing after `close`.
        """
        self.connections.shut_down()
        with self._lock:
            communicators, self._communicators, self._are_aborted = self._communicators, [], True
        _call_together([communicator.abort for communicator in communicators])

    def gather_before(self, name: str, text: str) -> list[str]:
        """Return the texts of all ranks, before their groups are open. All ranks call it together.

        Raises RuntimeError that names the ranks that have not called it in time; StoreError if the store does not
        answer.
        """
        exchange, timeout_s = TextExchange(self.client, name, self._world_size), self._timeout.total_seconds()

        def check(missing: list[int], waited_s: float) -> None:
            if waited_s > timeout_s:
                raise RuntimeError(f"ranks {missing} have not started, or have ended")

        exchange.send(self._rank, text)
        joined = wait_for_key(
            self.client,
            exchange.joined,
            exchange.missing,
            check,
            interval_s=heartbeat_interval_s(timeout_s),
            ranks=self._world_size,
            looks=self._rank == 0,
        )
        return exchange.join() if joined is None else exchange.split(joined)

    def publish_ports(self) -> None:
        """As `Groups.publish_ports`."""
        if self._host is not None:
            self._host.publish()

    def close(self) -> None:
        """Close the groups, which are not in use any more."""
        if self._watch is not None:
            self._watch.close()
        with self._lock:
            communicators, self._communicators = self._communicators, []
        _call_together([communicator.close for communicator in communicators])
        self.connections.close()
        if self._is_open:
            self._is_open = False
            if self._heartbeat is not None:
                self._heartbeat.close()
            dist.destroy_process_group()
        self._thread.close()

    def abort(self) -> None:
        """Interrupt, and drop the groups as far as they are open, without waiting for other ranks."""
        if self._watch is not None:
            self._watch.close(within_s=SLICE_S)
        self.interrupt()
        self.connections.close()
        if self._is_open:
            self._is_open = False
            if self._heartbeat is not None:
                self._heartbeat.close(within_s=SLICE_S)
            if dist.is_initialized():
                dist.destroy_process_group()
            args = self._groups, time.monotonic() + self._timeout.total_seconds()
            threading.Thread(target=_drop, args=args, name=_DROPPING, daemon=True).start()
        self._thread.close()


def _call_together(calls: Sequence[Callable[[], None]]) -> None:
    """Call functions in threads of their own, and wait for all: NCCL sleeps for half a second in each abort."""
    if calls:
        with ThreadPoolExecutor(len(calls), thread_name_prefix="communicators") as pool:
            for called in [pool.submit(call) for call in calls]:
                called.result()


def _drop(groups: list[dist.ProcessGroup], deadline: float) -> None:
    """Drop each group after all other references to it, so that its destructor runs in this thread.

    It waits for the collectives in progress, which may last until the timeout of the group, the deadline. Ends when the
    interpreter does: a daemon thread that is in a C++ destructor then would abort the process.
    """
    while groups and time.monotonic() < deadline and not _interpreter_ends.wait(POLL_S):
        groups[:] = [group for group in groups if sys.getrefcount(group) > _REFERENCES]


_interpreter_ends = threading.Event()
_END_S = 5.0
"""Maximum time that the end of the interpreter waits for destructors of aborted groups, seconds."""


@atexit.register
def _end_drops() -> None:
    _interpreter_ends.set()
    deadline = time.monotonic() + _END_S
    for thread in threading.enumerate():
        if thread.name == _DROPPING:
            thread.join(max(0.0, deadline - time.monotonic()))


_DROPPING = "aborted groups"
_REFERENCES = 3
"""References to a group that only `_drop` refers to: the list, the variable, the argument of getrefcount."""


class _GroupStore(dist.Store):
    """Store that groups are opened with: each of its waits ends in time, and at an interrupt. No key is deleted.

    ranks: number that may wait at once.
    """

    def __init__(self, client: StoreClient, timeout_s: float, ranks: int = 1) -> None:
        super().__init__()
        self._client = client
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._found = set[str]()
        """Keys that exist: gloo waits for each before it gets it, which waits, too."""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch calls it with bytes
        self._client.set_bytes(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._client.get_bytes(key)

    def has_extended_api(self) -> bool:
        """Return whether gloo may get the addresses of a group at once, see `launch.set_variables`."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._client.get_all(keys)

    def add(self, key: str, value: int) -> int:
        return self._client.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._client.has(*keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        started, missing = time.monotonic(), [key for key in keys if key not in self._found]
        while missing and not self._client.has(*missing):
            waited_s = time.monotonic() - started
            if waited_s > limit_s:
                raise RuntimeError(f"a process has not started, or has ended: {' '.join(keys)} is not in the store")
            time.sleep(poll_pause_s(waited_s, self._ranks))
        self._found |= {*missing}


class _Addresses(dist.Store):
    """Store with which groups are connected at the same time: what each sets first, its address, takes one exchange.

    groups: their number on this rank. store: for what they set later, as gloo does that listens at several interfaces.
    """

    def __init__(self, groups: int, store: dist.Store) -> None:
        super().__init__()
        self.own = Future[dict[str, bytes]]()
        """Of this rank, once each group has set its own."""
        self.all = Future[dict[str, bytes]]()
        """Of all ranks, for which the groups wait."""
        self._groups = groups
        self._store = store
        self._set = dict[str, bytes]()
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch calls it with bytes
        with self._lock:
            if self.own.done():
                self._store.set(key, value)  # type: ignore[arg-type]  # torch's stub is narrower than torch
                return
            self._set[key] = value
            if len(self._set) == self._groups:
                self.own.set_result(self._set)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def has_extended_api(self) -> bool:
        """As that of `_GroupStore`."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self.all.result()
        return [found[key] if key in found else self._store.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.multi_get(keys)


def _connect_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta, device: Any | None
) -> dist.ProcessGroupGloo:
    """Connect a group. device: of gloo, which listens; None = where gloo chooses."""
    if device is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._timeout, options._threads, options._devices = timeout, _THREADS, [device]
    return dist.ProcessGroupGloo(store, rank, size, options)
