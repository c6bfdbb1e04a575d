"""Laws of the store on disk: what is read is what was put, or nothing; never something else, whatever the disk does."""

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
from acsgd.pp.wire.cache_disk import HEADER_BYTES, DiskStore
from acsgd.streams import DONE, Streams

N = 24
TRAILER = 20
KEPT = {"run": "a", "tensor": "b"}
STREAMS = Streams(torch.device("cpu"))
Pwritev = Callable[[int, list[Any], int], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory" / "block-00001.sender.hidden"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Return a function that opens a store after it has closed the one before."""
    stores: list[DiskStore] = []

    def reopen(nbytes: int = N, kept: dict[str, Any] = KEPT, *, fresh: bool = False) -> DiskStore:
        if stores:
            stores.pop().close()
        stores.append(DiskStore(path, nbytes, kept, STREAMS, fresh=fresh))
        return stores[-1]

    yield reopen
    for store in stores:
        store.close()


def entry_of(number: int, n: int = N) -> Tensor:
    return torch.randint(256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def put(store: DiskStore, place: int, stamp: EntryKey) -> None:
    """Put an entry that follows from its stamp."""
    room = store.buffer(place)
    assert room.shape == (N,)
    store.write(place, room.copy_(entry_of(hash(stamp) % 2**31)), stamp, DONE)


def holds(store: DiskStore, place: int, stamp: EntryKey) -> bool:
    """Whether a place gives the entry of a stamp; if it gives anything, it must be that."""
    found = store.read(place, stamp)
    assert found is None or torch.equal(found, entry_of(hash(stamp) % 2**31))
    return found is not None


STAMPS = {0: EntryKey(7, 100), 1: EntryKey(3, 2**63 - 1), 4: EntryKey(2**40, 1)}


def filled(opened: Callable[..., DiskStore]) -> None:
    store = opened(fresh=True)
    for place, stamp in STAMPS.items():
        put(store, place, stamp)
    opened()


def test_what_was_put_is_there_after_a_new_start(opened: Callable[..., DiskStore]) -> None:
    filled(opened)
    store = opened()
    assert store.saved_keys() == STAMPS
    assert all(holds(store, place, stamp) for place, stamp in STAMPS.items())
    assert not holds(store, 0, EntryKey(7, 101)), "another state"
    assert not holds(store, 0, EntryKey(8, 100)), "another sequence"
    assert not holds(store, 2, EntryKey(0, 0)), "never put"
    assert not holds(store, 9, EntryKey(7, 100)), "beyond the end"


@pytest.mark.parametrize("other", [{"nbytes": N + 16}, {"kept": {**KEPT, "run": "c"}}, {"kept": {}}, {"fresh": True}])
def test_a_file_of_something_else_is_begun_anew(other: dict[str, Any], opened: Callable[..., DiskStore]) -> None:
    filled(opened)
    assert opened(**other).saved_keys() == {}
    assert opened(**(other | {"fresh": False})).saved_keys() == {}
    store = opened()
    assert store.saved_keys() == {}
    assert not holds(store, 0, STAMPS[0])


def test_each_flipped_bit_of_an_entry_and_what_follows_it_is_found(
    path: Path, opened: Callable[..., DiskStore]
) -> None:
    filled(opened)
    raw = bytearray(path.read_bytes())
    begin = HEADER_BYTES + N + TRAILER
    for bit in range(8 * (N + TRAILER)):
        raw[begin + bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        store = opened()
        assert not holds(store, 1, STAMPS[1]), bit
        told = store.saved_keys().get(1)
        assert told is None or store.read(1, told) is None, f"bit {bit}: taken for {told}"
        assert holds(store, 0, STAMPS[0])
        assert holds(store, 4, STAMPS[4])
        raw[begin + bit // 8] ^= 1 << bit % 8


def test_a_flipped_bit_of_the_header_makes_it_a_file_of_something_else(
    path: Path, opened: Callable[..., DiskStore]
) -> None:
    filled(opened)
    raw = path.read_bytes()
    for place in range(0, HEADER_BYTES, 13):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :])
        assert opened().saved_keys() == {}, place
        assert path.stat().st_size == HEADER_BYTES


def test_of_a_file_cut_anywhere_all_that_is_whole_is_there(path: Path, opened: Callable[..., DiskStore]) -> None:
    filled(opened)
    raw = path.read_bytes()
    for size in [*range(0, HEADER_BYTES, 500), *range(HEADER_BYTES - 1, len(raw))]:
        path.write_bytes(raw[:size])
        store = opened()
        for place, stamp in STAMPS.items():
            whole = size >= HEADER_BYTES + (place + 1) * (N + TRAILER)
            assert (place in store.saved_keys()) is whole
            assert holds(store, place, stamp) is whole, (size, place)


@pytest.mark.parametrize("obstacle", ["a file for a directory", "a directory for a file", "no permission", "full"])
def test_a_file_that_cannot_be_begun_ends_the_run_with_what_to_do(
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
        DiskStore(path, N, KEPT, STREAMS, fresh=False)
    for said in (str(path), "cannot be written", "log.dir", "cache=ram"):
        assert said in str(error.value)
    assert error.value.__cause__ is None


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def full(wrote: int) -> Pwritev:
    """Return an os.pwritev that has room for so many bytes of each write; with none, it raises."""
    pwrite = os.pwrite

    def pwritev(file: int, parts: list[Any], offset: int) -> int:
        if wrote == 0:
            failing(errno.ENOSPC)()
        return pwrite(file, b"".join(map(bytes, parts))[:wrote], offset)

    return pwritev


@pytest.mark.parametrize("wrote", [0, 1, N - 1, N, N + 8, N + TRAILER - 1])
def test_on_a_full_disk_nothing_wrong_is_read_and_one_warning_says_so(
    wrote: int, opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(opened)
    store = opened()
    newer = {place: EntryKey(stamp.sample, stamp.version // 2 + 7) for place, stamp in STAMPS.items()}
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "pwritev", full(wrote))
        for place, stamp in newer.items():
            put(store, place, stamp)
            assert holds(store, place, stamp), "it is still in memory"
        for _ in range(3):
            store.begin_step([])
        assert not any(holds(store, place, stamp) for place, stamp in newer.items())
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "count as cache misses" in caplog.text
        assert "full" in caplog.text or "No space left" in caplog.text
    store.begin_step([])
    put(store, 0, EntryKey(7, 555))  # there is room again
    store = opened()
    assert holds(store, 0, EntryKey(7, 555))
    for place in (1, 4):
        told = store.saved_keys().get(place)
        assert not holds(store, place, newer[place])
        assert told is None or store.read(place, told) is None or told == STAMPS[place]


def test_a_read_that_fails_is_a_warning(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(opened)
    store = opened()
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    store.begin_step(STAMPS)
    assert not any(holds(store, place, stamp) for place, stamp in STAMPS.items())
    assert len(caplog.records) == 1
    assert "cannot be read" in caplog.text


def test_a_file_whose_entries_cannot_be_listed_is_a_warning(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(opened)
    store = opened()
    monkeypatch.setattr(os, "pread", failing(errno.EIO))
    with caplog.at_level(logging.WARNING):
        assert store.saved_keys() == {}
    [record] = caplog.records
    assert "cannot be read" in record.getMessage()


def test_what_is_lost_is_forgotten_and_can_be_put_again(path: Path, opened: Callable[..., DiskStore]) -> None:
    filled(opened)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\x55\xaa")
    memory = ActivationCache(5, opened())
    assert memory.begin_step([7, 3, 7, 9], []) == [0, STAMPS[1].version, 0, 0]
    assert 7 not in memory
    room = memory.reserve(7)
    assert room is not None
    memory.write(7, room.copy_(entry_of(1)), step=0, micro=0)
    (version,) = memory.begin_step([7], [])
    assert version == memory.versions()[7] != 0
    assert torch.equal(memory.read(7), entry_of(1))
    assert ActivationCache(5, opened()).versions()[7] == version


class SlowDisk:
    """An os.pwritev that waits until it is let go on."""

    def __init__(self) -> None:
        self.go_on, self._pwritev = threading.Event(), os.pwritev
        self.order: list[int] = []

    def __call__(self, file: int, parts: list[Any], offset: int) -> int:
        assert self.go_on.wait(30)
        self.order.append((offset - HEADER_BYTES) // (N + TRAILER))
        return self._pwritev(file, parts, offset)


def test_what_is_not_written_yet_is_read_as_it_will_be(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(opened)
    store, slow = opened(), SlowDisk()
    monkeypatch.setattr(os, "pwritev", slow)
    store.begin_step([1, 0])
    store.prefetch([4])
    for version in (5, 6, 7):
        put(store, 0, EntryKey(7, version))
        put(store, 1, EntryKey(3, version))
        assert holds(store, 0, EntryKey(7, version))
        assert holds(store, 1, EntryKey(3, version))
    store.begin_step([4])  # of the second step: the writes of the first are still under way
    assert holds(store, 0, EntryKey(7, 7))
    put(store, 4, EntryKey(2**40, 9))
    assert slow.order == []
    slow.go_on.set()
    store = opened()  # closing waits
    assert slow.order == [0, 1, 0, 1, 0, 1, 4]
    assert store.saved_keys() == {0: EntryKey(7, 7), 1: EntryKey(3, 7), 4: EntryKey(2**40, 9)}
    assert holds(store, 0, EntryKey(7, 7))


def test_no_more_than_two_steps_of_writes_wait_for_a_slow_disk(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, slow = opened(), SlowDisk()
    monkeypatch.setattr(os, "pwritev", slow)
    for step in range(2):
        store.begin_step([])
        put(store, step, EntryKey(step, 1))
    third = threading.Thread(target=store.begin_step, args=([],))
    third.start()
    third.join(0.2)
    assert third.is_alive(), "the third step began before the writes of the first had ended"
    slow.go_on.set()
    third.join(30)
    assert not third.is_alive()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_asked_in_whatever_order_is_as_a_dict_says(
    seed: int, opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that read ahead, write, overwrite within a step and start anew, on a disk that is now fast and now slow."""
    draw, pwritev = random.Random(seed), os.pwritev
    pauses = random.Random(seed)

    def sometimes_slow(file: int, parts: list[Any], offset: int) -> int:
        threading.Event().wait(pauses.choice([0, 0, 0.003]))
        return pwritev(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", sometimes_slow)
    store, expected = opened(), dict[int, EntryKey]()
    upcoming = draw.sample(range(12), 5)
    for step in range(60):
        places, upcoming = upcoming, draw.sample(range(12), 5)
        if draw.random() < 0.1:
            store = opened()
            assert store.saved_keys() == expected
        store.begin_step([place for place in places if place in expected])
        store.prefetch([place for place in upcoming if place in expected])
        for place in places + draw.sample(places, 2):
            assert place not in expected or holds(store, place, expected[place])
            expected[place] = EntryKey(place, 100 * step + draw.randrange(1, 100))
            put(store, place, expected[place])
    assert opened().saved_keys() == expected
