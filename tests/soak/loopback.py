"""A network of one process: every message that it sends is one that it receives, changed or not."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.process_groups import Group
from acsgd.groups import connect
from acsgd.topology import Topology

Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class _Receive:
    """A posted receive, which takes the oldest message of its tag."""

    buffer: Tensor
    messages: deque[bytes]

    def wait(self) -> bool:
        message = self.messages.popleft()[: self.buffer.nbytes]  # gloo ends a process that receives more than it posted
        self.buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else 0
        return True


class _Sent:
    def wait(self) -> bool:
        return True


class Loopback:
    """Point-to-point messages of torch.distributed from this process to itself, in order, by tag."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        """Messages sent so far."""
        self.change: Change = lambda message: message
        """What happens to a message on its way."""
        self._messages: defaultdict[int, deque[bytes]] = defaultdict(deque)

    def isend(self, tensor: Tensor, dst: int, group: object, tag: int) -> _Sent:
        message = tensor.numpy().tobytes()
        self.sent.append(message)
        self._messages[tag].append(self.change(message))
        return _Sent()

    def irecv(self, tensor: Tensor, src: int, group: object, tag: int) -> _Receive:
        tensor.fill_(0xAA)  # what a short message leaves is no message of an earlier case
        return _Receive(tensor, self._messages[tag])


@contextlib.contextmanager
def loopback() -> Iterator[tuple[Loopback, Group]]:
    """Replace gloo's messages by those of a Loopback; yield it, and a group of this process alone."""
    former = dist.isend, dist.irecv
    network = Loopback()
    with connect(Topology.of(0, 1, 1), timeout=timedelta(seconds=60), store=dist.HashStore()) as groups:
        dist.isend, dist.irecv = network.isend, network.irecv
        try:
            yield network, groups.world
        finally:
            dist.isend, dist.irecv = former
