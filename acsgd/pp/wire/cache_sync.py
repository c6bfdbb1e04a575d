"""Synchronization of the activation caches at the two ends of a channel."""

# S samples of this replica in a step

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.channel import CACHE_SYNC_TAG, Channel, Exchange

log = logging.getLogger(__name__)


class CacheSync:
    """One end of the synchronization. caches: one per cached tensor and direction of the link; empty without delta.

    The constructor compares all entries, `begin_step` those of a step; both ends discard entries that differ or that
    one of them lacks. A step costs one message of 8 bytes per tensor and sample in each direction, in flight while the
    first micro-batch is computed. The messages of the step fail their checksums if this one is damaged.
    """

    def __init__(self, channel: Channel, caches: Sequence[ActivationCache]) -> None:
        self._channel = channel
        self._caches = caches
        self._pending: tuple[Exchange, Tensor, list[int]] | None = None
        if caches:
            nonce = self._common_nonce()
            for cache in caches:
                cache.set_nonce(nonce)
                self._compare_all(cache)

    def begin_step(self, samples: Sequence[int], upcoming: Sequence[int]) -> None:
        """Send the versions of a step's samples [S] and start to read their entries; upcoming: ids of the next step."""
        if self._caches:
            ours = torch.tensor([cache.begin_step(samples, upcoming) for cache in self._caches])
            self._pending = self._exchange(ours), ours, list(samples)
            self._channel.meter.sent_bytes += ours.nbytes

    def finish(self) -> None:
        """Receive the other end's versions, if not done yet, and discard the entries whose versions differ."""
        if self._pending is None:
            return
        exchange, ours, samples = self._pending
        self._pending = None
        equal = ours == _received(exchange).view_as(ours)
        for cache, row in zip(self._caches, equal.tolist(), strict=True):
            self._discard(cache, [sample for sample, is_equal in zip(samples, row, strict=True) if not is_equal])

    def close(self) -> None:
        """Wait until all entries are saved, and release threads and files."""
        for cache in self._caches:
            cache.close()

    def abort(self) -> None:
        """Drop the comparison in progress."""
        self._pending = None

    def _common_nonce(self) -> int:
        """Return a random number that is equal at both ends."""
        ours = torch.tensor([secrets.randbits(62)])
        return int(ours ^ _received(self._exchange(ours)))

    def _compare_all(self, cache: ActivationCache) -> None:
        """Discard saved entries that the other end does not have. Sends the table only if digests differ."""
        table = sorted(cache.versions().items())
        digest = hashlib.blake2b(repr(table).encode(), digest_size=7).digest()
        ours = torch.tensor([len(table), int.from_bytes(digest, "little")])
        theirs = _received(self._exchange(ours))
        if theirs.equal(ours):
            return
        padded = torch.zeros(int(max(ours[0], theirs[0])), 2, dtype=torch.int64)
        padded[: len(table)] = torch.tensor(table, dtype=torch.int64).view(-1, 2)
        their_table = {(sample, version) for sample, version in _received(self._exchange(padded)).view(-1, 2).tolist()}
        self._discard(cache, [sample for sample, version in table if (sample, version) not in their_table])

    def _discard(self, cache: ActivationCache, samples: Sequence[int]) -> None:
        discarded = [sample for sample in samples if sample in cache]
        for sample in discarded:
            cache.discard(sample)
        if discarded:
            boundary = self._channel.boundary
            log.warning(
                "boundary %d-%d: the activation caches of this rank and rank %d differ for %d samples, such as sample "
                "%d; these count as cache misses",
                *(boundary, boundary + 1, self._channel.peer, len(discarded), discarded[0]),
            )

    def _exchange(self, ours: Tensor) -> Exchange:
        data = ours.view(-1).view(torch.uint8)
        return Exchange(self._channel, data, tag=CACHE_SYNC_TAG, action="comparing activation caches with")


def _received(exchange: Exchange) -> Tensor:
    return exchange.wait().view(torch.int64)
