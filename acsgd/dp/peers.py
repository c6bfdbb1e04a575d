"""The replicas of one part of the model, seen from one of them: who they are, and messages between them.

R replicas; a message is uint8[n], at least one byte.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.failure import RunError, reason
from acsgd.meter import Meter

T = TypeVar("T")
TAG = 2
"""Of messages between replicas; those of collectives have tags of their own."""
_FRAME = struct.Struct("<QQ")
"""Round, bytes that follow. A receiver that is out of step says so instead of taking one message for another."""


class UnderWay(Generic[T]):
    """Something that the thread does."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._since = time.perf_counter()

    def wait(self) -> bool:
        """Block until it is done. Raises what it has raised."""
        self._future.result()
        return True

    def result(self, meter: Meter) -> T:
        """Wait for it, counted by `meter`, and return what came of it. Raises what it has raised."""
        meter.wait(self, self._since)
        return self._future.result()


class Peers:
    """This replica and all others.

    What is exchanged beside the training goes through one thread per rank, in the order in which it was begun: the same
    on all replicas.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        """R."""
        self.replica = group.rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicas")
        self._rounds = 0

    def begin(self, work: Callable[[], T]) -> UnderWay[T]:
        """Do something in the thread."""
        return UnderWay(self._thread.submit(work))

    def swap(self, outgoing: Mapping[int, Tensor], longest: Mapping[int, int], meter: Meter) -> dict[int, Tensor]:
        """Send a message to each of some replicas, wait, and return those that they send, by replica.

        outgoing: in host memory; longest: the most bytes that each may send. Those that are named here must name this
        replica. To be called in the thread. Raises RunError that names the replica which does not do its part.
        """
        self._rounds += 1
        since, buffers, receiving, sending = time.perf_counter(), {}, {}, {}
        for peer, nbytes in longest.items():
            buffers[peer] = torch.empty(_FRAME.size + nbytes, dtype=torch.uint8)
            with self._with(peer, since):
                receiving[peer] = dist.irecv(buffers[peer], self._ranks[peer], self.group, TAG)
        for peer, message in outgoing.items():
            frame = bytearray(_FRAME.pack(self._rounds, len(message)))
            framed = torch.cat([torch.frombuffer(frame, dtype=torch.uint8), message])
            with self._with(peer, since):
                sending[peer] = dist.isend(framed, self._ranks[peer], self.group, TAG)
            meter.sent_bytes += len(framed)
        for works in (receiving, sending):
            for peer, work in works.items():
                with self._with(peer, since):
                    assert work is not None
                    work.wait()
        return {peer: self._body(peer, buffer) for peer, buffer in buffers.items()}

    def _body(self, peer: int, buffer: Tensor) -> Tensor:
        number, length = _FRAME.unpack(bytes(buffer[: _FRAME.size].tolist()))
        if number != self._rounds or length > len(buffer) - _FRAME.size:
            raise RunError(
                f"replica {peer} (rank {self._ranks[peer]}) sent message {number} of {length} bytes, not message "
                f"{self._rounds} of at most {len(buffer) - _FRAME.size}: the two run different programs, check that "
                "all hosts have the same acsgd, run file and flags"
            )
        return buffer[_FRAME.size : _FRAME.size + length]

    @contextlib.contextmanager
    def _with(self, peer: int, since: float) -> Iterator[None]:
        """Say of a failure with whom it was."""
        try:
            yield
        except RuntimeError as error:
            rank = self._ranks[peer]
            raise RunError(
                f"rank {dist.get_rank()} on {socket.gethostname()}: exchanging updates with replica {peer}, rank "
                f"{rank}, failed after {time.perf_counter() - since:.1f} s ({reason(error)})",
                awaited=[rank],
            ) from error
