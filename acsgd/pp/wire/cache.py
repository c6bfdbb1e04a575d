"""What one end of a link remembers of every sequence, so that only the difference to its last visit has to travel.

Both ends remember the same, and know it: what an end holds of a sequence has a version, a hash of all visits that made
it, and at every step the ends compare versions before they rely on them. So it does not matter why something is missing
at one end, be it a new run, a damaged file, or a crash: what differs is forgotten at both and travels whole once.
"""

# n bytes of one entry: what is remembered of one sequence, encoded

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from acsgd.streams import DONE, Mark, Streams

ABSENT = 0
"""The version of what is not remembered."""


class EntryKey(NamedTuple):
    """Of what an entry is, and which of its states."""

    sample: int
    version: int


class Store(Protocol):
    """Numbered places for entries of n bytes, uint8[n] in host memory."""

    def begin(self, places: Iterable[int]) -> None:
        """Have the entries of these places at hand when asked for; a step that uses them begins."""
        ...

    def ahead(self, places: Iterable[int]) -> None:
        """Start to read what the step after this one will use."""
        ...

    def buffer(self, place: int) -> Tensor:
        """Return room for a new entry, which `put` then takes; what `read` gave before may be in it, or zeros."""
        ...

    def put(self, place: int, entry: Tensor, stamp: EntryKey, mark: Mark) -> None:
        """Keep an entry, all of which is there once `mark` is done."""
        ...

    def read(self, place: int, stamp: EntryKey) -> Tensor | None:
        """Return an entry, not copied; None if what is there is not what was put with this stamp."""
        ...

    def stamps(self) -> dict[int, EntryKey]:
        """Return what an earlier run has left, by place."""
        ...

    def close(self) -> None:
        """Wait until all that was put is kept."""
        ...


class HostMemoryStore:
    """Entries in host memory; they end with the process."""

    def __init__(self, nbytes: int, streams: Streams) -> None:
        self._nbytes = nbytes
        self._streams = streams
        self._entries: dict[int, Tensor] = {}

    def begin(self, places: Iterable[int]) -> None:
        pass

    def ahead(self, places: Iterable[int]) -> None:
        pass

    def buffer(self, place: int) -> Tensor:
        # An entry is overwritten in place: work on it is in the order of one stream, on a GPU too.
        return self._entries[place] if place in self._entries else self._streams.host_buffer(self._nbytes).zero_()

    def put(self, place: int, entry: Tensor, stamp: EntryKey, mark: Mark) -> None:
        self._entries[place] = entry

    def read(self, place: int, stamp: EntryKey) -> Tensor | None:
        return self._entries[place]

    def stamps(self) -> dict[int, EntryKey]:
        return {}

    def close(self) -> None:
        pass


class _Entry(NamedTuple):
    place: int
    version: int


_NOTHING = _Entry(-1, ABSENT)


class ActivationCache:
    """The entries of up to `capacity` sequences, each under its sample id.

    When it is full, it keeps the sequences whose ids have the smallest hashes: which ones depends on the ids alone, not
    on the order of visits, so both ends keep the same, and in every epoch a share of the sequences is found. The least
    recently used would be gone before it comes again.
    """

    def __init__(self, capacity: int, store: Store) -> None:
        self._store = store
        self._table: dict[int, _Entry] = {}
        self._worst: list[tuple[int, int]] = []
        """A heap of (-hash, sample), with those that were forgotten since."""
        self._nonce = 0
        for place, stamp in store.stamps().items():
            if place < capacity and stamp.sample not in self._table:
                self._add(stamp.sample, _Entry(place, stamp.version))
        used = {entry.place for entry in self._table.values()}
        self._free = [place for place in reversed(range(capacity)) if place not in used]

    def __len__(self) -> int:
        return len(self._table)

    def start(self, nonce: int) -> None:
        """Tell the visits of this start of a run from those of all others by a number that both ends have agreed on."""
        self._nonce = nonce

    def versions(self) -> dict[int, int]:
        """Return the version of everything that is remembered, by sample."""
        return {sample: entry.version for sample, entry in self._table.items()}

    def begin_step(self, samples: Sequence[int], upcoming: Sequence[int]) -> list[int]:
        """Get the entries of a step's sequences ready, and start to read those of the next; return their versions.

        An entry that turns out to be lost is forgotten: the other end may have lost the same, and would then agree.
        """
        self._store.begin(self._places(samples))
        versions = [self._sound_version(sample) for sample in samples]
        self._store.ahead(self._places(upcoming))
        return versions

    def knows(self, sample: int) -> bool:
        """Whether something is remembered of a sequence."""
        return sample in self._table

    def forget(self, sample: int) -> None:
        """Remember nothing of a sequence."""
        entry = self._table.pop(sample, None)
        if entry is not None:
            self._free.append(entry.place)

    def read(self, sample: int) -> Tensor:
        """Return what is remembered of a sequence that is known: uint8[n] in host memory, not copied."""
        entry = self._table[sample]
        found = self._store.read(entry.place, EntryKey(sample, entry.version))
        assert found is not None, f"sample {sample} was not made ready by begin"
        return found

    def buffer(self, sample: int) -> Tensor | None:
        """Return room for what is to be remembered of a sequence, for `put`; None if there is no room for it.

        To make room, something else may be forgotten.
        """
        if sample not in self._table:
            if not self._free and not self._evict_for(sample):
                return None
            self._add(sample, _Entry(self._free.pop(), ABSENT))
        return self._store.buffer(self._table[sample].place)

    def put(self, sample: int, entry: Tensor, step: int, micro: int, mark: Mark = DONE) -> None:
        """Remember `entry`, a buffer that `buffer` gave, as the sequence's state after a visit.

        mark: when all of it is there.
        """
        old = self._table[sample]
        version = self._next_version(old.version, step, micro)
        self._table[sample] = _Entry(old.place, version)
        self._store.put(old.place, entry, EntryKey(sample, version), mark)

    def close(self) -> None:
        """Wait until all that can outlive the process is kept."""
        self._store.close()

    def _places(self, samples: Iterable[int]) -> list[int]:
        return [self._table[sample].place for sample in samples if sample in self._table]

    def _sound_version(self, sample: int) -> int:
        place, version = self._table.get(sample, _NOTHING)
        if version != ABSENT and self._store.read(place, EntryKey(sample, version)) is None:
            self.forget(sample)
            return ABSENT
        return version

    def _add(self, sample: int, entry: _Entry) -> None:
        self._table[sample] = entry
        heapq.heappush(self._worst, (-_order(sample), sample))

    def _evict_for(self, sample: int) -> bool:
        """Forget the sequence that comes last in the order of hashes, unless `sample` comes after it."""
        while self._worst and self._worst[0][1] not in self._table:
            heapq.heappop(self._worst)
        if not self._worst or -self._worst[0][0] < _order(sample):
            return False
        self.forget(heapq.heappop(self._worst)[1])
        return True

    def _next_version(self, version: int, step: int, micro: int) -> int:
        return _hash(version, self._nonce, step, micro) or 1


def _order(sample: int) -> int:
    return _hash(sample)


def _hash(*numbers: int) -> int:
    """Return a number of 63 bits that depends on all of some numbers of up to 64 bits."""
    packed = struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
