"""The replicas of one part of the model, and point-to-point messages between them.

R replicas; a message is uint8[n], at least one byte.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.process_groups import Group
from acsgd.comm.waits import Meter, Waits, Work
from acsgd.errors import RunError, reason
from acsgd.io.files.checksum import CHECKSUM_BYTES, REMEDY, checksum

T = TypeVar("T")
TAG = 2
"""Tag of messages between replicas."""
_HEADER = struct.Struct("<QQ")
"""Identity of the message, and the checksum of identity and message.

The identity is the number of the exchange, which detects replicas that are out of step, modulo 2**24, and the length of
the message in bytes, in the low 40 bits.
"""
_IDENTITY_BYTES = _HEADER.size - CHECKSUM_BYTES
_LENGTHS = 2**40
_ABORTED = _LENGTHS - 1
"""Length in the header of a replica that has failed and sends nothing more."""


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
    send nothing, since their state is on its way.
    """

    def __init__(self, group: Group, waits: Waits, observers: Collection[int] = ()) -> None:
        self.group = group
        self.waits = waits
        self.device = group.device
        """Device of messages."""
        self.set_observers(observers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicas")
        self._exchanges = 0
        self._abort_messages: list[Work] = []
        """Keeps the buffers of unfinished sends alive."""

    def set_observers(self, observers: Collection[int]) -> None:
        """Let other replicas of the group be observers. Call it in the thread, if exchanges may be under way."""
        members = [replica for replica in range(self.group.size()) if replica not in observers]
        self.observers = tuple(sorted(observers))
        """Replicas of the group that only receive. In `exchange` they are numbered after the R others."""
        self.is_observer = self.group.rank() in observers
        self.size = len(members)
        """Number of replicas that send, R."""
        self.replica = 0 if self.is_observer else members.index(self.group.rank())
        """Index of this replica among these; 0 on an observer, whose tensors have the shapes of that replica's."""
        self._ranks = [self.group.ranks[replica] for replica in (*members, *self.observers)]

    @property
    def is_single(self) -> bool:
        """Whether no other replica sends to this one or receives from it, as an observer does."""
        return self.size + len(self.observers) == 1

    @property
    def others(self) -> list[int]:
        """The replicas, without observers, from which this one receives."""
        return [peer for peer in range(self.size) if self.is_observer or peer != self.replica]

    @property
    def receivers(self) -> list[int]:
        """The replicas to which this one sends what is for all: the others, and observers."""
        return [] if self.is_observer else [*self.others, *range(self.size, self.group.size())]

    def submit(self, work: Callable[[], T]) -> AsyncResult[T]:
        """Run a function in the thread."""
        return AsyncResult(self._thread.submit(work), self.waits)

    def exchange(self, outgoing: Mapping[int, Tensor], longest: Mapping[int, int], meter: Meter) -> dict[int, Tensor]:
        """Send a message to some replicas, and receive one from some. Call it in the thread.

        Args:
            outgoing: Messages to send, by replica, on the device of the group.
            longest: Maximum number of bytes to receive, by replica; each of them must send to this one.
            meter: Counts the bytes sent.

        Raises:
            RunError: A replica failed or timed out; the error names it.
        """
        self._exchanges += 1
        since, buffers, receiving, sending = time.perf_counter(), {}, {}, {}
        for peer, nbytes in longest.items():
            buffers[peer] = torch.empty(_HEADER.size + nbytes, dtype=torch.uint8, device=self.device)
            with self._errors_of(peer, since):
                receiving[peer] = self.group.irecv(buffers[peer], self._ranks[peer], TAG)
        for peer, message in outgoing.items():
            framed = torch.cat([self._header(len(message), message), message])
            with self._errors_of(peer, since):
                sending[peer] = self.group.isend(framed, self._ranks[peer], TAG)
            meter.sent_bytes += len(framed)
        received = {}
        for peer, buffer in buffers.items():
            with self._errors_of(peer, since):
                self.waits.wait(receiving[peer])
            received[peer] = self._body(peer, buffer)  # an aborted peer no longer receives: raise before waiting for it
        for peer, sent in sending.items():
            with self._errors_of(peer, since):
                self.waits.wait(sent)
        if meter.trace is not None:
            meter.trace.add("replicas", "exchange with replicas", since, time.perf_counter())
        return received

    def close(self) -> None:
        """Discard the work that the thread has not begun, and end it. After an interrupt it waits for no peer."""
        self._thread.shutdown(cancel_futures=True)

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

    def _body(self, peer: int, buffer: Tensor) -> Tensor:
        """Return the message in a buffer. Raises RunError if it is corrupt, or not that of the present exchange."""
        raw, rest, rank = buffer[: _HEADER.size].numpy().tobytes(), buffer[_HEADER.size :], self._ranks[peer]
        identity, expected = _HEADER.unpack(raw)
        number, length = divmod(identity, _LENGTHS)
        message = rest[: 0 if length == _ABORTED else min(length, len(rest))]
        if (actual := checksum(raw[:_IDENTITY_BYTES], message)) != expected:
            raise RunError(
                f"replica {peer} (rank {rank}) sent a corrupt message: its checksum is {actual:016x} instead of "
                f"{expected:016x}; expected message {self._exchanges} of at most {len(rest)} bytes: {REMEDY}"
            )
        if length == _ABORTED:
            raise RunError(f"replica {peer}, rank {rank}, has failed; see its own error", awaited=[rank])
        if number != self._exchanges % 2**24 or length > len(rest):
            raise RunError(
                f"replica {peer} (rank {rank}) sent message {number} of {length} bytes, not message "
                f"{self._exchanges} of at most {len(rest)} bytes: the two run different programs, check that all hosts "
                "have the same acsgd, run file and flags"
            )
        return message

    @contextlib.contextmanager
    def _errors_of(self, peer: int, since: float) -> Iterator[None]:
        """Name the replica in errors of its messages."""
        try:
            yield
        except RuntimeError as error:
            rank = self._ranks[peer]
            raise RunError(
                f"rank {dist.get_rank()} on {socket.gethostname()}: exchanging updates with replica {peer}, rank "
                f"{rank}, failed after {time.perf_counter() - since:.1f} s ({reason(error)})",
                awaited=[rank],
            ) from error
