"""Both ends of a wire make sure, before each step, that they remember the same of its sequences."""

# S sequences of this replica in a step

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.channel import Channel, Exchange

log = logging.getLogger(__name__)

TAG = 14


class CacheSync:
    """One end's side of it. memories: one per tensor of the wire; empty where nothing is remembered.

    What the ends remember differently, or one of them not at all, both forget. Opening it compares everything.
    Messages of a step are one per end, of 8 bytes per tensor and sequence, and cross while the first micro-batch is
    computed.
    """

    def __init__(self, channel: Channel, memories: Sequence[ActivationCache]) -> None:
        self._channel = channel
        self._memories = memories
        self._begun: tuple[Exchange, Tensor, list[int]] | None = None
        if memories:
            nonce = self._agree_on_nonce()
            for memory in memories:
                memory.start(nonce)
                self._compare_all(memory)

    def begin_step(self, samples: Sequence[int], upcoming: Sequence[int]) -> None:
        """Tell the other end what this one remembers of a step's sequences [S]; upcoming: ids of the next step's."""
        if self._memories:
            mine = torch.tensor([memory.begin_step(samples, upcoming) for memory in self._memories])
            self._begun = self._exchange(mine), mine, list(samples)
            self._channel.meter.sent_bytes += mine.nbytes

    def settle(self) -> None:
        """Hear what the other end remembers, if that has not been heard yet, and forget what differs."""
        if self._begun is None:
            return
        exchange, mine, samples = self._begun
        self._begun = None
        for memory, ours, theirs in zip(self._memories, mine, _as_ints(exchange).view_as(mine), strict=True):
            self._forget(memory, [sample for sample, same in zip(samples, ours == theirs, strict=True) if not same])

    def close(self) -> None:
        """Wait until what can outlive the process is kept."""
        for memory in self._memories:
            memory.close()

    def _agree_on_nonce(self) -> int:
        mine = torch.tensor([secrets.randbits(62)])
        return int(mine ^ _as_ints(self._exchange(mine)))

    def _compare_all(self, memory: ActivationCache) -> None:
        """Forget what the ends have kept from an earlier start and do not both have."""
        table = sorted(memory.versions().items())
        digest = hashlib.blake2b(repr(table).encode(), digest_size=7).digest()
        mine = torch.tensor([len(table), int.from_bytes(digest, "little")])
        summary = _as_ints(self._exchange(mine))
        if summary.equal(mine):
            return
        padded = torch.zeros(int(max(mine[0], summary[0])), 2, dtype=torch.int64)
        padded[: len(table)] = torch.tensor(table, dtype=torch.int64).view(-1, 2)
        theirs = {(sample, version) for sample, version in _as_ints(self._exchange(padded)).view(-1, 2).tolist()}
        self._forget(memory, [sample for sample, version in table if (sample, version) not in theirs])

    def _forget(self, memory: ActivationCache, samples: Sequence[int]) -> None:
        known = [sample for sample in samples if memory.knows(sample)]
        for sample in known:
            memory.forget(sample)
        if known:
            channel = self._channel
            log.warning(
                "boundary %d-%d: rank %d remembers something else of %d sequences, such as sample %d, or has lost it; "
                "they travel whole once more",
                *(channel.boundary, channel.boundary + 1, channel.peer, len(known), known[0]),
            )

    def _exchange(self, mine: Tensor) -> Exchange:
        message = mine.view(-1).view(torch.uint8)
        return Exchange(self._channel, message, tag=TAG, doing="comparing what is remembered with")


def _as_ints(exchange: Exchange) -> Tensor:
    return exchange.theirs().view(torch.int64)
