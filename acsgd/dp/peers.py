"""The replicas of one part of the model, and messages between them.

R replicas; a message is uint8[n], at least one byte.

Replicas of a domain may act as one towards those of other domains. Then each domain is one of the R replicas. Its
members have equal state, since they sum their gradients before anything else is done with them. So all of them compute
the same messages, of which the leader's are sent; what the leader receives it forwards to the other members.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.communicators import Communicator
from acsgd.comm.process_groups import Group
from acsgd.comm.waits import Meter, Waits, Work
from acsgd.errors import RunError, reason
from acsgd.groups import DomainGroups, collective_errors
from acsgd.io.files.checksum import CHECKSUM_BYTES, REMEDY, checksum

T = TypeVar("T")
TAG = 2
"""Tag of messages between replicas."""
LEADER_TAG = 16
"""Tag of what the leader of a domain sends to its other members, besides messages of replica j, whose tag is this + 1 +
j."""
_HEADER = struct.Struct("<QQ")
"""Identity of the message, and the checksum of identity and message.

The identity is the number of the exchange, which detects replicas that are out of step, modulo 2**24, and the length of
the message in bytes, in the low 40 bits.
"""
_IDENTITY_BYTES = _HEADER.size - CHECKSUM_BYTES
_LENGTHS = 2**40
_ABORTED = _LENGTHS - 1
"""Length in the header of a replica that has failed and sends nothing more."""


def acting_domains(
    group: Group, observers: Collection[int], domains: DomainGroups | None
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Return which replicas of a group act as one: of those that send, and of those that only receive.

    Where only some replicas of a domain are observers, each replica acts alone until they are no observers any more.
    """
    found: list[Sequence[int]] = [] if domains is None else [*domains.domains.values()]
    if not found or any(len({replica in observers for replica in domain}) > 1 for domain in found):
        found = [[replica] for replica in range(group.size())]
    senders = [domain for domain in found if domain[0] not in observers]
    return senders, [domain for domain in found if domain[0] in observers]


class _Incoming(NamedTuple):
    """A message that is being received."""

    source: int
    """Rank that sends it."""
    header: Tensor
    buffer: Tensor
    """As long as the longest message."""
    parts: Sequence[Tensor]
    """Views of the buffer: part i of the message arrives at the start of view i."""
    works: Sequence[Work]
    """Of the header, and of these."""


def _identity(header: Tensor) -> tuple[int, int]:
    """Return the number of the exchange and the length in a header."""
    identity, _ = _HEADER.unpack(header.numpy().tobytes())
    return divmod(identity, _LENGTHS)


class AsyncResult(Generic[T]):
    """Result of work in the thread of `Peers`."""

    def __init__(self, future: Future[T], waits: Waits) -> None:
        self._future = future
        self._waits = waits
        self._since = time.perf_counter()

    def wait(self) -> bool:
        """Wait until the work is done. Raises what it raised."""
        self._future.result()
        return True

    def result(self, meter: Meter) -> T:
        """Wait for the work, record the wait in `meter`, and return its result. Raises what it raised."""
        meter.wait(self._waits, self, self._since)
        return self._future.result()


class Peers:
    """A data-parallel group, seen from one of its replicas.

    One thread per rank runs all exchanges in the order in which they were submitted, the same on all replicas.
    waits: all waits for other replicas. observers: replicas of the group that receive what the others exchange, and
    send nothing, since their state is on its way. domains: of which each acts as one replica; None = there are none.
    divides: whether replicas divide the weights among themselves, those of each domain where there are domains.
    named: group of all replicas, if this is a part of them: errors name a replica by its index there.
    """

    def __init__(
        self,
        group: Group,
        waits: Waits,
        observers: Collection[int] = (),
        domains: DomainGroups | None = None,
        *,
        divides: bool = False,
        named: Group | None = None,
    ) -> None:
        self.group = group
        self._named = named or group
        self._domains = domains
        self._owners: Peers | None = None
        self.across_domains: Peers | None = None
        """Those that own the same parts of the weights, one of each domain; None = there are no others."""
        if divides and domains is not None:
            assert domains.local is not None
            assert domains.across is not None
            self._owners, self.across_domains = (
                Peers(each, waits, named=group) for each in (domains.local, domains.across)
            )
        self.waits = waits
        self.device = group.device if group.updates is None else group.updates.device
        """Device of messages."""
        self.set_observers(observers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicas")
        self._exchanges = 0
        self._abort_messages: list[Work] = []
        """Keeps the buffers of unfinished sends alive."""

    def set_observers(self, observers: Collection[int]) -> None:
        """Let other replicas of the group be observers. Call it in the thread, if exchanges may be under way."""
        self.observers = tuple(sorted(observers))
        """Replicas of the group that only receive."""
        self.is_observer = (me := self.group.rank()) in observers
        senders, receivers = acting_domains(self.group, observers, self._domains)
        self.domains = [*senders, *receivers]
        """Replicas of the group that act as one."""
        self.members = next(domain for domain in self.domains if me in domain)
        """Replicas of the group in this domain, the leader first."""
        self.size = len(senders)
        """Number of replicas that send, R. In `exchange` the observers are numbered after these."""
        self.replica = 0 if self.is_observer else senders.index(self.members)
        """Index of this replica among these; 0 on an observer, whose tensors have the shapes of that replica's."""
        self._ranks = [self.group.ranks[domain[0]] for domain in self.domains]
        self._leader, *self._followers = (self.group.ranks[member] for member in self.members)

    @property
    def owners(self) -> Peers:
        """The replicas that divide the weights with this one."""
        return self._owners or self  # not kept: a cycle would keep the connections of the group

    def name(self, peer: int) -> str:
        """Return the replica `peer` for an error message."""
        return f"replica {self._named.ranks.index(self._ranks[peer])} (rank {self._ranks[peer]})"

    @property
    def is_leader(self) -> bool:
        """Whether this replica sends and saves what is equal on all members of its domain."""
        return self.group.rank() == self.members[0]

    @property
    def state_key(self) -> str:
        """Text that the members of this domain, whose state is equal, have in common, and no others; empty on an
        observer."""
        if self.is_observer:
            return ""
        if len(self.members) == 1:
            return secrets.token_hex(8)
        assert self._domains is not None
        return f"{self._domains.run_id}/{self.members[0]}"

    @property
    def is_single(self) -> bool:
        """Whether no other replica sends to this one or receives from it, as an observer does."""
        return self.group.size() == 1

    def over_domains(self, by_replica: Sequence[float]) -> list[float]:
        """Return for each replica of the group the sum of a number over its domain."""
        sums = {replica: sum(by_replica[each] for each in domain) for domain in self.domains for replica in domain}
        return [sums[replica] for replica in range(len(by_replica))]

    def start_domain_sum(self, tensor: Tensor, meter: Meter) -> Callable[[], None]:
        """Start to sum a tensor over this domain, in place; return a function that waits for it.

        Call it in the training thread, in the same order on all members. That function may raise RunError.
        """
        if len(self.members) == 1:
            return lambda: None
        assert self._domains is not None
        assert self._domains.local is not None
        return self._start_sum(tensor, self._domains.local, meter)

    def start_sum(self, tensor: Tensor, meter: Meter) -> Callable[[], None]:
        """Start to sum a tensor over all replicas, in place: the same one on all members of a domain.

        Returns a function that waits for the sum, which may raise RunError. meter: counts the bytes that are sent.
        """
        if len(self.domains) == self.group.size():
            return self._start_sum(tensor, self.group, meter, counts=True)
        pending = self.submit(partial(self._sum_of_leaders, tensor, meter))
        return lambda: pending.result(meter)

    def _start_sum(self, tensor: Tensor, group: Group, meter: Meter, *, counts: bool = False) -> Callable[[], None]:
        since, work = time.perf_counter(), (group.reductions or group).all_reduce(tensor)
        if counts:
            meter.sent_bytes += self._ring_bytes(tensor, group)

        def wait() -> None:
            with collective_errors("summing gradients", group):
                meter.wait(self.waits, work, since)

        return wait

    @staticmethod
    def _ring_bytes(tensor: Tensor, group: Group) -> int:
        """Return the bytes that each rank of a ring sends to sum a tensor."""
        return 2 * (group.size() - 1) * tensor.nbytes // group.size()

    def _sum_of_leaders(self, tensor: Tensor, meter: Meter) -> None:
        """Sum a tensor over the leaders, and forward the sum to the other members. Runs in the thread."""
        since, message = time.perf_counter(), tensor.to(self.group.device)
        if self.is_leader:
            assert self._domains is not None
            assert self._domains.leaders is not None
            leaders = self._domains.leaders
            with collective_errors("summing gradients", leaders):  # the training thread counts its wait for this one
                self.waits.wait(leaders.all_reduce(message))
            meter.sent_bytes += self._ring_bytes(message, leaders)
            self._wait_for(self._forward([message], LEADER_TAG), since)
        else:
            with self._errors_of(self._leader, since):
                self.waits.wait(self.group.irecv(message, self._leader, LEADER_TAG))
        if message is not tensor:
            tensor.copy_(message)

    @property
    def others(self) -> list[int]:
        """The replicas, without observers, from which this one receives."""
        return [peer for peer in range(self.size) if self.is_observer or peer != self.replica]

    @property
    def receivers(self) -> list[int]:
        """The replicas to which this one sends what is for all: the others, and observers."""
        return [] if self.is_observer else [*self.others, *range(self.size, len(self.domains))]

    def submit(self, work: Callable[[], T]) -> AsyncResult[T]:
        """Run a function in the thread."""
        return AsyncResult(self._thread.submit(work), self.waits)

    def exchange(self, outgoing: Mapping[int, Tensor], longest: Mapping[int, int], meter: Meter) -> dict[int, Tensor]:
        """Send a message to some replicas, and receive one from some. Call it in the thread.

        Returns the messages, by replica, at the start of tensors of their own: they can be viewed in any dtype.

        Args:
            outgoing: Messages to send, by replica, contiguous, on the device of the group; equal on all members of a
                domain. They must not change until this returns.
            longest: Maximum number of bytes to receive, by replica; each of them must send to this one.
            meter: Counts the bytes sent to other domains.

        Raises:
            RunError: A replica failed or timed out; the error names it. Or members of a domain differ.
        """
        self._exchanges += 1
        if self.group.updates is not None and self.is_leader:
            return self._exchange_on_device(self.group.updates, outgoing, longest, meter)
        since, sending = time.perf_counter(), []
        receiving = {peer: self._start_receiving(peer, nbytes, since) for peer, nbytes in longest.items()}
        headers = {peer: self._header(len(message), message.cpu()) for peer, message in outgoing.items()}
        for peer, message in outgoing.items() if self.is_leader else ():
            with self._errors_of(rank := self._ranks[peer], since):
                parts = headers[peer], *message.tensor_split(self.group.connections)
                sending += [(rank, self.group.isend(part, rank, TAG)) for part in parts]
            meter.sent_bytes += _HEADER.size + len(message)
        forwarding = self._compare_in_domain([*headers.values()], since)
        received = {}
        for peer in longest:
            header, received[peer] = self._wait_for_message(peer, receiving.pop(peer), since)
            forwarding += self._forward((header, received[peer]), LEADER_TAG + 1 + peer)
        self._wait_for(sending, since)
        self._wait_for(forwarding, since)
        if meter.trace is not None:
            meter.trace.add("replicas", "exchange with replicas", since, time.perf_counter())
        return received

    def _start_receiving(self, peer: int, longest: int, since: float) -> _Incoming:
        """Start to receive a message of at most `longest` bytes: in parts from its sender, or from the leader."""
        source, tag = (self._ranks[peer], TAG) if self.is_leader else (self._leader, LEADER_TAG + 1 + peer)
        header, buffer = (
            torch.empty(nbytes, dtype=torch.uint8, device=self.group.device) for nbytes in (_HEADER.size, longest)
        )
        parts = buffer.tensor_split(self.group.connections if self.is_leader else 1)
        with self._errors_of(source, since):
            works = [self.group.irecv(part, source, tag) for part in (header, *parts)]
        return _Incoming(source, header, buffer, parts, works)

    def _wait_for_message(self, peer: int, incoming: _Incoming, since: float) -> tuple[Tensor, Tensor]:
        """Wait for a message; return its header and the message. Raises RunError if it is corrupt, or the peer failed.

        If it is shorter than it might be, there are gaps between its parts, which are then put together.
        """
        source, header, buffer, parts, (work, *works) = incoming
        longest = len(buffer)
        with self._errors_of(source, since):
            self.waits.wait(work)
        _, length = _identity(header)
        if length == _ABORTED:  # it sends no more, and no longer receives: this raises
            self._check(peer, header, buffer[:0], longest)
        with self._errors_of(source, since):
            for work in works:
                self.waits.wait(work)
        if length < longest and len(parts) > 1:
            sizes = [len(each) for each in buffer[:length].tensor_split(len(parts))]
            buffer = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        self._check(peer, header, buffer[:length], longest)
        return header, buffer[:length]

    def _exchange_on_device(
        self, updates: Communicator, outgoing: Mapping[int, Tensor], longest: Mapping[int, int], meter: Meter
    ) -> dict[int, Tensor]:
        """Exchange headers over gloo, and then the messages on the device; as `exchange`, on the leader of a domain.

        So all ranks know the lengths, and all messages are encoded: on the device, none waits for the computations of
        another rank. The host waits for the messages, since what it issues next may be what another rank waits for.
        """
        since, empty = time.perf_counter(), torch.empty(0, dtype=torch.uint8)
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()
        headers = {peer: torch.empty(_HEADER.size, dtype=torch.uint8) for peer in longest}
        receiving, sending, received = {}, [], {}
        for peer, header in headers.items():
            with self._errors_of(self._ranks[peer], since):
                receiving[peer] = self.group.irecv(header, self._ranks[peer], TAG)
        for peer, message in outgoing.items():
            with self._errors_of(self._ranks[peer], since):
                work = self.group.isend(self._header(len(message), empty), self._ranks[peer], TAG)
            sending.append((self._ranks[peer], work))
            meter.sent_bytes += _HEADER.size + len(message)
        checked = [self._header(len(each), each.cpu()) for each in outgoing.values()] if self._followers else []
        forwarding = self._compare_in_domain(checked, since)
        for peer, header in headers.items():
            with self._errors_of(self._ranks[peer], since):
                self.waits.wait(receiving[peer])
            self._check(peer, header, empty, longest[peer])  # an aborted peer waits for nothing more
            received[peer] = torch.empty(_identity(header)[1], dtype=torch.uint8, device=self.device)
        self._wait_for(sending, since)
        receive, send = (
            {self._ranks[peer]: each for peer, each in tensors.items()} for tensors in (received, outgoing)
        )
        with collective_errors("exchanging updates", self.group):
            self.waits.wait(updates.all_to_all(receive, send))
        for peer, message in received.items() if self._followers else ():
            copied = message.cpu()
            forwarding += self._forward((self._header(len(copied), copied), copied), LEADER_TAG + 1 + peer)
        self._wait_for(forwarding, since)
        if meter.trace is not None:
            meter.trace.add("replicas", "exchange with replicas", since, time.perf_counter())
        return received

    def _compare_in_domain(self, headers: Sequence[Tensor], since: float) -> list[tuple[int, Work]]:
        """Raise RunError unless the leader of this domain sends the same messages as this member would.

        Returns what the leader has started to send.
        """
        if len(self.members) == 1 or not headers:
            return []
        mine = torch.cat([*headers]).to(self.group.device)
        if self.is_leader:
            return self._forward([mine], LEADER_TAG)
        of_leader = torch.empty_like(mine)
        with self._errors_of(self._leader, since):
            self.waits.wait(self.group.irecv(of_leader, self._leader, LEADER_TAG))
        if not torch.equal(mine, of_leader):
            raise RunError(
                f"rank {dist.get_rank()} on {socket.gethostname()} has other updates than rank {self._leader} of its "
                "domain, with the same gradients: the two compute differently, as GPUs of different models do; resume "
                "from a checkpoint with --dp.local none, or give them different domains (--dp.domain)"
            )
        return []

    def _forward(self, tensors: Sequence[Tensor], tag: int) -> list[tuple[int, Work]]:
        """Start to send tensors to the other members of this domain, if this is the leader."""
        started = []
        for rank in self._followers if self.is_leader else ():
            with self._errors_of(rank, time.perf_counter()):
                started += [(rank, self.group.isend(tensor, rank, tag)) for tensor in tensors]
        return started

    def _wait_for(self, sending: Sequence[tuple[int, Work]], since: float) -> None:
        for rank, work in sending:
            with self._errors_of(rank, since):
                self.waits.wait(work)

    def close(self) -> None:
        """Discard the work that the thread has not begun, and end it. After an interrupt it waits for no peer."""
        self._thread.shutdown(cancel_futures=True)
        for peers in (self._owners, self.across_domains):
            if peers is not None:
                peers.close()

    def abort(self) -> None:
        """Make the next exchange of all other replicas fail now instead of at its timeout.

        Call it in the thread, after a failure.
        """
        header = self._header(_ABORTED, torch.empty(0, dtype=torch.uint8))
        for rank in self._ranks:
            if rank != self.group.ranks[self.group.rank()]:
                with contextlib.suppress(RuntimeError):  # the peer has failed, too
                    self._abort_messages.append(self.group.isend(header, rank, TAG))

    def _header(self, length: int, message: Tensor) -> Tensor:
        """Return the header of a message of the present exchange, uint8[16]."""
        identity = self._exchanges * _LENGTHS % 2**64 + length
        header = identity.to_bytes(_IDENTITY_BYTES, "little")
        packed = bytearray(_HEADER.pack(identity, checksum(header, message)))
        return torch.frombuffer(packed, dtype=torch.uint8)

    def _check(self, peer: int, header: Tensor, message: Tensor, longest: int) -> None:
        """Raise RunError if a message is corrupt, not that of the present exchange, or that of a peer that has failed.

        longest: its maximum number of bytes.
        """
        raw, rank = header.numpy().tobytes(), self._ranks[peer]
        _, expected = _HEADER.unpack(raw)
        number, length = _identity(header)
        if (actual := checksum(raw[:_IDENTITY_BYTES], message)) != expected:
            raise RunError(
                f"{self.name(peer)} sent a corrupt message: its checksum is {actual:016x} instead of "
                f"{expected:016x}; expected message {self._exchanges} of at most {longest} bytes: {REMEDY}"
            )
        if length == _ABORTED:
            raise RunError(f"{self.name(peer)} has failed; see its own error", awaited=[rank])
        if number != self._exchanges % 2**24 or length > longest:
            raise RunError(
                f"{self.name(peer)} sent message {number} of {length} bytes, not message "
                f"{self._exchanges} of at most {longest} bytes: the two run different programs, check that all hosts "
                "have the same acsgd, run file and flags"
            )

    @contextlib.contextmanager
    def _errors_of(self, rank: int, since: float) -> Iterator[None]:
        """Name the rank in errors of its messages."""
        try:
            yield
        except RuntimeError as error:
            replica = self._named.ranks.index(rank)
            raise RunError(
                f"rank {dist.get_rank()} on {socket.gethostname()}: exchanging updates with replica {replica}, rank "
                f"{rank}, failed after {time.perf_counter() - since:.1f} s ({reason(error)})",
                awaited=[rank],
            ) from error
