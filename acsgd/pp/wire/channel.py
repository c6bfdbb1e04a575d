"""What both ends of a one-way wire between two ranks know of it, and how they make sure of that.

n = bytes of a message: a header of 32, then the fields of a codec. One message per tensor. The header says what
the message is, so that a receiver that is out of step names both what it expected and what came.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.errors import RunError, reason
from acsgd.meter import Meter
from acsgd.pp.wire.coder import Coder, TensorSpec
from acsgd.pp.wire.frame import HEADER_BYTES, Header, Kind
from acsgd.streams import Streams

NOT_FINITE = 0
"""Length of the message of a tensor that a codec cannot encode. It arrives as NaN, so that the step comes to its end on
all ranks, which then decide alike: an overflow in fp16, an update to leave out, or an end that names its origin."""


@dataclass(frozen=True)
class Channel:
    """A one-way wire: who is at its ends, what travels, and in which form."""

    kind: Kind
    boundary: int
    peer: int
    """Global rank of the other end."""
    group: dist.ProcessGroup
    tensors: Mapping[str, TensorSpec]
    form: str
    """The spec of what travels in training, for the ends to compare."""
    coders: Mapping[str, Coder]
    """This end's coder of each tensor."""
    streams: Streams
    meter: Meter

    @property
    def capacities(self) -> list[int]:
        """Bytes of the longest message of each tensor."""
        return [HEADER_BYTES + coder.capacity for coder in self.coders.values()]

    def tag(self, tensor: int) -> int:
        """Tell this wire's messages from those of every other wire between the same two ranks."""
        return (self.boundary * len(Kind) + self.kind) * 16 + tensor

    def digest(self) -> int:
        """Hash what must be equal at both ends."""
        text = repr((self.kind, self.boundary, list(self.tensors.items()), self.form))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    @contextlib.contextmanager
    def with_peer(self, doing: str, since: float) -> Iterator[None]:
        """Say of a failure what was being done with the other end, and since when, a time.perf_counter()."""
        try:
            yield
        except RuntimeError as error:
            raise RunError(
                f"rank {dist.get_rank()} on {socket.gethostname()}: {doing} rank {self.peer} failed after "
                f"{time.perf_counter() - since:.1f} s ({reason(error)})",
                awaited=[self.peer],
            ) from error


class Exchange:
    """A message of n bytes from each end to the other, both under way at once; what they tell each other about a wire.

    mine: uint8[n], as long as what the other end sends.
    """

    def __init__(self, channel: Channel, mine: Tensor, *, tag: int, doing: str) -> None:
        self._channel = channel
        self._doing = doing
        self._mine, self._theirs = mine, torch.empty_like(mine)
        self._since = time.perf_counter()
        with channel.with_peer(doing, self._since):
            self._receiving = dist.irecv(self._theirs, channel.peer, channel.group, channel.tag(tag))
            self._sending = dist.isend(mine, channel.peer, channel.group, channel.tag(tag))

    def theirs(self) -> Tensor:
        """Wait for what the other end says, uint8[n]."""
        with self._channel.with_peer(self._doing, self._since):
            assert self._receiving is not None
            assert self._sending is not None
            self._receiving.wait()
            self._sending.wait()
        return self._theirs


def handshake(channel: Channel) -> None:
    """Exchange what each end will send or expect, while a difference is still an error and not a crash.

    gloo aborts the process when a message is longer than the buffer posted for it.
    """
    mine = Header(Kind.HELLO, channel.kind, channel.boundary, channel.digest(), 0, sum(channel.capacities))
    message = torch.frombuffer(bytearray(mine.pack()), dtype=torch.uint8)
    check_header(Exchange(channel, message, tag=15, doing="greeting").theirs(), mine, channel.peer)


def check_header(buffer: Tensor, expected: Header, peer: int, *, shorter: bool = False) -> Header:
    """Return the header of a message, which must be the expected one or say that its tensor was not finite.

    shorter: whether the message may have fewer bytes than expected. Raises RunError.
    """
    try:
        got = Header.unpack(bytes(buffer[:HEADER_BYTES].tolist()))
    except ValueError as error:
        raise RunError(f"rank {peer} sent bytes that are no message: {error}; expected {expected}") from None
    if shorter and got.length < expected.length:
        expected = expected._replace(length=got.length)
    if got not in (expected, expected._replace(length=NOT_FINITE)):
        raise RunError(
            f"rank {peer} sent {got}; expected {expected}: the two ranks run different programs, "
            "check that all hosts have the same acsgd, run file and flags"
        )
    return got
