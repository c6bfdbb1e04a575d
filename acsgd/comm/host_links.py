"""Measurement of what carries device tensors faster between hosts: an ordered transport, or gloo."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.communicators import Communicator
from acsgd.comm.process_groups import Group
from acsgd.comm.store import call_in_thread
from acsgd.comm.waits import Waits

LIMIT_S = 20.0
"""Maximum time in which a transport connects the hosts and sends the messages, seconds."""
ADVANTAGE = 1.5
"""Ratio of the times of a message from which the faster transport is preferred to gloo: on a slow network both reach
its rate, and would differ by chance."""
BYTES = (2**16, 2**24)
"""Size of the first message over gloo, and largest size of those that are compared."""
MESSAGE_S = 0.02
"""Time over gloo of the messages that are compared, seconds."""
ROUNDS = 3
"""Number of messages whose median counts, after a first one."""


class HostLinkTimes(NamedTuple):
    """Times of a message from a device of one host to that of the next one, of the slowest pair, seconds."""

    nbytes: int
    gloo_s: float
    ordered_s: float
    """Infinite if no message came within the limit."""

    @property
    def prefers_ordered(self) -> bool:
        """Whether the ordered transport is clearly faster."""
        return ADVANTAGE * self.ordered_s < self.gloo_s

    def describe(self, name: str) -> str:
        """Return the reason of a choice. name: of the ordered transport."""
        if math.isinf(self.ordered_s):
            return f"{name} did not connect the hosts in time"
        ordered, gloo = (f"{1e3 * each:.2g} ms over" for each in (self.ordered_s, self.gloo_s))
        return f"{self.nbytes / 1e6:.2g} MB take {ordered} {name}, {gloo} gloo"


@dataclass(frozen=True)
class HostRing:
    """One rank of each host, which sends to that of the next host.

    group: of gloo, with further ranks of these hosts; ranks: global ones, at least two; device: of this rank's tensors.
    """

    group: Group
    ranks: Sequence[int]
    device: torch.device
    waits: Waits

    def measure(self, open_communicator: Callable[[], Communicator], limit_s: float) -> HostLinkTimes:
        """Return the times of both transports, equal on all ranks of the group, which call it together.

        open_communicator: opens one of the ranks of the ring, on these. It may block for ever: its thread is left
        behind then. Raises RuntimeError if gloo fails.
        """
        first, most = BYTES
        first_s = self._slowest(lambda: self._over_gloo(first))
        nbytes = int(min(most, max(first, first * MESSAGE_S / first_s)))
        gloo_s = self._slowest(lambda: self._over_gloo(nbytes))
        return HostLinkTimes(nbytes, gloo_s, self._slowest(lambda: self._ordered(open_communicator, nbytes, limit_s)))

    def _slowest(self, measure: Callable[[], float]) -> float:
        """Return the largest result of the ranks of the ring."""
        me = self.group.ranks[self.group.rank()]
        result = torch.tensor(measure() if me in self.ranks else 0.0, dtype=torch.float64)
        self.waits.wait(self.group.all_reduce(result, dist.ReduceOp.MAX))
        return result.item()

    def _neighbours(self) -> tuple[int, int]:
        """Return the ranks before and after this one."""
        position, size = self.ranks.index(self.group.ranks[self.group.rank()]), len(self.ranks)
        return self.ranks[position - 1], self.ranks[(position + 1) % size]

    def _over_gloo(self, nbytes: int) -> float:
        """Return the median time of a message through host memory."""
        before, after = self._neighbours()
        x = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        sent, received = (torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for _ in range(2))

        def exchange() -> None:
            sent.copy_(x)
            for work in [self.group.irecv(received, before), self.group.isend(sent, after)]:
                self.waits.wait(work)
            x.copy_(received)

        return _median_s(exchange)

    def _ordered(self, open_communicator: Callable[[], Communicator], nbytes: int, limit_s: float) -> float:
        """Return the median time of a message that stays on the device; infinite if none comes in time."""
        before, after = self._neighbours()

        def measure() -> float:
            communicator = open_communicator()
            x, received = (torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2))
            return _median_s(lambda: _complete(communicator, {before: received}, {after: x}))

        with suppress(RuntimeError, TimeoutError):
            return call_in_thread(measure, timeout_s=limit_s, waits=self.waits)
        return math.inf


def _complete(communicator: Communicator, receive: Mapping[int, Tensor], send: Mapping[int, Tensor]) -> None:
    work = communicator.all_to_all(receive, send)
    work.wait()  # of a thread that is left behind if it does not end


def _median_s(exchange: Callable[[], None]) -> float:
    times = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - started)
    return median(times[1:])
