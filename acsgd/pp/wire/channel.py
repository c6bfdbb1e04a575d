"""Channels: one direction of traffic between two ranks, and the checks that both ends agree on it.

A message is a 48-byte header and the encoded fields of one tensor. The header identifies the message, so a receiver
that is out of step reports both what it expected and what it received. Its checksum covers the whole message.
"""

# n bytes of a message

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.process_groups import Group
from acsgd.comm.waits import Meter, Waits, Work
from acsgd.errors import RunError, reason
from acsgd.io.files.checksum import REMEDY
from acsgd.pp.wire.coder import Coder, TransferInfo
from acsgd.pp.wire.frame import HEADER_BYTES, Header, MessageKind
from acsgd.streams import Streams

NOT_FINITE = 0
"""Message length that marks a tensor that the codec cannot encode. The receiver decodes it as NaN, so all ranks
complete the step and decide alike: reduce the loss scale, skip the update, or stop and report the origin."""

_TAGS_PER_CHANNEL = 16
"""gloo matches messages by tag. A channel uses one tag per tensor, 0 to 13, and the two below."""
_UNTRACED = contextlib.nullcontext()
CACHE_SYNC_TAG = 14
HANDSHAKE_TAG = 15


@dataclass(frozen=True)
class Channel:
    """One end of a one-way channel: peer, content and encoding."""

    kind: MessageKind
    boundary: int
    """Index of the stage before the boundary."""
    peer: int
    """Global rank of the other end."""
    group: Group
    waits: Waits
    codec: str
    """Codec and options, compared by the handshake."""
    coders: Mapping[str, Coder]
    """This end's coder of each named tensor."""
    streams: Streams
    meter: Meter
    has_known_sizes: bool = True
    """Whether both ends know the size of each message before, as transports other than gloo need."""

    @property
    def max_message_bytes(self) -> list[int]:
        """Length of the longest message of each tensor, bytes."""
        return [HEADER_BYTES + coder.max_bytes for coder in self.coders.values()]

    def send(self, message: Tensor, index: int) -> Work:
        """Start to send a message, uint8[n]; index: of its tensor. Raises RuntimeError as gloo does."""
        return self.group.isend(message, self.peer, self.tag(index))

    def receive(self, buffer: Tensor, index: int) -> Work:
        """Start to receive the next message of a tensor into a buffer. Raises RuntimeError as gloo does."""
        return self.group.irecv(buffer, self.peer, self.tag(index))

    def wait(self, work: Work, posted_at: float) -> None:
        """Wait for a message and count its time; see `Meter.wait`."""
        self.meter.wait(self.waits, work, posted_at)

    def header(self, index: int, info: TransferInfo, length: int) -> Header:
        """Return the header of a message. index: of the tensor; length: in bytes."""
        return Header(self.kind, index, self.boundary, info.step, info.micro, length, *(info.lengths or ()))

    def trace_codec(self, work: str, name: str) -> contextlib.AbstractContextManager[None]:
        """Record the time in which a tensor is encoded or decoded, if the step is traced. name: of the tensor."""
        trace = self.meter.trace
        return _UNTRACED if trace is None else trace.span("codec", f"{work} {name}", codec=self.codec)

    def trace_message(self, category: Literal["send", "receive"], header: Header, start: float, end: float) -> None:
        """Record a message of a step that is traced. Both ends record equal details, except for the length."""
        assert self.meter.trace is not None
        key = self.kind, header.boundary, header.step, header.micro, header.tensor
        name = f"{self.kind.plural} of {header.micro}"
        self.meter.trace.add(category, name, start, end, peer=self.peer, key=key, bytes=header.length + HEADER_BYTES)

    def tag(self, index: int) -> int:
        """Return a gloo tag that no other channel of the two ranks uses; index: of a tensor, or a reserved tag."""
        return (self.boundary * len(MessageKind) + self.kind) * _TAGS_PER_CHANNEL + index

    def digest(self) -> int:
        """Return a 32-bit hash of everything that must be equal at both ends."""
        tensors = [(name, coder.spec) for name, coder in self.coders.items()]
        text = repr((self.kind, self.boundary, tensors, self.codec))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    @contextlib.contextmanager
    def report_failure(self, action: str, since: float) -> Iterator[None]:
        """Convert a RuntimeError of gloo into a RunError that names both ranks and the action.

        action: a participle and a preposition, such as "sending to"; since: its start, a time.perf_counter().
        """
        try:
            yield
        except RuntimeError as error:
            raise RunError(
                f"rank {dist.get_rank()} on {socket.gethostname()}: {action} rank {self.peer} failed after "
                f"{time.perf_counter() - since:.1f} s ({reason(error)})",
                awaited=[self.peer],
            ) from error


class Exchange:
    """A non-blocking exchange of n bytes in both directions between the ends of a channel.

    data: this end's bytes, uint8[n]; n must be equal at both ends. action: see `Channel.report_failure`.
    """

    def __init__(self, channel: Channel, data: Tensor, *, tag: int, action: str) -> None:
        self._channel = channel
        self._action = action
        self._data, self._received = data, torch.empty_like(data)
        self._started_at = time.perf_counter()
        with channel.report_failure(action, self._started_at):
            self._receive = channel.receive(self._received, tag)
            self._send = channel.send(data, tag)

    def wait(self) -> Tensor:
        """Wait for the other end's bytes and return them, uint8[n]."""
        with self._channel.report_failure(self._action, self._started_at):
            self._channel.waits.wait(self._receive)
            self._channel.waits.wait(self._send)
        return self._received


def handshake(channel: Channel) -> None:
    """Compare codec and tensors with the other end of a channel. Raises RunError if they differ.

    Without this check, a message longer than the buffer posted for it makes gloo abort the process.
    """
    ours = Header(
        MessageKind.HANDSHAKE, channel.kind, channel.boundary, channel.digest(), 0, sum(channel.max_message_bytes)
    )
    exchange = Exchange(channel, ours.packed(), tag=HANDSHAKE_TAG, action="opening a channel with")
    check_header(read_header(exchange.wait(), ours, channel.peer), ours, channel.peer)


def read_header(buffer: Tensor, expected: Header, peer: int, *, context: bytes = b"") -> Header:
    """Return the header of a message, whichever it is. Raises RunError if it does not match its checksum.

    buffer: the message, in host memory; expected: named in the error; context: see `Header.pack`.
    """
    try:
        return Header.unpack(buffer, context)
    except ValueError as error:
        raise RunError(f"rank {peer} sent a corrupt message: {error}; expected {expected}: {REMEDY}") from None


def check_header(received: Header, expected: Header, peer: int, *, allow_shorter: bool = False) -> Header:
    """Return a received header. Raises RunError unless it is the expected one or its length is NOT_FINITE.

    allow_shorter: whether the message may have fewer bytes than expected, which entropy-coded messages have.
    """
    if allow_shorter and received.length < expected.length:
        expected = expected._replace(length=received.length)
    if received not in (expected, expected._replace(length=NOT_FINITE)):
        raise RunError(
            f"rank {peer} sent {received}; expected {expected}: the two ranks run different programs, "
            "check that all hosts have the same acsgd, run file, flags and texts"
        )
    return received
