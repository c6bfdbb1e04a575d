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

from acsgd.errors import RunError, reason
from acsgd.meter import Meter

T = TypeVar("T")
TAG = 2
"""Of messages between replicas; those of collectives have tags of their own."""
_FRAME = struct.Struct("<QQ")
"""Round, bytes that follow. A receiver that is out of step says so instead of taking one message for another."""
_GAVE_UP = 2**64 - 1
"""In place of the bytes that follow: nothing will, now or later."""


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
        self._last_words: list[dist.Work] = []
        """Kept, since what is on its way needs its buffer."""

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
                receiving[peer] = _begun(dist.irecv(buffers[peer], self._ranks[peer], self.group, TAG))
        for peer, message in outgoing.items():
            frame = bytearray(_FRAME.pack(self._rounds, len(message)))
            framed = torch.cat([torch.frombuffer(frame, dtype=torch.uint8), message])
            with self._with(peer, since):
                sending[peer] = _begun(dist.isend(framed, self._ranks[peer], self.group, TAG))
            meter.sent_bytes += len(framed)
        told = {}
        for peer, buffer in buffers.items():
            with self._with(peer, since):
                receiving[peer].wait()
            told[peer] = self._body(peer, buffer)  # before what this one would no longer receive is waited for
        for peer, sent in sending.items():
            with self._with(peer, since):
                sent.wait()
        return told

    def give_up(self) -> None:
        """Tell all others that nothing will follow, so that none waits for it until the timeout.

        To be called in the thread, after a failure; their next `swap` fails.
        """
        frame = torch.frombuffer(bytearray(_FRAME.pack(self._rounds, _GAVE_UP)), dtype=torch.uint8)
        for peer, rank in enumerate(self._ranks):
            if peer != self.replica:
                with contextlib.suppress(RuntimeError):  # it is gone itself
                    self._last_words.append(_begun(dist.isend(frame, rank, self.group, TAG)))

    def _body(self, peer: int, buffer: Tensor) -> Tensor:
        number, length = _FRAME.unpack(bytes(buffer[: _FRAME.size].tolist()))
        if length == _GAVE_UP:
            rank = self._ranks[peer]
            raise RunError(f"replica {peer}, rank {rank}, has given up; its own error says why", awaited=[rank])
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


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only ranks outside of the group get none"
    return work
