"""Communicators of transports that keep tensors on the device, such as NCCL, and the watch that ends them."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.liveness import PeerWatch, heartbeat_interval_s
from acsgd.comm.waits import DeviceWork, HostWork, QueryableWork
from acsgd.errors import RunError, WaitInterruptedError


class Backend(Protocol):
    """The methods of torch's backends that a communicator uses. Ranks are positions among its ranks."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> QueryableWork: ...  # noqa: N803  # torch's names

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> QueryableWork: ...  # noqa: N803

    def allreduce(self, tensors: list[Tensor]) -> QueryableWork: ...

    def alltoall(self, output_tensor: list[Tensor], input_tensor: list[Tensor]) -> QueryableWork: ...

    def get_error(self) -> Any: ...  # an ErrorType, which torch keeps to itself

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


class OrderedTransport(NamedTuple):
    """What carries tensors of a device in the order of issue, such as NCCL.

    There are no tags: each communicator performs its operations one after another, and those of its ranks must
    match. A send may last until its receive, and all that is issued after it with it.
    """

    name: str
    open: Callable[[dist.Store, int, int, timedelta], Backend]
    """Opens a communicator. Takes a separate store, the position of this rank, the number of ranks and the timeout of
    operations."""


_OF_TORCH = 10
"""Limit of torch for an operation, relative to that of the watch: torch counts from its issue, often a step ahead of
the device, and afterwards takes it for completed."""


def _open_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _OF_TORCH * timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[return-value]  # torch's stubs lack send


NCCL = OrderedTransport("nccl", _open_nccl)


class IssuedOperation(NamedTuple):
    """An operation of a communicator that has been issued."""

    work: DeviceWork
    verb: str
    subject: object
    """What is sent, received or summed."""
    others: Sequence[int]
    """The other ranks that take part in it."""
    issued_at: float
    """A time.monotonic()."""


class Communicator:
    """Ranks whose operations on device tensors run in the order of issue; see `OrderedTransport`.

    ranks: all of them; position: that of this rank; subject: what is sent, received or summed, for errors; device: of
    the tensors.
    """

    def __init__(
        self, backend: Backend, ranks: Sequence[int], position: int, subject: str, device: torch.device
    ) -> None:
        self.device = device
        self.is_aborted = False
        self._backend = backend
        self._ranks = ranks
        self._others = [rank for rank in ranks if rank != ranks[position]]
        self._subject = subject
        self._issued: deque[IssuedOperation] = deque()
        """Those that may not have ended."""
        self._lock = threading.Lock()
        """Guards the operations, which the watch reads."""
        self._latest: IssuedOperation | None = None
        """The latest that has ended."""
        self.ended = 0
        """Number of operations that have ended."""

    def isend(self, tensor: Tensor, rank: int, subject: object = None) -> DeviceWork:
        """Start to send a tensor to a global rank, after the work of the current stream."""
        work = self._backend.send([tensor], self._ranks.index(rank), 0)
        return self._note(work, "sending", subject, [rank])

    def irecv(self, buffer: Tensor, rank: int, subject: object = None) -> DeviceWork:
        """Start to receive a tensor, which has as many bytes as the buffer, from a global rank."""
        work = self._backend.recv([buffer], self._ranks.index(rank), 0)
        return self._note(work, "receiving", subject, [rank])

    def all_reduce(self, tensor: Tensor) -> DeviceWork:
        """Start to sum a tensor of each member, in place, after the work of the current stream."""
        return self._note(self._backend.allreduce([tensor]), "summing", None, self._others)

    def all_to_all(self, receive: Mapping[int, Tensor], send: Mapping[int, Tensor]) -> HostWork:
        """Start to receive a tensor from some global ranks, and to send one to some; all ranks call it together.

        uint8[n] each, of lengths that both ends know.
        """
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        received, sent = ([tensors.get(rank, nothing) for rank in self._ranks] for tensors in (receive, send))
        work = self._backend.alltoall(received, sent)
        return HostWork(self._note(work, "exchanging", None, self._others), lambda: self.is_aborted)

    def oldest(self) -> IssuedOperation | None:
        """Return the first operation that has not ended; None if all have. From any thread."""
        with self._lock:
            while self._issued and self._issued[0].work.is_completed():
                self._latest = self._issued.popleft()
                self.ended += 1
            return self._issued[0] if self._issued else None

    def failed(self) -> IssuedOperation | None:
        """Return about which operation has failed, such as by a broken connection; None if none has.

        torch takes operations that have failed for completed, while the device may still wait for them.
        """
        return None if self._backend.get_error().name == "SUCCESS" else self.oldest() or self._latest

    def abort(self) -> None:
        """End all operations, now and for good, without the other ranks."""
        self.is_aborted = True
        self._backend.abort()

    def close(self) -> None:
        """Close it; no operation is in progress."""
        self._backend.shutdown()

    def _note(self, work: QueryableWork, verb: str, subject: object, others: Sequence[int]) -> DeviceWork:
        self.oldest()  # drops those that have ended
        operation = IssuedOperation(DeviceWork(work), verb, subject or self._subject, others, time.monotonic())
        with self._lock:
            self._issued.append(operation)
        return operation.work


class CommunicatorWatch:
    """A thread that ends the operations of communicators if one lasts too long, or if its ranks have ended.

    NCCL waits for ever for a rank that has ended, and on a GPU the host waits for its device meanwhile.

    communicators: returns those that are open; rank: this one; timeout_s: time without the end of any operation, while
    there is one, seconds; interrupt: aborts the communicators, and all other waits of this rank.
    """

    def __init__(
        self,
        communicators: Callable[[], Sequence[Communicator]],
        rank: int,
        peers: PeerWatch,
        timeout_s: float,
        interrupt: Callable[[], None],
    ) -> None:
        self.lost: RunError | None = None
        """Why the operations were ended; None before."""
        self._communicators = communicators
        self._rank = rank
        self._peers = peers
        self._timeout_s = timeout_s
        self._interrupt = interrupt
        self._ended, self._ended_at = 0, time.monotonic()
        """Number of operations that have ended, and when the latest did."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="communicators", daemon=True)
        self._thread.start()

    def close(self, *, within_s: float | None = None) -> None:
        """End the thread. within_s: maximum time to wait for it, seconds; None = no limit."""
        self._closed.set()
        self._thread.join(within_s)

    def check(self, now: float) -> None:
        """Raise RunError if an operation will not end. now: a time.monotonic()."""
        communicators = self._communicators()
        running = [operation for each in communicators if (operation := each.oldest()) is not None]
        failed = [operation for each in communicators if (operation := each.failed()) is not None]
        if (ended := sum(each.ended for each in communicators)) != self._ended:
            self._ended, self._ended_at = ended, now
        if not running + failed:
            return
        first = min(failed or running, key=lambda operation: operation.issued_at)
        try:
            self._peers.check(sorted({rank for operation in running + failed for rank in operation.others}))
            if failed:
                raise RunError("a connection has broken", awaited=first.others)
            if now - max(first.issued_at, self._ended_at) > self._timeout_s:
                raise RunError(f"not done after {self._timeout_s:g} s (run.timeout)", awaited=first.others)
        except RunError as error:
            where = f"rank {self._rank} on {socket.gethostname()}: {first.verb} {first.subject}, with ranks"
            raise type(error)(f"{where} {[*first.others]}: {error}", awaited=error.awaited) from error

    def _run(self) -> None:
        try:
            while not self._closed.wait(heartbeat_interval_s(self._timeout_s)):
                self.check(time.monotonic())
        except WaitInterruptedError:
            pass  # what has interrupted the waits aborts the communicators, too
        except RunError as error:
            self.lost = error
            self._interrupt()
