"""What all ranks tell each other at the end of a step, in the time of one message."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.errors import RunError, reason
from acsgd.meter import Work

TAG = 1
"""Of these messages; nothing else travels in their group."""


class Gather:
    """A few numbers of every rank, for every rank.

    Everyone sends to everyone, and receives are posted when this is made: numbers that are told later are under way at
    once. A ring of n ranks would take n - 1 round trips, which over a slow network is a share of the step.
    length: how many numbers, the same on all ranks; group: all of them.
    """

    def __init__(self, length: int, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rows = torch.zeros(group.size(), length, dtype=torch.float64)
        self._receiving: dict[int, Work | None] = {}
        for row, rank in enumerate(dist.get_process_group_ranks(group)):
            if rank != dist.get_rank():
                with _waiting_for([rank]):
                    self._receiving[rank] = dist.irecv(self._rows[row], rank, group, TAG)

    def rows(self, mine: Tensor) -> Tensor:
        """Tell all ranks `mine`, fp64 [length], and return what each tells: fp64 [ranks, length], equal everywhere.

        To be called once. Raises RunError that names the ranks which do not answer.
        """
        self._rows[self._group.rank()] = mine
        silent = list(self._receiving)
        with _waiting_for(silent):
            sending = [dist.isend(mine, rank, self._group, TAG) for rank in silent]
            for work in self._receiving.values():
                _wait(work)
                silent.pop(0)
        with _waiting_for(self._receiving):
            for work in sending:
                _wait(work)
        return self._rows


def _wait(work: Work | None) -> None:
    assert work is not None
    work.wait()


@contextlib.contextmanager
def _waiting_for(ranks: Collection[int]) -> Iterator[None]:
    """Name the ranks, as they are when it fails, if what is done with them fails."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"rank {dist.get_rank()} on {socket.gethostname()}: agreeing on loss and gradient norm with ranks "
            f"{list(ranks)} failed ({reason(error)})",
            awaited=ranks,
        ) from error
