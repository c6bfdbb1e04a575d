"""Messages between stages that are kept in memory, and channels that repeat them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from acsgd.errors import RunError
from acsgd.pp.wire.channel import Channel
from acsgd.pp.wire.frame import Header, Kind
from acsgd.waits import Work


class MessageLog(Protocol):
    """Keeps copies of the messages that a rank sends."""

    def add(self, peer: int, header: Header, message: Tensor) -> None:
        """Copy a message to a rank. message: uint8[n] with its header, in host memory."""
        ...


class LoggedMessages:
    """Messages that one rank received from others in earlier steps."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int, int, int], deque[Tensor]] = {}
        """By sender, kind, boundary and tensor, in the order in which they were sent."""

    def add(self, sender: int, message: Tensor) -> None:
        """Add the next message of a sender, not copied: uint8[n] with its header. Raises ValueError if corrupt."""
        header = Header.unpack(message)
        self._messages.setdefault((sender, header.kind, header.boundary, header.tensor), deque()).append(message)

    def take(self, sender: int, kind: Kind, boundary: int, tensor: int) -> Tensor:
        """Return the next message about a tensor, and drop it. Raises RunError if there is none."""
        messages = self._messages.get((sender, kind, boundary, tensor))
        if not messages:
            name = kind.name.lower().replace("_", " ")
            raise RunError(f"the log of rank {sender} lacks a message: {name} {tensor}, number {boundary}")
        return messages.popleft()


@dataclass(frozen=True)
class ReplayedChannel(Channel):
    """A channel that is not connected to another rank: it receives logged messages, and drops those that are sent."""

    messages: LoggedMessages

    def send(self, message: Tensor, index: int) -> Work:
        return _Done()

    def receive(self, buffer: Tensor, index: int) -> Work:
        message = self.messages.take(self.peer, self.kind, self.boundary, index)
        buffer[: len(message)] = message
        return _Done()


class _Done:
    """An operation that is complete."""

    def wait(self) -> bool:
        return True
