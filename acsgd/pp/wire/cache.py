"""The activation cache of one end of a link: the last activations, or gradients of them, of each sample, encoded.

The caches of both ends must hold the same entries, as the receiver adds each decoded difference to its own entry. So
every entry has a version, a hash of all transfers that updated it, and the ends compare versions before each step.
Whatever the cause of a difference (a new run, a corrupt file, a crash), both ends discard the entry and the sample
counts as a cache miss.
"""

# n bytes of one entry

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from acsgd.streams import DONE, StreamEvent, Streams

ABSENT = 0
"""Version of a sample without an entry."""


class EntryKey(NamedTuple):
    """Identity of an entry's content."""

    sample: int
    version: int


class EntryStore(Protocol):
    """Numbered slots for entries, each uint8[n] in host memory when read or written."""

    def begin_step(self, slots: Iterable[int]) -> None:
        """Begin a step that uses these slots: start to read those that are not in memory."""
        ...

    def prefetch(self, slots: Iterable[int]) -> None:
        """Start to read the slots of the next step."""
        ...

    def buffer(self, slot: int) -> Tensor:
        """Return a buffer for a new entry, to be passed to `write`. It may hold what `read` returned, or zeros."""
        ...

    def write(self, slot: int, entry: Tensor, key: EntryKey, event: StreamEvent) -> None:
        """Store an entry, which is complete once `event` is done."""
        ...

    def read(self, slot: int, key: EntryKey) -> Tensor | None:
        """Return an entry, not copied; None if the slot does not hold the content that `key` identifies."""
        ...

    def saved_keys(self) -> dict[int, EntryKey]:
        """Return the entries that an earlier process has saved, by slot."""
        ...

    def close(self) -> None:
        """Wait until all entries are saved, and release threads and files."""
        ...


class HostMemoryStore:
    """Store in host memory. Its entries end with the process."""

    def __init__(self, nbytes: int, streams: Streams) -> None:
        self._nbytes = nbytes
        self._streams = streams
        self._entries: dict[int, Tensor] = {}

    def begin_step(self, slots: Iterable[int]) -> None:
        pass

    def prefetch(self, slots: Iterable[int]) -> None:
        pass

    def buffer(self, slot: int) -> Tensor:
        # Entries are overwritten in place. This is safe on a GPU, too: one stream orders all work on them.
        return self._entries[slot] if slot in self._entries else self._streams.host_buffer(self._nbytes).zero_()

    def write(self, slot: int, entry: Tensor, key: EntryKey, event: StreamEvent) -> None:
        self._entries[slot] = entry

    def read(self, slot: int, key: EntryKey) -> Tensor | None:
        return self._entries[slot]

    def saved_keys(self) -> dict[int, EntryKey]:
        return {}

    def close(self) -> None:
        pass


class _Location(NamedTuple):
    slot: int
    version: int


class ActivationCache:
    """Entries of up to `capacity` samples, by sample id.

    A full cache keeps the samples whose ids have the smallest hashes. That depends on the ids alone, not on the order
    of accesses, so both ends keep the same samples, and every epoch has the same share of hits. Least recently used
    would evict every entry before its sample comes again.
    """

    def __init__(self, capacity: int, store: EntryStore) -> None:
        self._store = store
        self._table: dict[int, _Location] = {}
        self._eviction_heap: list[tuple[int, int]] = []
        """(-hash, sample) of all entries, and of some that have been discarded."""
        self._nonce = 0
        for slot, key in store.saved_keys().items():
            if slot < capacity and key.sample not in self._table:
                self._add(key.sample, _Location(slot, key.version))
        used = {location.slot for location in self._table.values()}
        self._free = [slot for slot in reversed(range(capacity)) if slot not in used]

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, sample: int) -> bool:
        return sample in self._table

    def set_nonce(self, nonce: int) -> None:
        """Set the random number, equal at both ends, that makes the versions of this process unlike any other's."""
        self._nonce = nonce

    def versions(self) -> dict[int, int]:
        """Return the version of every entry, by sample."""
        return {sample: location.version for sample, location in self._table.items()}

    def pack_versions(self, samples: Sequence[int]) -> bytes:
        """Return the nonce and the versions of the samples' entries, packed; equal at both ends if the entries are."""
        versions = (self._table[sample].version if sample in self._table else ABSENT for sample in samples)
        return _pack(self._nonce, *versions)

    def begin_step(self, samples: Sequence[int], upcoming: Sequence[int]) -> list[int]:
        """Read the entries of a step's samples, start to read those of the next step's; return the versions read.

        Entries that cannot be read are discarded and have the version ABSENT. Their versions must not be compared, as
        the other end may have lost the same entry.
        """
        self._store.begin_step(self._slots(samples))
        versions = [self._readable_version(sample) for sample in samples]
        self._store.prefetch(self._slots(upcoming))
        return versions

    def discard(self, sample: int) -> None:
        """Remove the entry of a sample, if there is one."""
        location = self._table.pop(sample, None)
        if location is not None:
            self._free.append(location.slot)

    def read(self, sample: int) -> Tensor:
        """Return the entry of a sample that has one: uint8[n] in host memory, not copied."""
        location = self._table[sample]
        entry = self._store.read(location.slot, EntryKey(sample, location.version))
        assert entry is not None, f"begin_step has not read sample {sample}"
        return entry

    def reserve(self, sample: int) -> Tensor | None:
        """Return a buffer for the new entry of a sample, to be passed to `write`; None if the cache has no room for it.

        May evict another sample.
        """
        if sample not in self._table:
            if not self._free and not self._evict_for(sample):
                return None
            self._add(sample, _Location(self._free.pop(), ABSENT))
        return self._store.buffer(self._table[sample].slot)

    def write(self, sample: int, entry: Tensor, step: int, micro: int, event: StreamEvent = DONE) -> None:
        """Store the entry of a sample after a transfer.

        entry: a buffer from `reserve`, complete once `event` is done; step, micro: of the transfer.
        """
        old = self._table[sample]
        version = _hash(old.version, self._nonce, step, micro) or 1
        self._table[sample] = _Location(old.slot, version)
        self._store.write(old.slot, entry, EntryKey(sample, version), event)

    def close(self) -> None:
        """Wait until all entries are saved, and release threads and files."""
        self._store.close()

    def _slots(self, samples: Iterable[int]) -> list[int]:
        return [self._table[sample].slot for sample in samples if sample in self._table]

    def _readable_version(self, sample: int) -> int:
        location = self._table.get(sample)
        if location is None:
            return ABSENT
        if location.version != ABSENT and self._store.read(location.slot, EntryKey(sample, location.version)) is None:
            self.discard(sample)
            return ABSENT
        return location.version

    def _add(self, sample: int, location: _Location) -> None:
        self._table[sample] = location
        heapq.heappush(self._eviction_heap, (-_hash(sample), sample))

    def _evict_for(self, sample: int) -> bool:
        """Evict the sample with the largest hash, unless the hash of `sample` is larger."""
        heap = self._eviction_heap
        while heap and heap[0][1] not in self._table:
            heapq.heappop(heap)
        if not heap or -heap[0][0] < _hash(sample):
            return False
        self.discard(heapq.heappop(heap)[1])
        return True


def _hash(*numbers: int) -> int:
    """Return a 63-bit hash of integers, each taken modulo 2**64."""
    return int.from_bytes(hashlib.blake2b(_pack(*numbers), digest_size=8).digest(), "little") >> 1


def _pack(*numbers: int) -> bytes:
    """Return integers in 8 bytes each, taken modulo 2**64."""
    return struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
