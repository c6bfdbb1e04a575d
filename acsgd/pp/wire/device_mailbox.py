"""Both ends of a channel over an ordered transport: messages stay on the device, and both ends know their sizes.

A message is a header, as over gloo, and the encoded fields of one tensor. The receiver compares the headers of a step
together, at its end, and the device chooses the header of a tensor that is not finite: so no message makes a rank wait
for its device. The checksum covers the header alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import holds_nan, pack, unpack, wire_bytes
from acsgd.comm.communicators import Communicator
from acsgd.comm.waits import DeviceWork
from acsgd.pp.wire.channel import NOT_FINITE, Channel, check_header, read_header
from acsgd.pp.wire.coder import Coder, TransferInfo
from acsgd.pp.wire.frame import HEADER_BYTES, LENGTH_BYTES, Header
from acsgd.pp.wire.mailbox import BufferPool, Received


class _InFlight(NamedTuple):
    """A message that is being sent."""

    message: Tensor
    work: DeviceWork
    sent_at: float


class DeviceOutbox:
    """Sending end of a channel. Encodes and sends on the side stream, in the order of the program."""

    def __init__(self, channel: Channel, communicator: Communicator) -> None:
        self._channel = channel
        self._communicator = communicator
        self._action = f"sending {channel.kind.plural} to"
        self._headers = BufferPool(2 * HEADER_BYTES, channel.streams)
        self._in_flight: deque[_InFlight] = deque()

    def send(self, info: TransferInfo, state: dict[str, Tensor]) -> None:
        """Encode each tensor and send it without blocking. The tensors may be reused at once."""
        for index, (name, coder) in enumerate(self._channel.coders.items()):
            with self._channel.trace_codec("encode", name), self._channel.streams.side_stream(state[name]):
                header, message = self._encode(index, coder, state[name], info)
                self._post(header, message)
        while self._in_flight and self._in_flight[0].work.is_completed():
            self._in_flight.popleft()

    def flush(self, *, wait: bool) -> None:
        """Do nothing: messages are sent at once."""

    def drain(self) -> None:
        """Let later work of the side stream follow all sends."""
        channel = self._channel
        with channel.streams.side_stream():
            while self._in_flight:
                _, work, sent_at = self._in_flight.popleft()
                with channel.report_failure(self._action, sent_at):
                    channel.wait(work, time.perf_counter())

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def abort(self) -> None:
        """Drop all messages that are not sent."""
        self._in_flight.clear()

    def _encode(self, index: int, coder: Coder, x: Tensor, info: TransferInfo) -> tuple[Header, Tensor]:
        streams, length = self._channel.streams, wire_bytes(coder.wire(info))
        header = self._channel.header(index, info, length)
        message = torch.empty(HEADER_BYTES + length, dtype=torch.uint8, device=streams.device)
        fields = coder.encode(x, info)
        pack(fields, message[HEADER_BYTES:])
        packed = self._headers.acquire()
        torch.cat([header.packed(), header._replace(length=NOT_FINITE).packed()], out=packed)
        plain, marked = packed.to(streams.device, non_blocking=True).split(HEADER_BYTES)
        message[:HEADER_BYTES] = torch.where(holds_nan(fields), marked, plain) if coder.marks_nan(info) else plain
        self._headers.release(packed)
        return header, message

    def _post(self, header: Header, message: Tensor) -> None:
        channel, sent_at = self._channel, time.perf_counter()
        with channel.report_failure(self._action, sent_at):
            work = self._communicator.isend(message, channel.peer, header)
        self._in_flight.append(_InFlight(message, work, sent_at))
        channel.meter.sent_bytes += len(message)
        if channel.meter.trace is not None:
            channel.trace_message("send", header, sent_at, sent_at)


class DeviceInbox:
    """Receiving end of a channel.

    A message is received when it is needed, not ahead: what synchronizes the device, such as the first use of a kernel,
    waits for all receives, and a message may depend on what this rank has yet to send. See `validate`.
    """

    def __init__(self, channel: Channel, communicator: Communicator) -> None:
        self._channel = channel
        self._communicator = communicator
        self._unchecked: list[tuple[Tensor, Header]] = []
        """Headers that were received, on the device, and those expected."""

    def post(self) -> None:
        """Do nothing: see the class."""

    def receive(self, info: TransferInfo) -> Received:
        """Return the tensors of the next micro-batch, on the device. Raises RunError if the peer fails."""
        coders = enumerate(self._channel.coders.items())
        return Received(
            {name: self._receive(index, name, coder, info) for index, (name, coder) in coders}, info.lengths
        )

    def take_unchecked(self) -> list[tuple[Tensor, Header, int]]:
        """Return the headers received since the last call, on the device, those expected, and the sender."""
        unchecked, self._unchecked = self._unchecked, []
        return [(*each, self._channel.peer) for each in unchecked]

    def abort(self) -> None:
        """Drop the headers of a step that is not complete."""
        self._unchecked.clear()

    def _receive(self, index: int, name: str, coder: Coder, info: TransferInfo) -> Tensor:
        channel, wire, since = self._channel, coder.wire(info), time.perf_counter()
        assert info.lengths is not None or coder.spec.dims is None, "the size of the message is not known"
        expected = channel.header(index, info, wire_bytes(wire))
        message = torch.empty(HEADER_BYTES + expected.length, dtype=torch.uint8, device=channel.streams.device)
        with channel.report_failure(f"waiting for {expected} from", since):
            channel.wait(self._communicator.irecv(message, channel.peer, expected), since)
        if channel.meter.trace is not None:
            channel.trace_message("receive", expected, since, time.perf_counter())
        header = message[:HEADER_BYTES]
        self._unchecked.append((header.clone(), expected))
        with channel.trace_codec("decode", name):
            x = coder.decode(unpack(message[HEADER_BYTES:], wire), info)
            if coder.marks_nan(info):
                x = torch.where(header[LENGTH_BYTES].view(torch.int64) == NOT_FINITE, torch.nan, x)
        return x


def check_received(inboxes: Iterable[DeviceInbox]) -> None:
    """Check that all messages since the last call were those expected. Waits for the device, once.

    Raises RunError for the first one that was not.
    """
    received = [each for inbox in inboxes for each in inbox.take_unchecked()]
    if received:
        headers = torch.stack([header for header, _, _ in received]).cpu()
        for header, (_, expected, peer) in zip(headers, received, strict=True):
            check_header(read_header(header, expected, peer), expected, peer)
