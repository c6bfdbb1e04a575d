"""The wire between two ranks of a pipeline: framed messages over gloo, posted ahead, never pickled.

n = bytes of a message: a header of 32, then the fields of a codec. One message per tensor. The header says what
the message is, so that a receiver that is out of step names both what it expected and what came.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.codecs.base import Codec, NotFiniteError, Wire, pack, unpack, wire_bytes
from acsgd.codecs.identity import Identity
from acsgd.failure import RunError, reason
from acsgd.meter import Meter, Work
from acsgd.pp.frame import HEADER_BYTES, Header, Kind
from acsgd.shards.base import State
from acsgd.streams import Mark, Streams

EXACT = Identity()
"""The codec of what must arrive as it was."""
NOT_FINITE = 0
"""Length of the message of a tensor that a codec cannot encode. It arrives as NaN, so that the step comes to its end on
all ranks, which then decide alike: an overflow in fp16, an update to leave out, or an end that names its origin."""
MAX_UNSENT = 16
"""Messages that may wait for a slow peer before the sender waits too; bounds the memory of their buffers."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor before encoding and after decoding."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Channel:
    """What both ends of a one-way wire know: who they are, what travels, and in which form."""

    kind: Kind
    boundary: int
    peer: int
    """Global rank of the other end."""
    group: dist.ProcessGroup
    tensors: Mapping[str, TensorSpec]
    codec: Codec
    """Of what travels in training; `EXACT` of what is told to travel exactly."""
    streams: Streams
    meter: Meter

    def codec_for(self, *, exact: bool) -> Codec:
        """Return the codec of a message."""
        return EXACT if exact else self.codec

    def wires(self, *, exact: bool) -> list[Wire]:
        """Declare the fields of each named tensor."""
        codec = self.codec_for(exact=exact)
        return [codec.wire(spec.shape, spec.dtype) for spec in self.tensors.values()]

    def capacities(self) -> list[int]:
        """Return the bytes of the longest message of each named tensor."""
        forms = zip(self.wires(exact=False), self.wires(exact=True), strict=True)
        return [HEADER_BYTES + max(map(wire_bytes, wires)) for wires in forms]

    def tag(self, tensor: int) -> int:
        """Tell this wire's messages from those of every other wire between the same two ranks."""
        return (self.boundary * len(Kind) + self.kind) * 16 + tensor

    def digest(self) -> int:
        """Hash what must be equal at both ends."""
        text = repr((self.kind, self.boundary, list(self.tensors.items()), self.codec))
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


class _Buffers:
    """Host buffers of one tensor's messages, used again and again; each has room for the longest."""

    def __init__(self, size: int, streams: Streams) -> None:
        self._size = size
        self._streams = streams
        self._free: deque[tuple[Tensor, Mark]] = deque()

    def take(self) -> Tensor:
        """Return a buffer that nobody reads any more."""
        if self._free and self._free[0][1].ready():
            return self._free.popleft()[0]
        return self._streams.host_buffer(self._size)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back; the device may still be copying from it."""
        self._free.append((buffer, self._streams.mark()))


class Outbox:
    """The sending end. A message is handed to gloo as soon as its bytes are there, and sent when the peer is ready."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._doing = f"sending {channel.kind.name.lower().replace('_', ' ')}s to"
        self._buffers = [_Buffers(size, channel.streams) for size in channel.capacities()]
        self._wires = {exact: channel.wires(exact=exact) for exact in (False, True)}
        self._encoding: deque[tuple[int, Tensor, int, Mark]] = deque()
        self._unsent: deque[tuple[int, Tensor, Work, float]] = deque()

    def send(self, step: int, micro: int, state: State, *, exact: bool = False) -> None:
        """Encode each tensor into a message and let it leave; the tensors may be reused at once.

        exact: without the channel's codec; the other end must expect the same.
        """
        for index, name in enumerate(self._channel.tensors):
            self._encode(index, state[name], step, micro, exact)
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Hand encoded messages to gloo; wait: also those that the device has not finished."""
        while self._encoding and (wait or self._encoding[0][3].ready()):
            index, buffer, length, mark = self._encoding.popleft()
            mark.wait()
            posted_at = time.perf_counter()
            with self._channel.with_peer(self._doing, posted_at):
                work = dist.isend(buffer[:length], self._channel.peer, self._channel.group, self._channel.tag(index))
            assert work is not None
            self._unsent.append((index, buffer, work, posted_at))
            self._channel.meter.sent_bytes += length
        while len(self._unsent) > MAX_UNSENT:
            self._finish_oldest()

    def drain(self) -> None:
        """Block until every message has been sent."""
        self.flush(wait=True)
        while self._unsent:
            self._finish_oldest()

    def _encode(self, index: int, x: Tensor, step: int, micro: int, exact: bool) -> None:
        channel, length = self._channel, wire_bytes(self._wires[exact][index])
        buffer = self._buffers[index].take()
        with channel.streams.beside(x):
            try:
                pack(channel.codec_for(exact=exact).encode(x), buffer[HEADER_BYTES : HEADER_BYTES + length])
            except NotFiniteError:
                length = NOT_FINITE
            header = Header(channel.kind, index, channel.boundary, step, micro, length)
            buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
            self._encoding.append((index, buffer, HEADER_BYTES + length, channel.streams.mark()))

    def _finish_oldest(self) -> None:
        index, buffer, work, posted_at = self._unsent.popleft()
        with self._channel.with_peer(self._doing, posted_at):
            self._channel.meter.wait(work, time.perf_counter())  # the receiver counts the time of the transfer
        self._buffers[index].give_back(buffer)


class Inbox:
    """The receiving end. Receives are posted in the order in which the peer sends, before they are needed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._doing = f"expecting {channel.kind.name.lower().replace('_', ' ')}s from"
        self._wires = {exact: channel.wires(exact=exact) for exact in (False, True)}
        self._buffers = [_Buffers(size, channel.streams) for size in channel.capacities()]
        self._posted: list[deque[tuple[Tensor, Work, float]]] = [deque() for _ in self._buffers]

    def post(self) -> None:
        """Expect the next micro-batch: one message per named tensor."""
        for index, buffers in enumerate(self._buffers):
            buffer, posted_at = buffers.take(), time.perf_counter()
            with self._channel.with_peer(self._doing, posted_at):
                work = dist.irecv(buffer, self._channel.peer, self._channel.group, self._channel.tag(index))
            assert work is not None
            self._posted[index].append((buffer, work, posted_at))

    def take(self, step: int, micro: int, *, exact: bool = False) -> State:
        """Wait for the oldest posted micro-batch, which must be this one, and return its tensors on the device.

        exact: as it was sent. Raises RunError if the peer is gone or another message came.
        """
        channel, state = self._channel, {}
        for index, (name, spec) in enumerate(channel.tensors.items()):
            buffer, work, posted_at = self._posted[index].popleft()
            wire = self._wires[exact][index]
            expected = Header(channel.kind, index, channel.boundary, step, micro, wire_bytes(wire))
            with channel.with_peer(f"waiting for {expected} from", posted_at):
                channel.meter.wait(work, posted_at)
            if _check_header(buffer, expected, channel.peer).length == NOT_FINITE:
                state[name] = torch.full(spec.shape, torch.nan, dtype=spec.dtype, device=channel.streams.device)
            else:
                on_host = unpack(buffer[HEADER_BYTES:], wire)
                fields = tuple(f.to(channel.streams.device, non_blocking=True, copy=True) for f in on_host)
                state[name] = channel.codec_for(exact=exact).decode(fields, spec.shape, spec.dtype)
            self._buffers[index].give_back(buffer)
        return state


class Link:
    """One boundary between two stages, seen from one end: activations go downstream, gradients come back."""

    def __init__(self, outbox: Outbox, inbox: Inbox) -> None:
        self.outbox = outbox
        self.inbox = inbox


@dataclass(frozen=True)
class LinkFactory:
    """Opens the links of one rank; what all of them have in common."""

    group: dist.ProcessGroup
    streams: Streams
    tensors: Mapping[str, TensorSpec]
    forward: Codec
    backward: Codec
    forward_meter: Meter
    backward_meter: Meter

    def open(self, boundary: int, *, peer: int, downstream: bool) -> Link:
        """Return this rank's end of a boundary, after both ends have agreed on what will travel.

        downstream: whether the peer holds the stage after the boundary. Raises RunError if the ends differ.
        """
        activations = self._channel(Kind.ACTIVATION, boundary, peer, self.forward, self.forward_meter)
        gradients = self._channel(Kind.GRADIENT, boundary, peer, self.backward, self.backward_meter)
        greet(activations)
        greet(gradients)
        sending, receiving = (activations, gradients) if downstream else (gradients, activations)
        return Link(Outbox(sending), Inbox(receiving))

    def open_tie(self, boundary: int, spec: TensorSpec, *, peer: int) -> tuple[Outbox, Inbox]:
        """Return both directions of what two ranks that hold one tied weight tell each other, exactly.

        spec: of the message's only tensor, "gradient". Raises RunError if the ends differ.
        """
        tensors = {"gradient": spec}
        channel = replace(
            self._channel(Kind.TIED_GRADIENT, boundary, peer, EXACT, self.backward_meter), tensors=tensors
        )
        greet(channel)
        return Outbox(channel), Inbox(channel)

    def _channel(self, kind: Kind, boundary: int, peer: int, codec: Codec, meter: Meter) -> Channel:
        return Channel(kind, boundary, peer, self.group, self.tensors, codec, self.streams, meter)


def greet(channel: Channel) -> None:
    """Exchange what each end will send or expect, while a difference is still an error and not a crash.

    gloo aborts the process when a message is longer than the buffer posted for it.
    """
    lengths = sum(channel.capacities())
    mine = Header(Kind.HELLO, channel.kind, channel.boundary, channel.digest(), 0, lengths)
    message = torch.frombuffer(bytearray(mine.pack()), dtype=torch.uint8)
    theirs = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    tag = channel.tag(15)
    with channel.with_peer("greeting", time.perf_counter()):
        receiving = dist.irecv(theirs, channel.peer, channel.group, tag)
        sending = dist.isend(message, channel.peer, channel.group, tag)
        assert receiving is not None
        assert sending is not None
        receiving.wait()
        sending.wait()
    _check_header(theirs, mine, channel.peer)


def _check_header(buffer: Tensor, expected: Header, peer: int) -> Header:
    """Return the header of a message, which must be the expected one or say that its tensor was not finite."""
    try:
        got = Header.unpack(bytes(buffer[:HEADER_BYTES].tolist()))
    except ValueError as error:
        raise RunError(f"rank {peer} sent bytes that are no message: {error}; expected {expected}") from None
    if got not in (expected, expected._replace(length=NOT_FINITE)):
        raise RunError(
            f"rank {peer} sent {got}; expected {expected}: the two ranks run different programs, "
            "check that all hosts have the same acsgd, run file and flags"
        )
    return got
