"""Both ends of a channel: framed messages over gloo, received into buffers posted in advance."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError, Wire, holds_nan, pack, unpack, wire_bytes
from acsgd.codecs.lossless import compress_, decompress
from acsgd.comm.waits import Work
from acsgd.errors import RunError
from acsgd.layers.batch import Lengths
from acsgd.layers.composed import State
from acsgd.pp.wire.channel import NOT_FINITE, Channel, check_header, read_header
from acsgd.pp.wire.coder import Coder, TransferInfo
from acsgd.pp.wire.frame import HEADER_BYTES, Header, MessageKind
from acsgd.streams import StreamEvent, Streams

MAX_SENDS_IN_FLIGHT = 16
"""Sends that an outbox leaves unfinished by default, before it waits for the oldest; bounds the memory of buffers."""
_MARK = 0
"""Byte of a buffer that is 1 if the tensor is not finite, before the header takes its place."""


class BufferPool:
    """Reusable host buffers for the messages of one tensor, each as long as the longest message."""

    def __init__(self, nbytes: int, streams: Streams) -> None:
        self._nbytes = nbytes
        self._streams = streams
        self._free: deque[tuple[Tensor, StreamEvent]] = deque()

    def acquire(self) -> Tensor:
        """Return a buffer that is not in use."""
        if self._free and self._free[0][1].query():
            return self._free.popleft()[0]
        return self._streams.host_buffer(self._nbytes)

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool once the device has finished its present work, which may read the buffer."""
        self._free.append((buffer, self._streams.record_event()))


class _Encoding(NamedTuple):
    """A message that is being encoded."""

    header: Header
    context: bytes
    buffer: Tensor
    encoded: StreamEvent
    length: Future[int] | None
    """Length after entropy coding in the background; None if `header` has the final length."""

    def ready(self) -> bool:
        return self.length.done() if self.length is not None else self.encoded.query()


class Received(NamedTuple):
    """The tensors of a micro-batch."""

    state: State
    lengths: Lengths | None
    """Tokens per row: those that the receiver expected, or else those in the messages."""


class _InFlight(NamedTuple):
    """A message that is being sent or received."""

    buffer: Tensor
    work: Work
    posted_at: float
    pool: BufferPool


class Outbox:
    """Sending end of a channel. Encodes on the side stream and passes each message to gloo as soon as it is ready."""

    def __init__(self, channel: Channel, *, max_in_flight: float = MAX_SENDS_IN_FLIGHT) -> None:
        """max_in_flight: number of unfinished sends above which `flush` waits for the oldest."""
        self._channel = channel
        self._max_in_flight = max_in_flight
        self._action = f"sending {channel.kind.plural} to"
        self._pools = [BufferPool(nbytes, channel.streams) for nbytes in channel.max_message_bytes]
        self._entropy_coder = ThreadPoolExecutor(1, thread_name_prefix="entropy coder")
        self._encoding: deque[_Encoding] = deque()
        self._in_flight: deque[_InFlight] = deque()

    def send(self, info: TransferInfo, state: State) -> None:
        """Encode each tensor and send it without blocking. The tensors may be reused at once."""
        for index, (name, coder) in enumerate(self._channel.coders.items()):
            with self._channel.trace_codec("encode", name):
                self._encoding.append(self._encode(index, coder, state[name], info))
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Pass encoded messages to gloo. wait: also wait for messages that are still being encoded."""
        while self._encoding and (wait or self._encoding[0].ready()):
            header, context, buffer, encoded, length = self._encoding.popleft()
            if length is None:
                encoded.synchronize()
            else:  # the thread of the entropy coder has waited
                header = header._replace(length=length.result())
            if buffer[_MARK]:
                header = header._replace(length=NOT_FINITE)
            packed = header.pack(buffer[HEADER_BYTES : HEADER_BYTES + header.length], context)
            buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            self._post(header, buffer)
        while len(self._in_flight) > self._max_in_flight:
            self._finish_oldest()

    def drain(self) -> None:
        """Block until all messages are sent."""
        self.flush(wait=True)
        while self._in_flight:
            self._finish_oldest()

    def close(self) -> None:
        """End the entropy coder's thread. Sends nothing: call `drain` first to send what is left."""
        self._entropy_coder.shutdown()

    def abort(self) -> None:
        """Drop all messages that are not sent, and end the entropy coder's thread after its present one."""
        self._encoding.clear()
        self._in_flight.clear()
        self._entropy_coder.shutdown(cancel_futures=True)

    def _encode(self, index: int, coder: Coder, x: Tensor, info: TransferInfo) -> _Encoding:
        channel, kind, entropy_coding = self._channel, self._channel.kind, coder.uses_entropy_coding(info)
        buffer, context, wire = self._pools[index].acquire(), coder.context(info), coder.wire(info)
        buffer[_MARK] = 0
        with channel.streams.side_stream(x):
            try:
                fields = coder.encode(x, info)
                if coder.marks_nan(info):
                    buffer[_MARK].copy_(holds_nan(fields), non_blocking=True)
                if len(fields) < len(wire):
                    kind, wire = MessageKind.CACHED_ACTIVATION, wire[: len(fields)]
                length = wire_bytes(wire)
                body = buffer[HEADER_BYTES : HEADER_BYTES + length]
                pack(fields, body)
                entropy_coding = entropy_coding and length > 0
            except NotFiniteError:
                length, entropy_coding = NOT_FINITE, False
            encoded = channel.streams.record_event()
        coded_length = None
        is_ready = encoded.query()
        entropy_coding = entropy_coding and not (is_ready and buffer[_MARK])
        if entropy_coding and is_ready:  # as on a CPU; a background thread would delay it by a forward
            length = compress_(body, wire)
        elif entropy_coding:
            coded_length = self._entropy_coder.submit(_entropy_code, body, wire, encoded)
        header = channel.header(index, info, length)._replace(kind=kind)
        return _Encoding(header, context, buffer, encoded, coded_length)

    def _post(self, header: Header, buffer: Tensor) -> None:
        channel, nbytes, posted_at = self._channel, HEADER_BYTES + header.length, time.perf_counter()
        with channel.report_failure(self._action, posted_at):
            work = channel.send(buffer[:nbytes], header.tensor)
        self._in_flight.append(_InFlight(buffer, work, posted_at, self._pools[header.tensor]))
        channel.meter.sent_bytes += nbytes
        if channel.meter.trace is not None:
            channel.trace_message("send", header, posted_at, posted_at)

    def _finish_oldest(self) -> None:
        buffer, work, posted_at, pool = self._in_flight.popleft()
        with self._channel.report_failure(self._action, posted_at):
            self._channel.wait(work, time.perf_counter())  # the receiver counts the time of the transfer
        pool.release(buffer)


class Inbox:
    """Receiving end of a channel. Receives are posted ahead of use, in the order in which the peer sends."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._action = f"receiving {channel.kind.plural} from"
        self._pools = [BufferPool(nbytes, channel.streams) for nbytes in channel.max_message_bytes]
        self._posted: list[deque[_InFlight]] = [deque() for _ in self._pools]

    def post(self) -> None:
        """Post the receives of the next micro-batch, one message per named tensor."""
        channel = self._channel
        for index, (pool, posted) in enumerate(zip(self._pools, self._posted, strict=True)):
            buffer, posted_at = pool.acquire(), time.perf_counter()
            with channel.report_failure(self._action, posted_at):
                work = channel.receive(buffer, index)
            posted.append(_InFlight(buffer, work, posted_at, pool))

    def abort(self) -> None:
        """Drop the receives that are posted, whose connection must be shut down."""
        for posted in self._posted:
            posted.clear()

    def receive(self, info: TransferInfo) -> Received:
        """Wait for the micro-batch whose receives were posted first, and return its tensors, on the device.

        Raises RunError if the peer fails or sent something other than `info` says.
        """
        state = {}
        for index, (name, coder) in enumerate(self._channel.coders.items()):
            state[name], info = self._receive(index, name, coder, info)
        return Received(state, info.lengths)

    def _receive(self, index: int, name: str, coder: Coder, info: TransferInfo) -> tuple[Tensor, TransferInfo]:
        """Return a tensor, and `info` with the lengths of its rows."""
        channel = self._channel
        buffer, work, posted_at, pool = self._posted[index].popleft()
        expected = channel.header(index, info, wire_bytes(coder.wire(info)))
        with channel.report_failure(f"waiting for {expected} from", posted_at):
            channel.wait(work, posted_at)
        if channel.meter.trace is not None:
            channel.trace_message("receive", expected, posted_at, time.perf_counter())
        received = read_header(buffer, expected, channel.peer, context=coder.context(info))
        if info.lengths is None and received.sequence:
            info = info._replace(lengths=received.lengths)
            expected = channel.header(index, info, wire_bytes(coder.wire(info)))
        wire = coder.wire(info._replace(hits_as_cached=received.kind == MessageKind.CACHED_ACTIVATION))
        if wire_bytes(wire) < expected.length:
            expected = expected._replace(kind=received.kind, length=wire_bytes(wire))
        header = check_header(received, expected, channel.peer, allow_shorter=coder.uses_entropy_coding(info))
        if header.length == NOT_FINITE and expected.length > 0:  # else a message whose cache hits are all as cached
            pool.release(buffer)
            shape, dtype = coder.shape(info), coder.spec.dtype
            return torch.full(shape, torch.nan, dtype=dtype, device=channel.streams.device), info
        if header.length < expected.length:
            buffer = self._entropy_decode(buffer, header, wire, pool)
        fields = unpack(buffer[HEADER_BYTES:], wire)
        with channel.trace_codec("decode", name):
            x = coder.decode(tuple(f.to(channel.streams.device, non_blocking=True, copy=True) for f in fields), info)
        pool.release(buffer)
        return x, info

    def _entropy_decode(self, buffer: Tensor, header: Header, wire: Wire, pool: BufferPool) -> Tensor:
        """Return another buffer with the decoded message, whose body has the fields of `wire`; releases `buffer`."""
        decoded = pool.acquire()
        try:
            body = decoded[HEADER_BYTES : HEADER_BYTES + wire_bytes(wire)]
            decompress(buffer[HEADER_BYTES : HEADER_BYTES + header.length], body, wire)
        except ValueError as error:
            raise RunError(f"rank {self._channel.peer} sent {header}, which cannot be decoded: {error}") from None
        pool.release(buffer)
        return decoded


def _entropy_code(body: Tensor, wire: Wire, encoded: StreamEvent) -> int:
    """Entropy-code a message body in place once it is complete; return its new length."""
    encoded.synchronize()
    return compress_(body, wire)
