"""The store on disk: a read returns what was written or nothing, and never something else, whatever the disk does."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from acsgd.errors import RunError
from acsgd.pp.wire.cache import ActivationCache, EntryKey
from acsgd.pp.wire.cache_disk import HEADER_BYTES, TRAILER_BYTES, DiskStore
from acsgd.streams import DONE, Streams

N = 24
SLOT_BYTES = N + TRAILER_BYTES
IDENTITY = {"run": "a", "tensor": "b"}
CPU = Streams(torch.device("cpu"))
KEYS = {0: EntryKey(7, 100), 1: EntryKey(3, 2**63 - 1), 4: EntryKey(2**40, 1)}
Pwritev = Callable[[int, list[Any], int], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "activation-cache" / "block-00001.sender.hidden"


@pytest.fixture
def open_store(path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Return a function that closes the store it opened before and opens one."""
    stores: list[DiskStore] = []

    def reopen(nbytes: int = N, identity: dict[str, Any] = IDENTITY, *, fresh: bool = False) -> DiskStore:
        if stores:
            stores.pop().close()
        stores.append(DiskStore(path, nbytes, identity, CPU, fresh=fresh))
        return stores[-1]

    yield reopen
    for store in stores:
        store.close()


def entry_of(key: EntryKey | int) -> Tensor:
    """Return an entry that follows from its key, uint8[N]."""
    return torch.randint(256, (N,), dtype=torch.uint8, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def write(store: DiskStore, slot: int, key: EntryKey) -> None:
    buffer = store.buffer(slot)
    assert buffer.shape == (N,)
    store.write(slot, buffer.copy_(entry_of(key)), key, DONE)


def holds(store: DiskStore, slot: int, key: EntryKey) -> bool:
    """Whether a slot returns the entry of a key; what it returns must be that entry."""
    entry = store.read(slot, key)
    assert entry is None or torch.equal(entry, entry_of(key))
    return entry is not None


def fill(open_store: Callable[..., DiskStore]) -> None:
    store = open_store(fresh=True)
    for slot, key in KEYS.items():
        write(store, slot, key)
    open_store()


def test_entries_are_there_after_reopening(open_store: Callable[..., DiskStore]) -> None:
    fill(open_store)
    store = open_store()
    assert store.saved_keys() == KEYS
    assert all(holds(store, slot, key) for slot, key in KEYS.items())
    assert not holds(store, 0, EntryKey(7, 101)), "another version"
    assert not holds(store, 0, EntryKey(8, 100)), "another sample"
    assert not holds(store, 2, EntryKey(0, 0)), "never written"
    assert not holds(store, 9, EntryKey(7, 100)), "beyond the end"


def test_file_of_another_identity_is_overwritten(open_store: Callable[..., DiskStore]) -> None:
    others: list[dict[str, Any]] = [
        {"nbytes": N + 16},
        {"identity": {**IDENTITY, "run": "c"}},
        {"identity": {}},
        {"fresh": True},
    ]
    for other in others:
        fill(open_store)
        assert open_store(**other).saved_keys() == {}, other
        assert open_store(**(other | {"fresh": False})).saved_keys() == {}, other
        store = open_store()
        assert store.saved_keys() == {}, other
        assert not holds(store, 0, KEYS[0]), other


def test_each_flipped_bit_of_an_entry_and_its_trailer_is_found(
    path: Path, open_store: Callable[..., DiskStore]
) -> None:
    fill(open_store)
    raw = bytearray(path.read_bytes())
    begin = HEADER_BYTES + SLOT_BYTES
    for bit in range(8 * SLOT_BYTES):
        raw[begin + bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        store = open_store()
        assert not holds(store, 1, KEYS[1]), bit
        saved = store.saved_keys().get(1)
        assert saved is None or store.read(1, saved) is None, f"bit {bit}: taken for {saved}"
        assert holds(store, 0, KEYS[0]), bit
        assert holds(store, 4, KEYS[4]), bit
        raw[begin + bit // 8] ^= 1 << bit % 8


def test_flipped_bit_of_the_header_makes_another_identity(path: Path, open_store: Callable[..., DiskStore]) -> None:
    fill(open_store)
    raw = path.read_bytes()
    for position in range(0, HEADER_BYTES, 13):
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 1 << position % 8]) + raw[position + 1 :])
        assert open_store().saved_keys() == {}, position
        assert path.stat().st_size == HEADER_BYTES


def test_truncated_file_keeps_its_complete_entries(path: Path, open_store: Callable[..., DiskStore]) -> None:
    fill(open_store)
    raw = path.read_bytes()
    for size in [*range(0, HEADER_BYTES, 500), *range(HEADER_BYTES - 1, len(raw))]:
        path.write_bytes(raw[:size])
        store = open_store()
        for slot, key in KEYS.items():
            complete = size >= HEADER_BYTES + (slot + 1) * SLOT_BYTES
            assert (slot in store.saved_keys()) is complete, (size, slot)
            assert holds(store, slot, key) is complete, (size, slot)


@pytest.mark.parametrize("obstacle", ["a file for a directory", "a directory for a file", "no permission", "full"])
def test_file_that_cannot_be_created_is_an_error_with_advice(
    obstacle: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "a file for a directory":
        path.parent.write_text("")
    elif obstacle == "a directory for a file":
        path.mkdir(parents=True)
    else:
        number = errno.ENOSPC if obstacle == "full" else errno.EACCES
        monkeypatch.setattr(os, "pwrite" if obstacle == "full" else "open", failing(number))
    with pytest.raises(RunError) as error:
        DiskStore(path, N, IDENTITY, CPU, fresh=False)
    for text in (str(path), "cannot be written", "log.dir", "cache=ram"):
        assert text in str(error.value)
    assert error.value.__cause__ is None


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def full(fits: int) -> Pwritev:
    """Return an os.pwritev that writes only the first bytes, `fits` of them; it raises for 0."""
    pwrite = os.pwrite

    def pwritev(file: int, parts: list[Any], offset: int) -> int:
        if fits == 0:
            failing(errno.ENOSPC)()
        return pwrite(file, b"".join(map(bytes, parts))[:fits], offset)

    return pwritev


@pytest.mark.parametrize("fits", [0, 1, N - 1, N, N + 8, SLOT_BYTES - 1])
def test_full_disk_loses_entries_with_one_warning(
    fits: int,
    open_store: Callable[..., DiskStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(open_store)
    store = open_store()
    newer = {slot: EntryKey(key.sample, key.version // 2 + 7) for slot, key in KEYS.items()}
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "pwritev", full(fits))
        for slot, key in newer.items():
            write(store, slot, key)
            assert holds(store, slot, key), "it is still in memory"
        for _ in range(3):
            store.begin_step([])
        assert not any(holds(store, slot, key) for slot, key in newer.items())
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "count as cache misses" in caplog.text
        assert "full" in caplog.text or "No space left" in caplog.text
    store.begin_step([])
    write(store, 0, EntryKey(7, 555))  # there is space again
    store = open_store()
    assert holds(store, 0, EntryKey(7, 555))
    for slot in (1, 4):
        saved = store.saved_keys().get(slot)
        assert not holds(store, slot, newer[slot])
        assert saved is None or store.read(slot, saved) is None or saved == KEYS[slot]


def test_failing_read_is_a_warning(
    open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(open_store)
    store = open_store()
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    store.begin_step(KEYS)
    assert not any(holds(store, slot, key) for slot, key in KEYS.items())
    assert len(caplog.records) == 1
    assert "cannot be read" in caplog.text


def test_failing_list_of_entries_is_a_warning(
    open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(open_store)
    store = open_store()
    monkeypatch.setattr(os, "pread", failing(errno.EIO))
    with caplog.at_level(logging.WARNING):
        assert store.saved_keys() == {}
    [record] = caplog.records
    assert "cannot be read" in record.getMessage()


def test_lost_entry_is_discarded_and_can_be_written_again(path: Path, open_store: Callable[..., DiskStore]) -> None:
    fill(open_store)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\x55\xaa")
    cache = ActivationCache(5, open_store())
    assert cache.begin_step([7, 3, 7, 9], []) == [0, KEYS[1].version, 0, 0]
    assert 7 not in cache
    buffer = cache.reserve(7)
    assert buffer is not None
    cache.write(7, buffer.copy_(entry_of(1)), step=0, micro=0)
    (version,) = cache.begin_step([7], [])
    assert version == cache.versions()[7] != 0
    assert torch.equal(cache.read(7), entry_of(1))
    assert ActivationCache(5, open_store()).versions()[7] == version


class SlowDisk:
    """An os.pwritev that waits for `proceed`."""

    def __init__(self) -> None:
        self.proceed, self._pwritev = threading.Event(), os.pwritev
        self.slots: list[int] = []

    def __call__(self, file: int, parts: list[Any], offset: int) -> int:
        assert self.proceed.wait(30)
        self.slots.append((offset - HEADER_BYTES) // SLOT_BYTES)
        return self._pwritev(file, parts, offset)


def test_unfinished_writes_are_read_as_written(
    open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_store)
    store, slow = open_store(), SlowDisk()
    monkeypatch.setattr(os, "pwritev", slow)
    store.begin_step([1, 0])
    store.prefetch([4])
    for version in (5, 6, 7):
        write(store, 0, EntryKey(7, version))
        write(store, 1, EntryKey(3, version))
        assert holds(store, 0, EntryKey(7, version))
        assert holds(store, 1, EntryKey(3, version))
    store.begin_step([4])  # the second step; the writes of the first are unfinished
    assert holds(store, 0, EntryKey(7, 7))
    write(store, 4, EntryKey(2**40, 9))
    assert slow.slots == []
    slow.proceed.set()
    store = open_store()  # closing waits
    assert slow.slots == [0, 1, 0, 1, 0, 1, 4]
    assert store.saved_keys() == {0: EntryKey(7, 7), 1: EntryKey(3, 7), 4: EntryKey(2**40, 9)}
    assert holds(store, 0, EntryKey(7, 7))


def test_writes_of_at_most_two_steps_are_unfinished(
    open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, slow = open_store(), SlowDisk()
    monkeypatch.setattr(os, "pwritev", slow)
    for step in range(2):
        store.begin_step([])
        write(store, step, EntryKey(step, 1))
    third = threading.Thread(target=store.begin_step, args=([],))
    third.start()
    third.join(0.2)
    assert third.is_alive(), "the third step began before the writes of the first had ended"
    slow.proceed.set()
    third.join(30)
    assert not third.is_alive()


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_behave_as_a_dict(
    seed: int, open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that read ahead, write, overwrite within a step and reopen, on a disk that is now fast and now slow."""
    draw, pwritev = random.Random(seed), os.pwritev
    pauses = random.Random(seed)

    def sometimes_slow(file: int, parts: list[Any], offset: int) -> int:
        threading.Event().wait(pauses.choice([0, 0, 0.003]))
        return pwritev(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", sometimes_slow)
    store, expected = open_store(), dict[int, EntryKey]()
    upcoming = draw.sample(range(12), 5)
    for step in range(60):
        slots, upcoming = upcoming, draw.sample(range(12), 5)
        if draw.random() < 0.1:
            store = open_store()
            assert store.saved_keys() == expected
        store.begin_step([slot for slot in slots if slot in expected])
        store.prefetch([slot for slot in upcoming if slot in expected])
        for slot in slots + draw.sample(slots, 2):
            assert slot not in expected or holds(store, slot, expected[slot])
            expected[slot] = EntryKey(slot, 100 * step + draw.randrange(1, 100))
            write(store, slot, expected[slot])
    assert open_store().saved_keys() == expected
