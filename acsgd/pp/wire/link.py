"""The wire between two ranks of a pipeline: framed messages over gloo, posted ahead, never pickled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.codecs.base import Codec, NotFiniteError, pack, unpack, wire_bytes
from acsgd.codecs.entropy import compress_, decompress
from acsgd.errors import RunError
from acsgd.meter import Meter, Work
from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.pp.wire.cache_sync import CacheSync
from acsgd.pp.wire.channel import NOT_FINITE, Channel, check_header, handshake
from acsgd.pp.wire.coder import EXACT, Coder, StatelessCoder, TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta, DeltaCoder
from acsgd.pp.wire.frame import HEADER_BYTES, Header, Kind
from acsgd.shards.layers import State
from acsgd.streams import Mark, Streams

MAX_UNSENT = 16
"""Messages that may wait for a slow peer before the sender waits too; bounds the memory of their buffers."""


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


class _Leaving(NamedTuple):
    """A message that is being made."""

    tensor: int
    header: Header
    buffer: Tensor
    encoded: Mark
    squeezing: Future[int] | None
    """Its length, once the entropy coder has made it shorter."""

    def ready(self) -> bool:
        return self.squeezing.done() if self.squeezing is not None else self.encoded.ready()


class Outbox:
    """The sending end. A message is handed to gloo as soon as its bytes are there, and sent when the peer is ready."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._doing = f"sending {channel.kind.name.lower().replace('_', ' ')}s to"
        self._buffers = [_Buffers(size, channel.streams) for size in channel.capacities]
        self._squeezer = ThreadPoolExecutor(1, thread_name_prefix="squeeze")
        self._leaving: deque[_Leaving] = deque()
        self._unsent: deque[tuple[int, Tensor, Work, float]] = deque()

    def send(self, visit: TransferInfo, state: State) -> None:
        """Encode each tensor into a message and let it leave; the tensors may be reused at once."""
        for index, (name, coder) in enumerate(self._channel.coders.items()):
            self._leaving.append(self._encode(index, coder, state[name], visit))
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Hand encoded messages to gloo; wait: also those that the device has not finished."""
        while self._leaving and (wait or self._leaving[0].ready()):
            index, header, buffer, encoded, squeezing = self._leaving.popleft()
            encoded.wait()
            if squeezing is not None:
                header = header._replace(length=squeezing.result())
            buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
            self._hand_over(index, buffer, HEADER_BYTES + header.length)
        while len(self._unsent) > MAX_UNSENT:
            self._finish_oldest()

    def drain(self) -> None:
        """Block until every message has been sent."""
        self.flush(wait=True)
        while self._unsent:
            self._finish_oldest()

    def _encode(self, index: int, coder: Coder, x: Tensor, visit: TransferInfo) -> _Leaving:
        channel, length, is_squeezed = self._channel, wire_bytes(coder.wire(visit)), coder.is_squeezed(visit)
        buffer = self._buffers[index].take()
        body = buffer[HEADER_BYTES : HEADER_BYTES + length]
        with channel.streams.beside(x):
            try:
                pack(coder.encode(x, visit), body)
            except NotFiniteError:
                length, is_squeezed = NOT_FINITE, False
            encoded = channel.streams.mark()
        squeezing = None
        if is_squeezed and encoded.ready():
            length = compress_(body)  # at once, as on a CPU: else the message would leave after the next forward only
        elif is_squeezed:
            squeezing = self._squeezer.submit(_squeezed, body, encoded)
        header = Header(channel.kind, index, channel.boundary, visit.step, visit.micro, length)
        return _Leaving(index, header, buffer, encoded, squeezing)

    def _hand_over(self, index: int, buffer: Tensor, nbytes: int) -> None:
        posted_at = time.perf_counter()
        with self._channel.with_peer(self._doing, posted_at):
            work = dist.isend(buffer[:nbytes], self._channel.peer, self._channel.group, self._channel.tag(index))
        assert work is not None
        self._unsent.append((index, buffer, work, posted_at))
        self._channel.meter.sent_bytes += nbytes

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
        self._buffers = [_Buffers(size, channel.streams) for size in channel.capacities]
        self._posted: list[deque[tuple[Tensor, Work, float]]] = [deque() for _ in self._buffers]

    def post(self) -> None:
        """Expect the next micro-batch: one message per named tensor."""
        for index, buffers in enumerate(self._buffers):
            buffer, posted_at = buffers.take(), time.perf_counter()
            with self._channel.with_peer(self._doing, posted_at):
                work = dist.irecv(buffer, self._channel.peer, self._channel.group, self._channel.tag(index))
            assert work is not None
            self._posted[index].append((buffer, work, posted_at))

    def take(self, visit: TransferInfo) -> State:
        """Wait for the oldest posted micro-batch, which must be this one, and return its tensors on the device.

        Raises RunError if the peer is gone or another message came.
        """
        coders = self._channel.coders
        return {name: self._take(index, name, coder, visit) for index, (name, coder) in enumerate(coders.items())}

    def _take(self, index: int, name: str, coder: Coder, visit: TransferInfo) -> Tensor:
        channel, wire, buffers = self._channel, coder.wire(visit), self._buffers[index]
        buffer, work, posted_at = self._posted[index].popleft()
        expected = Header(channel.kind, index, channel.boundary, visit.step, visit.micro, wire_bytes(wire))
        with channel.with_peer(f"waiting for {expected} from", posted_at):
            channel.meter.wait(work, posted_at)
        got = check_header(buffer, expected, channel.peer, shorter=coder.is_squeezed(visit))
        if got.length == NOT_FINITE:
            buffers.give_back(buffer)
            spec = channel.tensors[name]
            return torch.full(spec.shape, torch.nan, dtype=spec.dtype, device=channel.streams.device)
        if got.length < expected.length:
            buffer = self._unsqueezed(buffer, got, expected.length, buffers)
        fields = unpack(buffer[HEADER_BYTES:], wire)
        x = coder.decode(tuple(f.to(channel.streams.device, non_blocking=True, copy=True) for f in fields), visit)
        buffers.give_back(buffer)
        return x

    def _unsqueezed(self, buffer: Tensor, header: Header, length: int, buffers: _Buffers) -> Tensor:
        """Return a message as it was before the entropy coder."""
        whole = buffers.take()
        try:
            decompress(buffer[HEADER_BYTES : HEADER_BYTES + header.length], whole[HEADER_BYTES : HEADER_BYTES + length])
        except ValueError as error:
            raise RunError(f"rank {self._channel.peer} sent {header}, which cannot be decoded: {error}") from None
        buffers.give_back(buffer)
        return whole


class Link:
    """One boundary between two stages, seen from one end: activations go downstream, gradients come back."""

    def __init__(self, outbox: Outbox, inbox: Inbox, agreement: CacheSync) -> None:
        self.outbox = outbox
        self.inbox = inbox
        self.cache_sync = agreement

    def send(self, visit: TransferInfo, state: State) -> None:
        """Encode the tensors of a micro-batch and let them leave."""
        self.cache_sync.settle()
        self.outbox.send(visit, state)

    def take(self, visit: TransferInfo) -> State:
        """Wait for the tensors of a micro-batch, the reception of which was posted."""
        self.cache_sync.settle()
        return self.inbox.take(visit)


@dataclass(frozen=True)
class LinkFactory:
    """Opens the links of one rank; what all of them have in common."""

    group: dist.ProcessGroup
    streams: Streams
    tensors: Mapping[str, TensorSpec]
    forward: Codec | Delta
    backward: Codec
    forward_meter: Meter
    backward_meter: Meter
    cache_plan: CachePlan | None = None
    """Where the ends of links remember; needed if `forward` is a Delta."""

    def open(self, boundary: int, *, peer: int, downstream: bool) -> Link:
        """Return this rank's end of a boundary, after both ends have agreed on what will travel.

        downstream: whether the peer holds the stage after the boundary. Raises RunError if the ends differ.
        """
        coders, remembered = self._activation_coders(boundary, "sender" if downstream else "receiver")
        activations = self._channel(Kind.ACTIVATION, boundary, peer, self.forward, coders, self.forward_meter)
        plain = {name: StatelessCoder(self.backward, spec) for name, spec in self.tensors.items()}
        gradients = self._channel(Kind.GRADIENT, boundary, peer, self.backward, plain, self.backward_meter)
        handshake(activations)
        handshake(gradients)
        agreement = CacheSync(activations, remembered)
        sending, receiving = (activations, gradients) if downstream else (gradients, activations)
        return Link(Outbox(sending), Inbox(receiving), agreement)

    def open_tie(self, boundary: int, spec: TensorSpec, *, peer: int) -> tuple[Outbox, Inbox]:
        """Return both directions of what two ranks that hold one tied weight tell each other, exactly.

        spec: of the message's only tensor, "gradient". Raises RunError if the ends differ.
        """
        coders = {"gradient": StatelessCoder(EXACT, spec)}
        channel = self._channel(Kind.TIED_GRADIENT, boundary, peer, EXACT, coders, self.backward_meter)
        channel = replace(channel, tensors={"gradient": spec})
        handshake(channel)
        return Outbox(channel), Inbox(channel)

    def _activation_coders(self, boundary: int, side: str) -> tuple[Mapping[str, Coder], list[ActivationCache]]:
        """Return the coders of a boundary's activations, and what they remember."""
        if not isinstance(self.forward, Delta):
            return {name: StatelessCoder(self.forward, spec) for name, spec in self.tensors.items()}, []
        assert self.cache_plan is not None, "a delta link needs a place to remember"
        memories = {
            name: self.cache_plan.open(boundary, f"{side}.{name}", self.forward, spec, self.streams)
            for name, spec in self.tensors.items()
        }
        coders = {
            name: DeltaCoder(self.forward, spec, memories[name], self.streams) for name, spec in self.tensors.items()
        }
        return coders, list(memories.values())

    def _channel(
        self,
        kind: Kind,
        boundary: int,
        peer: int,
        form: Codec | Delta,
        coders: Mapping[str, Coder],
        meter: Meter,
    ) -> Channel:
        return Channel(kind, boundary, peer, self.group, self.tensors, repr(form), coders, self.streams, meter)


def _squeezed(body: Tensor, encoded: Mark) -> int:
    """Make a message shorter as soon as it is there; return its length."""
    encoded.wait()
    return compress_(body)
