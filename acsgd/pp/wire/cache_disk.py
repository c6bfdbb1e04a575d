"""Entries of a memory in one file: read ahead and written behind by a thread, checked, and there for the next start.

    the first 4096 bytes     JSON: what the entries are of, padded with spaces
    from there on, by place  an entry, n bytes; its sample, version and checksum, 20 bytes

A write that never ended, or a byte that changed, is found by the checksum: the entry then counts as lost.
"""

# n bytes of one entry

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from acsgd.errors import RunError
from acsgd.pp.wire.cache import ABSENT, EntryKey
from acsgd.streams import Mark, Streams

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
_TRAILER = struct.Struct("<qqI")


class _Found(NamedTuple):
    """An entry, and of what it is."""

    entry: Tensor
    stamp: EntryKey


class DiskStore:
    """Entries of n = `nbytes` bytes in the file `path`.

    kept: what the entries are of. A file of the same is gone on with, unless `fresh`; any other is overwritten.
    In memory are the entries of a step, those of the next, and those that are not written yet, of two steps at most.
    Raises RunError if the file cannot be written.
    """

    def __init__(self, path: Path, nbytes: int, kept: Mapping[str, Any], streams: Streams, *, fresh: bool) -> None:
        self._path = path
        self._nbytes = nbytes
        self._streams = streams
        self._at_hand: dict[int, Future[_Found | None]] = {}
        """By place, the newest state of an entry, read or put; None if it is lost."""
        self._writes: dict[int, Future[None]] = {}
        """By place, the newest write of an entry."""
        self._former_writes: list[Future[None]] = []
        self._spare: list[Tensor] = []
        self._retired: list[Tensor] = []
        self._is_told = False
        header = json.dumps({**kept, "entry_bytes": nbytes}).encode().ljust(HEADER_BYTES)
        try:
            self._file = _open(path, header, fresh=fresh)
        except OSError as error:
            raise RunError(
                f"{path} cannot be written ({error.strerror}); give another log.dir, or cache=ram in pp.forward"
            ) from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"memory {path.name}")

    def begin(self, places: Iterable[int]) -> None:
        for write in self._former_writes:  # or a slow disk would let what is not written grow without bounds
            write.result()
        self._writes = {place: write for place, write in self._writes.items() if not write.done()}
        self._former_writes = list(self._writes.values())
        self._spare += self._retired  # what a GPU still copied from them has been copied: the last step has ended
        self._retired = []
        wanted = set(places)
        for place in [place for place in self._at_hand if place not in wanted and place not in self._writes]:
            self._retire(self._at_hand.pop(place))
        self.ahead(wanted)

    def ahead(self, places: Iterable[int]) -> None:
        for place in places:
            if place not in self._at_hand:
                self._at_hand[place] = self._thread.submit(self._read, place)

    def buffer(self, place: int) -> Tensor:
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        return self._streams.host_buffer(self._nbytes).zero_()  # what lies between fields must not be of others

    def put(self, place: int, entry: Tensor, stamp: EntryKey, mark: Mark) -> None:
        if place in self._at_hand and place not in self._writes:
            self._retire(self._at_hand[place])
        present: Future[_Found | None] = Future()
        present.set_result(_Found(entry, stamp))
        self._at_hand[place] = present
        self._writes[place] = self._thread.submit(self._write, place, entry, stamp, mark)

    def read(self, place: int, stamp: EntryKey) -> Tensor | None:
        self.ahead([place])
        found = self._at_hand[place].result()
        return found.entry if found is not None and found.stamp == stamp else None

    def stamps(self) -> dict[int, EntryKey]:
        found = {}
        for place in range((os.fstat(self._file).st_size - HEADER_BYTES) // (self._nbytes + _TRAILER.size)):
            try:
                raw = os.pread(self._file, _TRAILER.size, self._offset(place) + self._nbytes)
            except OSError as error:
                self._tell(f"cannot be read ({error.strerror})")
                break
            sample, version, _ = _TRAILER.unpack(raw)
            if version != ABSENT:
                found[place] = EntryKey(sample, version)
        return found

    def close(self) -> None:
        self._thread.shutdown()
        os.close(self._file)

    def _retire(self, read: Future[_Found | None]) -> None:
        """Use the memory of an entry again, from the next step on."""
        if read.done() and (found := read.result()) is not None:
            self._retired.append(found.entry)

    def _offset(self, place: int) -> int:
        return HEADER_BYTES + place * (self._nbytes + _TRAILER.size)

    # From here on, in the thread, one after another as asked for: a read finds what was written before it.

    def _read(self, place: int) -> _Found | None:
        entry, trailer = self.buffer(place), bytearray(_TRAILER.size)
        try:
            got = os.preadv(self._file, [entry.numpy().data, trailer], self._offset(place))
        except OSError as error:
            self._tell(f"cannot be read ({error.strerror})")
            return None
        sample, version, checksum = _TRAILER.unpack(trailer)
        stamp = EntryKey(sample, version)
        if got < self._nbytes + _TRAILER.size or checksum != _checksum(entry, stamp):
            self._tell("is damaged")
            return None
        return _Found(entry, stamp)

    def _write(self, place: int, entry: Tensor, stamp: EntryKey, mark: Mark) -> None:
        mark.wait()
        trailer = _TRAILER.pack(*stamp, _checksum(entry, stamp))
        try:
            wrote = os.pwritev(self._file, [entry.numpy().data, trailer], self._offset(place))
            if wrote < self._nbytes + _TRAILER.size:
                self._tell("could not be written whole: is the disk full?")
        except OSError as error:
            self._tell(f"cannot be written ({error.strerror})")

    def _tell(self, what: str) -> None:
        """Warn, once: what is lost is found out when it is read, and sent whole again."""
        if not self._is_told:
            log.warning("%s: an entry %s; such sequences travel whole once more", self._path, what)
            self._is_told = True


def _open(path: Path, header: bytes, *, fresh: bool) -> int:
    """Return the descriptor of a file that begins with `header`; its other bytes are kept if it did already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if fresh or os.pread(file, HEADER_BYTES, 0) != header:
            os.ftruncate(file, 0)
            os.pwrite(file, header, 0)
    except OSError:
        os.close(file)
        raise
    return file


def _checksum(entry: Tensor, stamp: EntryKey) -> int:
    return zlib.crc32(entry.numpy().data, zlib.crc32(_TRAILER.pack(*stamp, 0)))
