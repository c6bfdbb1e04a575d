"""Entry store in one file, read ahead and written behind by a thread, and available to the next process.

    first 4096 bytes     JSON: what the entries belong to, padded with spaces
    then, slot by slot   an entry, n bytes; its sample, version and checksum, 20 bytes

The checksum detects incomplete writes and changed bytes; such an entry counts as lost.
"""

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
from acsgd.streams import StreamEvent, Streams

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
_TRAILER = struct.Struct("<qqI")
TRAILER_BYTES = _TRAILER.size


class _Entry(NamedTuple):
    data: Tensor
    key: EntryKey


class DiskStore:
    """Store of entries of n = `nbytes` bytes in the file `path`.

    identity: what the entries belong to. A file with the same identity is reused, unless `fresh`; any other is
    overwritten. Host memory holds the entries of a step and of the next one, and unfinished writes of at most two
    steps. Raises RunError if the file cannot be written.
    """

    def __init__(self, path: Path, nbytes: int, identity: Mapping[str, Any], streams: Streams, *, fresh: bool) -> None:
        self._path = path
        self._nbytes = nbytes
        self._streams = streams
        self._resident: dict[int, Future[_Entry | None]] = {}
        """By slot, the newest content, read or written; None if it is lost."""
        self._writes: dict[int, Future[None]] = {}
        """By slot, the newest write."""
        self._writes_before_step: list[Future[None]] = []
        """Writes of earlier steps that were unfinished when the present one began."""
        self._free_buffers: list[Tensor] = []
        self._retired_buffers: list[Tensor] = []
        """Buffers that become free when the next step begins: until then the device may read them."""
        self._has_warned = False
        header = json.dumps({**identity, "entry_bytes": nbytes}).encode().ljust(HEADER_BYTES)
        try:
            self._file = _open(path, header, fresh=fresh)
        except OSError as error:
            raise RunError(
                f"{path} cannot be written ({error.strerror}); use another log.dir, or cache=ram in each delta"
            ) from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"cache {path.name}")

    def begin_step(self, slots: Iterable[int]) -> None:
        for write in self._writes_before_step:  # bounds the memory of unfinished writes on a slow disk
            write.result()
        self._writes = {slot: write for slot, write in self._writes.items() if not write.done()}
        self._writes_before_step = list(self._writes.values())
        self._free_buffers += self._retired_buffers
        self._retired_buffers = []
        wanted = set(slots)
        for slot in [slot for slot in self._resident if slot not in wanted and slot not in self._writes]:
            self._retire(self._resident.pop(slot))
        self.prefetch(wanted)

    def prefetch(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot not in self._resident:
                self._resident[slot] = self._thread.submit(self._read, slot)

    def buffer(self, slot: int) -> Tensor:
        with contextlib.suppress(IndexError):
            return self._free_buffers.pop()
        return self._streams.host_buffer(self._nbytes).zero_()  # the padding between fields must be equal at both ends

    def write(self, slot: int, entry: Tensor, key: EntryKey, event: StreamEvent) -> None:
        if slot in self._resident and slot not in self._writes:
            self._retire(self._resident[slot])
        content: Future[_Entry | None] = Future()
        content.set_result(_Entry(entry, key))
        self._resident[slot] = content
        self._writes[slot] = self._thread.submit(self._write, slot, entry, key, event)

    def read(self, slot: int, key: EntryKey) -> Tensor | None:
        self.prefetch([slot])
        entry = self._resident[slot].result()
        return entry.data if entry is not None and entry.key == key else None

    def saved_keys(self) -> dict[int, EntryKey]:
        keys = {}
        for slot in range((os.fstat(self._file).st_size - HEADER_BYTES) // (self._nbytes + TRAILER_BYTES)):
            try:
                raw = os.pread(self._file, TRAILER_BYTES, self._offset(slot) + self._nbytes)
            except OSError as error:
                self._warn(f"cannot be read ({error.strerror})")
                break
            sample, version, _ = _TRAILER.unpack(raw)
            if version != ABSENT:
                keys[slot] = EntryKey(sample, version)
        return keys

    def close(self) -> None:
        self._thread.shutdown()
        os.close(self._file)

    def _retire(self, content: Future[_Entry | None]) -> None:
        if content.done() and (entry := content.result()) is not None:
            self._retired_buffers.append(entry.data)

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * (self._nbytes + TRAILER_BYTES)

    # The thread runs what follows in the order of submission, so a read returns what was written before it.

    def _read(self, slot: int) -> _Entry | None:
        entry, trailer = self.buffer(slot), bytearray(TRAILER_BYTES)
        try:
            nbytes = os.preadv(self._file, [entry.numpy().data, trailer], self._offset(slot))
        except OSError as error:
            self._warn(f"cannot be read ({error.strerror})")
            return None
        sample, version, checksum = _TRAILER.unpack(trailer)
        key = EntryKey(sample, version)
        if nbytes < self._nbytes + TRAILER_BYTES or checksum != _checksum(entry, key):
            self._warn("is corrupt")
            return None
        return _Entry(entry, key)

    def _write(self, slot: int, entry: Tensor, key: EntryKey, event: StreamEvent) -> None:
        event.synchronize()
        trailer = _TRAILER.pack(*key, _checksum(entry, key))
        try:
            nbytes = os.pwritev(self._file, [entry.numpy().data, trailer], self._offset(slot))
            if nbytes < self._nbytes + TRAILER_BYTES:
                self._warn("is incomplete on disk: is the disk full?")
        except OSError as error:
            self._warn(f"cannot be written ({error.strerror})")

    def _warn(self, problem: str) -> None:
        """Log the first problem with an entry; the entry is found lost when it is read."""
        if not self._has_warned:
            log.warning("%s: a cache entry %s; samples with lost entries count as cache misses", self._path, problem)
            self._has_warned = True


def _open(path: Path, header: bytes, *, fresh: bool) -> int:
    """Open a file for reading and writing. Its entries are kept if it starts with `header`, unless `fresh`."""
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


def _checksum(entry: Tensor, key: EntryKey) -> int:
    return zlib.crc32(entry.numpy().data, zlib.crc32(_TRAILER.pack(*key, 0)))
