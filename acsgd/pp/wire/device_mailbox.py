"""Both ends of a channel over an ordered transport: messages stay on the device, and both ends know their sizes.

A message is a header, as over gloo, and the encoded fields of one tensor. The receiver compares the headers of a step
together, at its end: so no message makes a rank wait for its device. The checksum covers the header alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError, pack, unpack, wire_bytes
from acsgd.comm.process_groups import Communicator
from acsgd.comm.waits import Work
from acsgd.pp.wire.channel import NOT_FINITE, Channel, check_header, read_header
from acsgd.pp.wire.coder import Coder, TransferInfo
from acsgd.pp.wire.frame import HEADER_BYTES, LENGTH_BYTES, Header
from acsgd.pp.wire.mailbox import MAX_SENDS_IN_FLIGHT, Received


class _InFlight(NamedTuple):
    """A message that is being sent or received."""

    message: Tensor
    work: Work
    posted_at: float


class DeviceOutbox:
    """Sending end of a channel. Encodes and sends on the side stream, in the order of the program."""

    def __init__(self, channel: Channel, communicator: Communicator) -> None:
        self._channel = channel
        self._communicator = communicator
        self._action = f"sending {channel.kind.plural} to"
        self._in_flight: deque[_InFlight] = deque()

    def send(self, info: TransferInfo, state: dict[str, Tensor]) -> None:
        """Encode each tensor and send it without blocking. The tensors may be reused at once."""
        for index, (name, coder) in enumerate(self._channel.coders.items()):
            with self._channel.trace_codec("encode", name), self._channel.streams.side_stream(state[name]):
                header, message = self._encode(index, coder, state[name], info)
                self._post(header, message)
        while len(self._in_flight) > MAX_SENDS_IN_FLIGHT:
            self._finish_oldest()

    def flush(self, *, wait: bool) -> None:
        """Do nothing: messages are sent at once."""

    def drain(self) -> None:
        """Let later work of the side stream follow all sends."""
        while self._in_flight:
            self._finish_oldest()

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def abort(self) -> None:
        """Drop all messages that are not sent."""
        self._in_flight.clear()

    def _encode(self, index: int, coder: Coder, x: Tensor, info: TransferInfo) -> tuple[Header, Tensor]:
        streams, length = self._channel.streams, wire_bytes(coder.wire(info))
        header = self._channel.header(index, info, length)
        message = torch.empty(HEADER_BYTES + length, dtype=torch.uint8, device=streams.device)
        try:
            pack(coder.encode(x, info), message[HEADER_BYTES:])
        except NotFiniteError:
            header = header._replace(length=NOT_FINITE)
            message.zero_()
        packed = streams.host_buffer(HEADER_BYTES)
        packed.copy_(header.packed())
        message[:HEADER_BYTES].copy_(packed, non_blocking=True)
        return header, message

    def _post(self, header: Header, message: Tensor) -> None:
        channel, posted_at = self._channel, time.perf_counter()
        with channel.report_failure(self._action, posted_at):
            work = self._communicator.isend(message, channel.peer)
        self._in_flight.append(_InFlight(message, work, posted_at))
        channel.meter.sent_bytes += len(message)
        if channel.meter.trace is not None:
            channel.trace_message("send", header, posted_at, posted_at)

    def _finish_oldest(self) -> None:
        message, work, posted_at = self._in_flight.popleft()
        streams = self._channel.streams
        with self._channel.report_failure(self._action, posted_at), streams.side_stream():
            self._channel.wait(work, time.perf_counter())
            del message  # whose memory the side stream may use again, after the send


class DeviceInbox:
    """Receiving end of a channel. Receives are posted ahead of use, in the order in which the peer sends."""

    def __init__(self, channel: Channel, communicator: Communicator) -> None:
        self._channel = channel
        self._communicator = communicator
        self._action = f"receiving {channel.kind.plural} from"
        self._posted: deque[_InFlight] = deque()
        self._unchecked: list[tuple[Tensor, Header]] = []
        """Headers that were received, on the device, and those expected."""

    def post(self, info: TransferInfo) -> None:
        """Post the receives of the next micro-batch, one message per named tensor."""
        channel = self._channel
        for coder in channel.coders.values():
            assert info.lengths is not None or coder.spec.dims is None, "the size of the message is not known"
            nbytes = HEADER_BYTES + wire_bytes(coder.wire(info))
            message = torch.empty(nbytes, dtype=torch.uint8, device=channel.streams.device)
            posted_at = time.perf_counter()
            with channel.report_failure(self._action, posted_at):
                work = self._communicator.irecv(message, channel.peer)
            self._posted.append(_InFlight(message, work, posted_at))

    def receive(self, info: TransferInfo) -> Received:
        """Return the tensors of the micro-batch whose receives were posted first. Raises RunError if the peer fails."""
        coders = enumerate(self._channel.coders.items())
        return Received(
            {name: self._receive(index, name, coder, info) for index, (name, coder) in coders}, info.lengths
        )

    def take_unchecked(self) -> list[tuple[Tensor, Header, int]]:
        """Return the headers received since the last call, on the device, those expected, and the sender."""
        unchecked, self._unchecked = self._unchecked, []
        return [(*each, self._channel.peer) for each in unchecked]

    def abort(self) -> None:
        """Drop the receives that are posted, whose communicator must be aborted."""
        self._posted.clear()
        self._unchecked.clear()

    def _receive(self, index: int, name: str, coder: Coder, info: TransferInfo) -> Tensor:
        channel, wire = self._channel, coder.wire(info)
        message, work, posted_at = self._posted.popleft()
        expected = channel.header(index, info, wire_bytes(wire))
        with channel.report_failure(f"waiting for {expected} from", posted_at):
            channel.wait(work, posted_at)
        if channel.meter.trace is not None:
            channel.trace_message("receive", expected, posted_at, time.perf_counter())
        header = message[:HEADER_BYTES]
        self._unchecked.append((header.clone(), expected))
        with channel.trace_codec("decode", name):
            x = coder.decode(unpack(message[HEADER_BYTES:], wire), info)
            if coder.refuses_not_finite(info):
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
