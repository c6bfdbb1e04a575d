"""The process groups of a rank over the axes of the grid, and how they are opened."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from acsgd.comm.addresses import default_is_loopback, find_interface, join_address
from acsgd.comm.communicators import Communicator, OrderedTransport
from acsgd.comm.host_links import LIMIT_S, HostLinkTimes, HostRing
from acsgd.comm.liveness import PeerWatch, heartbeat_interval_s, wait_for_key
from acsgd.comm.process_groups import MARGIN_S, Group, ProcessGroups, VirtualHost
from acsgd.comm.store import StoreClient, TextExchange, call_in_thread
from acsgd.comm.waits import DIRECT, Waits
from acsgd.errors import ConnectError, RunError, reason
from acsgd.launch import Launch, set_interface
from acsgd.topology import Axis, Topology

MACHINE = "\n"
"""Separates the name of a machine from the id of its boot."""
STORE_TIMEOUT_S = 60.0
"""Maximum time to connect to torchrun's store, seconds."""


@dataclass(frozen=True)
class DomainGroups:
    """The two levels of the replicas, seen from one rank, where several of them share a domain: a host, or a faster
    network than that between domains."""

    domains: Mapping[tuple[str, ...], Sequence[int]]
    """Replicas of each domain, by the names that its ranks have given. The first replica of a domain is its leader."""
    local: Group | None
    """The ranks of the same stages in this replica's domain; None if there are no others."""
    across: Group | None
    """The ranks of the same stages at this replica's position in each domain. None unless this is position 0, or
    replicas of a domain divide the weights."""
    position: int
    """Position of this replica in its domain."""
    run_id: str
    """That of the groups."""

    @property
    def leaders(self) -> Group | None:
        """The ranks of the same stages of the leaders; None on other replicas."""
        return self.across if self.position == 0 else None

    def describe(self) -> str:
        """Return a sentence for the user."""
        shown = ([name.partition(MACHINE)[0] for name in names] for names in self.domains)
        named = zip(map(" + ".join, map(dict.fromkeys, shown)), self.domains.values(), strict=True)
        where = ", ".join(f"{' '.join(map(str, replicas))} in {name}" for name, replicas in named)
        if len(self.domains) == 1:
            return f"replicas {where}; they sum their gradients exactly, as those of a domain (dp.local=auto)"
        sizes = {len(replicas) for replicas in self.domains.values()}
        alike = "" if len(sizes) == 1 else "; domains count alike, whatever their number of replicas"
        return (
            f"replicas {where}; those of a domain sum their gradients exactly, and exchange updates with "
            f"the other domains as one replica (dp.local=auto){alike}"
        )


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank. A group that timed out or lost a peer cannot be used again."""

    by_axis: Mapping[Axis, Group]
    """The ranks that differ from this one in their position along an axis only, with this one."""
    world: Group
    """All ranks."""
    background: Group
    """All ranks, over connections of their own, so that other messages do not wait for long ones; the same as `world`
    unless `has_several_hosts`."""
    store: StoreClient
    timeout_s: float
    """Maximum time to wait for a peer (run.timeout), seconds."""
    run_id: str
    """Random text, equal on all ranks and different for each start."""
    waits: Waits
    """All waits of this rank for others."""
    domains: DomainGroups | None
    """None if no replicas share a domain, or all do, unless these are one of the domains that `connect` may find."""
    _opened: ProcessGroups
    _rounds: Counter[str] = field(default_factory=Counter)
    """Number of text exchanges so far, by name."""

    @property
    def pp(self) -> Group:
        """The ranks of this rank's pipeline."""
        return self.by_axis["pipeline"]

    @property
    def has_several_hosts(self) -> bool:
        """Whether the ranks were connected as those of several hosts, as in each view of an elastic run."""
        return self.background is not self.world

    @property
    def dp(self) -> Group:
        """The ranks of all replicas that hold the same stages."""
        return self.by_axis["replica"]

    def with_transport(
        self,
        transport: OrderedTransport,
        device: torch.device,
        uses: Callable[[Axis, Sequence[int]], bool],
        *,
        sums: bool = True,
        updates: bool = True,
    ) -> Groups:
        """Return the groups with a transport for what travels along the axes besides control messages.

        Along "pipeline" these are the messages between stages. device: of their tensors. uses: whether some ranks along
        an axis use the transport, the same on all ranks. sums, updates: whether exact sums of gradients and compressed
        updates travel along "replica". All ranks call this together.
        """

        def open_between(name: str, ranks: Sequence[int]) -> Communicator | None:
            return self._opened.open_communicator(transport, device, name, ranks) if uses("pipeline", ranks) else None

        by_axis = dict(self.by_axis)
        if any(uses("pipeline", pair) for pair in combinations(self.pp.ranks, 2)):
            by_axis["pipeline"] = replace(self.pp, open_communicator=open_between)
        if self.dp.size() > 1 and uses("replica", self.dp.ranks):
            group = self._with_reductions(self.dp, transport, device) if sums else self.dp
            by_axis["replica"] = self._with_updates(group, transport, device) if updates else group
        domains = self.domains
        if domains is not None and domains.local is not None and uses("replica", domains.local.ranks):
            domains = replace(domains, local=self._with_reductions(domains.local, transport, device))
        return replace(self, by_axis=by_axis, domains=domains)

    def measure_host_links(
        self, transport: OrderedTransport, device: torch.device, ring: Sequence[int]
    ) -> HostLinkTimes:
        """Measure a transport and gloo between one rank of each host. All ranks call it together.

        Nothing of the transport remains open. ring: these ranks.
        """
        opened = list[Communicator]()

        def open_unwatched() -> Communicator:
            opened.append(self._opened.open_unwatched(transport, device, "links between hosts", ring))
            return opened[0]

        try:
            with collective_errors("measuring links between hosts", self.world):
                links = HostRing(self.world, ring, device, self.waits)
                return links.measure(open_unwatched, min(LIMIT_S, self.timeout_s / 2))
        finally:
            for each in opened:
                each.abort()

    def _with_reductions(self, group: Group, transport: OrderedTransport, device: torch.device) -> Group:
        """Return a group that sums gradients over a transport, connected."""
        name = f"gradients of rank {self.pp.rank()} of the pipelines over ranks {group.ranks}"
        reductions = self._opened.open_communicator(transport, device, name, group.ranks)
        with collective_errors("connecting the replicas", group):  # NCCL connects with the first operation
            self.waits.wait(reductions.all_reduce(torch.zeros(1, device=device)))
        return replace(group, reductions=reductions)

    def _with_updates(self, group: Group, transport: OrderedTransport, device: torch.device) -> Group:
        """Return a group that exchanges updates over a transport, connected."""
        name = f"updates of rank {self.pp.rank()} of the pipelines over ranks {group.ranks}"
        updates = self._opened.open_communicator(transport, device, name, group.ranks)
        others = [rank for rank in group.ranks if rank != self.world.rank()]
        buffers = {rank: torch.zeros(2, dtype=torch.uint8, device=device).split(1) for rank in others}
        with collective_errors("connecting the replicas", group):
            first, second = ({rank: pair[end] for rank, pair in buffers.items()} for end in range(2))
            self.waits.wait(updates.all_to_all(first, second))
        return replace(group, updates=updates)

    @contextlib.contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Context in which an error after the loss of a rank of a communicator becomes a RunError that names it.

        An abort of NCCL raises nothing: what this rank has received then is not what was sent.
        """
        try:
            yield
        except RuntimeError as error:
            if (lost := self._opened.lost) is not None:
                raise lost from error
            raise

    def publish_ports(self) -> None:
        """In a run with a mesh, let the other hosts open ports that this process has opened, and wait for that."""
        self._opened.publish_ports()

    def all_equal(self, text: str) -> bool:
        """Return whether all ranks passed the same text. A collective: every rank must call it."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        extremes = torch.tensor([digest, -digest])
        for group in self.by_axis.values():
            with collective_errors("comparing configurations", group):
                self.waits.wait(group.all_reduce(extremes, dist.ReduceOp.MAX))
        return extremes.tolist() == [digest, -digest]

    def all_gather_text(self, name: str, text: str, *, timeout_s: float) -> list[str]:
        """Gather one text per rank, through the store: for rare messages, from any thread.

        name: purpose of the exchange. Exchanges of one name must have one order on all ranks. Returns the texts by
        rank. Raises RunError that names the missing ranks after `timeout_s` seconds, or earlier if one of them had no
        heartbeat for run.timeout seconds (see `expect_stop`) or any rank has failed; StoreError if the store does not
        answer.
        """
        number, rank = self._rounds[name], self.world.rank()
        self._rounds[name] += 1
        earlier, exchange = (
            TextExchange(self.store, f"{name}/{each}", self.world.size()) for each in (number - 2, number)
        )
        with self._located(name):
            exchange.send(rank, text)
            if number > 1:  # all ranks have taken part in the exchange after that one
                earlier.delete(rank)
            # the store is on the host of rank 0, for which a look takes no delay of a link
            joined = self._wait_for(exchange.joined, exchange.missing, timeout_s, looks=rank == 0)
            return exchange.join() if joined is None else exchange.split(joined)

    def publish_text(self, name: str, text: str) -> None:
        """Store a text of rank 0, once per run, for the ranks that call `published_text`."""
        self.store.set(_published_key(name, self.run_id), text)

    def published_text(self, name: str, *, timeout_s: float) -> str:
        """Wait for a text that rank 0 publishes. Raises errors as `all_gather_text` does."""
        key = _published_key(name, self.run_id)
        with self._located(name):
            text = self._wait_for(key, lambda: [0], timeout_s)
        assert text is not None
        return text.decode()

    def meet(self, name: str, rank: int, *, timeout_s: float) -> None:
        """Wait until another rank calls this, too, with the same name and this rank. From any thread.

        Raises errors as `all_gather_text` does.
        """
        mine, other = (f"acsgd/meet/{name}/{each}" for each in (self.world.rank(), rank))
        with self._located(name):
            self.store.set(mine, "")
            self._wait_for(other, lambda: [rank], timeout_s)
            self.store.delete(other)

    @contextlib.contextmanager
    def _located(self, name: str) -> Iterator[None]:
        """Add to a RunError which rank waited, where, and for what."""
        try:
            yield
        except RunError as error:
            where = f"rank {self.world.rank()} on {socket.gethostname()}: {name}"
            raise type(error)(f"{where}: {error}", awaited=error.awaited) from error

    def _wait_for(
        self, key: str, find_missing: Callable[[], list[int]], timeout_s: float, *, looks: bool = False
    ) -> bytes | None:
        """As `wait_for_key`. Raises errors as `all_gather_text` does."""
        watch = PeerWatch(self.store, self.timeout_s, self._opened.is_stopping.is_set)

        def check(missing: list[int], waited_s: float) -> None:
            watch.check(missing)
            if waited_s > timeout_s:
                raise RunError(f"ranks {missing} did not answer within {timeout_s:g} s", awaited=missing)

        interval_s, ranks = heartbeat_interval_s(self.timeout_s), self.world.size()
        return wait_for_key(self.store, key, find_missing, check, interval_s=interval_s, ranks=ranks, looks=looks)

    def wait_for_all(self, name: str, *, timeout_s: float) -> None:
        """Wait until every rank has called this. name, timeout_s: as in `all_gather_text`."""
        self.all_gather_text(name, "", timeout_s=timeout_s)

    def expect_stop(self) -> None:
        """Find dead ranks sooner from now on, since a stop signal leaves little time. From any thread."""
        self._opened.is_stopping.set()

    def interrupt(self, reason: str) -> None:
        """End all waits with WaitInterruptedError, and shut down the connections to other ranks. From any thread.

        An operation that is posted afterwards may also fail as if its peer had ended.
        """
        self.waits.interrupt(reason)
        self._opened.interrupt()  # which direct waits do not

    def abort(self, reason: str) -> None:
        """Interrupt, and drop the groups, without waiting for any rank; `connect` may then form new ones.

        Call it in the training thread, once its threads have left their waits. Only the first call has an effect.
        """
        self.interrupt(reason)
        self._opened.abort()


@contextlib.contextmanager
def collective_errors(purpose: str, group: Group) -> Iterator[None]:
    """Turn a RuntimeError of a collective into a RunError with its purpose and its ranks."""
    try:
        yield
    except RuntimeError as error:
        rank, ranks = dist.get_rank(), group.ranks
        raise RunError(
            f"rank {rank} on {socket.gethostname()}: {purpose} with ranks {ranks} failed ({reason(error)})",
            awaited=[other for other in ranks if other != rank],
        ) from error


def open_store(launch: Launch, *, timeout_s: float = STORE_TIMEOUT_S) -> dist.Store:
    """Connect to the store of the run, torchrun's, which keeps what earlier attempts have written: their failures, and
    the addresses of their groups. So the keys of each attempt have a prefix.

    Raises RunError if it does not answer in time, or if torchrun of another host has started its workers again more
    often: this process then ends, so that torchrun of this host does so, too.
    """
    if launch.world_size == 1:
        return dist.HashStore()
    if launch.rendezvous and not launch.is_one_host and default_is_loopback():
        set_interface(find_interface(socket.gethostname(), [join_address(*launch.rendezvous)]))

    def connect_to_torchrun() -> tuple[dist.Store, bool]:
        timeout = timedelta(seconds=timeout_s)
        store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout)))
        store.set(_attempt_key(launch.attempt), "")
        return dist.PrefixStore(_attempt_key(launch.attempt), store), store.check([_attempt_key(launch.attempt + 1)])

    with _connection_errors(launch.rank, launch.world_size, timeout_s):
        store, is_late = call_in_thread(connect_to_torchrun, timeout_s=timeout_s + MARGIN_S)
    if is_late:
        raise ConnectError(
            f"rank {launch.rank} on {socket.gethostname()}: this host has started its workers again {launch.attempt} "
            "times, another one more often; if torchrun of this host does not start them again, raise --max-restarts"
        )
    return store


def clone_store(store: dist.Store, launch: Launch) -> dist.Store:
    """Return another connection to a store: a call that waits blocks all other calls of its connection."""
    with _connection_errors(launch.rank, launch.world_size, STORE_TIMEOUT_S):
        clone: dist.Store = call_in_thread(store.clone, timeout_s=STORE_TIMEOUT_S + MARGIN_S)  # type: ignore[attr-defined]  # not in torch's stubs
        return clone


@contextlib.contextmanager
def connect(
    topology: Topology,
    *,
    timeout: timedelta,
    store: dist.Store,
    waits: Waits = DIRECT,
    several_hosts: bool = False,
    host: VirtualHost | None = None,
    domain: str = "",
    divides: bool = False,
    may_be_one: bool = False,
    connections: int = 1,
    congestion: str | None = None,
) -> Iterator[Groups]:
    """Open this rank's process groups; close them on exit, or abort them if an exception is raised.

    timeout: limit of each operation of each group, and of each call of the store. waits: all waits of these groups,
    also while they are opened. several_hosts: whether ranks are or may be on several hosts, the same on all; needed
    only where `background` or `has_several_hosts` are used. host: where this process listens in a run with a mesh.
    domain: name of that of this rank; "" on any rank = there are none. divides: whether replicas of a domain divide the
    weights, so that domains need the same number of replicas. may_be_one: whether replicas that all share a domain
    divide the weights as in one of several, since others may join. connections: number between two ranks of a pipeline,
    two replicas, or two domains. congestion: congestion control of all connections; None = that of the system. A
    process may connect again after exit, with other ranks, with another store (such as a dist.PrefixStore of a new
    prefix) and with other interruptible waits.
    Raises RunError if not all ranks connect in time.
    """
    rank, timeout_s = topology.rank, timeout.total_seconds()
    opened = ProcessGroups(store, waits, rank, topology.world_size, timeout, host)
    waits.on_interrupt(opened.interrupt)
    try:
        problem = _congestion_problem(congestion, has_mesh=host is not None)
        with _connection_errors(rank, topology.world_size, timeout_s):
            texts = opened.gather_before("domain", json.dumps([domain, divides, connections, problem]))
        names, divides = _agreed(texts)
        least = 1 if divides and may_be_one else 2
        with _connection_errors(rank, topology.world_size, timeout_s):
            domains = _find_domains(names, topology, equal_sizes=divides, least=least)
            local, across = _levels(domains, topology, all_positions=divides)
            lines = [line for axis in topology.sizes for line in topology.lines(axis)]
            everyone = [list(range(topology.world_size))] if several_hosts else []
            members = [*[*lines, *across] * connections, *local, *everyone]
            run_id, (world, *others) = opened.open(members)
        if congestion is not None:
            opened.connections.use_congestion(congestion)
        count = connections * sum(rank in each for each in [*lines, *across])
        own = _in_turn(others[:count], connections)
        by_axis = dict(zip(topology.sizes, own, strict=False))
        of_position = own[-1] if len(own) > len(by_axis) else None
        of_domain = others[count] if any(rank in each for each in local) else None
        position = next((each.index(topology.replica) for each in domains.values() if topology.replica in each), 0)
        two_levels = DomainGroups(domains, of_domain, of_position, position, run_id) if domains else None
        apart = others[-1] if several_hosts else world
        yield Groups(by_axis, world, apart, opened.client, timeout_s, run_id, waits, two_levels, opened)
    except BaseException:
        waits.interrupt("the groups are closed after an error")
        opened.abort()
        raise
    opened.close()
    waits.interrupt("the groups are closed")


def _agreed(texts: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the domain of each rank, and whether all ranks want replicas of a domain to divide the weights.

    texts: by rank, what `connect` exchanges. Raises ConnectError, on all ranks alike, if they cannot connect.
    """
    names, dividing, counts, problems = zip(*map(json.loads, texts), strict=True)
    if len({*counts}) > 1:
        raise ConnectError(f"ranks differ in run.connections: {', '.join(map(str, counts))}; give all the same")
    if problem := next(filter(None, problems), None):
        raise ConnectError(problem)
    return names, all(dividing)  # the same groups on all ranks, also where their options differ


def _in_turn(groups: Sequence[Group], connections: int) -> list[Group]:
    """Return groups whose connections carry messages in turn. groups: as many times as there are connections."""
    count = len(groups) // connections
    by_turn = [groups[count * turn : count * (turn + 1)] for turn in range(connections)]
    return [
        replace(first, more=tuple(each.process_group for each in more)) for first, *more in zip(*by_turn, strict=True)
    ]


def _congestion_problem(congestion: str | None, *, has_mesh: bool) -> str:
    """Return why this process cannot use a congestion control for its connections; "" if it can."""
    if congestion is None:
        return ""
    if has_mesh:
        return (
            f"run.congestion={congestion}: ranks connect to the mesh of their host, whose connections have "
            "net.ipv4.tcp_congestion_control of the host; set that with sysctl, and remove run.congestion"
        )
    try:
        with socket.socket() as unused:
            unused.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError as error:
        available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
        known = available.read_text().strip() if available.exists() else "none"
        return (
            f"run.congestion={congestion} on {socket.gethostname()}: the kernel refuses it ({error.strerror}); it "
            f"offers {known}, of which those in net.ipv4.tcp_allowed_congestion_control are for all users; add it "
            "there with sysctl, or remove run.congestion"
        )
    return ""


def machine_name() -> str:
    """Return a text that processes of one machine have in common, and of no others: its name and the id of its boot."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + MACHINE + (boot_id.read_text().strip() if boot_id.exists() else "")


def _find_domains(
    names: Sequence[str], topology: Topology, *, equal_sizes: bool, least: int
) -> dict[tuple[str, ...], list[int]]:
    """Return the replicas of each domain by its names; empty unless some replicas share a domain, and others another.

    names: by rank, as `connect`'s `domain`. equal_sizes: whether all domains must have as many replicas. least: number
    of domains that there must be.
    """
    domains = topology.domains(names)
    is_usable = all(names) and (not equal_sizes or len({len(each) for each in domains.values()}) == 1)
    return domains if is_usable and least <= len(domains) < topology.replicas else {}


def _levels(
    domains: Mapping[tuple[str, ...], Sequence[int]], topology: Topology, *, all_positions: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each group within a domain, and of each group of replicas at one position of all domains.

    all_positions: as many in all domains; else the first one alone.
    """
    by_stage = topology.lines("replica")
    local = [[line[replica] for replica in each] for each in domains.values() if len(each) > 1 for line in by_stage]
    positions = [*zip(*domains.values(), strict=False)][: None if all_positions else 1]
    return local, [[line[replica] for replica in each] for each in positions for line in by_stage]


@contextlib.contextmanager
def _connection_errors(rank: int, world_size: int, timeout_s: float) -> Iterator[None]:
    """Turn an error while connecting into a ConnectError."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        raise ConnectError(
            f"rank {rank} on {socket.gethostname()} could not connect to the other {world_size - 1} processes "
            f"within {timeout_s:g} s: {reason(error) or 'the store, which torchrun hosts, does not answer'}"
        ) from error


def _attempt_key(attempt: int) -> str:
    return f"acsgd/attempt-{attempt}"


def _published_key(name: str, run_id: str) -> str:
    return f"acsgd/published/{run_id}/{name}"
