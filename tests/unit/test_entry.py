"""Laws of cache entries: no byte that differs from what was written is ever returned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acsgd.errors import CorruptFileError
from acsgd.io.files.entry import BLOCK_BYTES, CHECKSUMS, Entry, seal

CONTENT = {
    "empty": b"",
    "small": b"abc",
    "one-block": os.urandom(BLOCK_BYTES),
    "many-blocks": os.urandom(3 * BLOCK_BYTES + 17),
}


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """A sealed directory of several files."""
    path = tmp_path / "entry"
    path.mkdir()
    for name, raw in CONTENT.items():
        (path / name).write_bytes(raw)
    seal(path)
    return path


def test_every_span_of_every_file_is_read_as_it_was_written(entry: Path) -> None:
    places = (0, 1, 3, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 17, 9 * BLOCK_BYTES)
    for name, raw in CONTENT.items():
        file = Entry(entry).file(name)
        assert file.size == len(raw)
        for start in places:
            for nbytes in places:
                assert file.read(start, nbytes) == raw[start : start + nbytes], (name, start, nbytes)


def test_a_changed_byte_is_found_when_its_block_is_read_and_only_then(entry: Path) -> None:
    for name, raw in CONTENT.items():
        for place in {0, len(raw) // 2, len(raw) - 1} if raw else ():
            (entry / name).write_bytes(raw[:place] + bytes([raw[place] ^ 128]) + raw[place + 1 :])
            block = place // BLOCK_BYTES
            file = Entry(entry).file(name)
            for other in range(-(-len(raw) // BLOCK_BYTES)):
                start = other * BLOCK_BYTES
                if other != block:
                    assert file.read(start, BLOCK_BYTES) == raw[start : start + BLOCK_BYTES], (name, place)
            end = min((block + 1) * BLOCK_BYTES, len(raw))
            message = f"{name} is corrupt: bytes {block * BLOCK_BYTES} to {end} are not as they were written"
            with pytest.raises(CorruptFileError, match=message):
                file.read(end - 1, 1)
            (entry / name).write_bytes(raw)


def test_a_file_of_another_size_is_found_at_once(entry: Path) -> None:
    for name, raw in CONTENT.items():
        for damaged in {raw + b"x", raw[:-1]} - {raw}:
            (entry / name).write_bytes(damaged)
            with pytest.raises(
                CorruptFileError, match=f"{name} is corrupt: it has {len(damaged)} bytes, not {len(raw)}"
            ):
                Entry(entry)
            (entry / name).write_bytes(raw)
        (entry / name).unlink()
        with pytest.raises(CorruptFileError, match=rf"{name} cannot be read \(No such file or directory\)"):
            Entry(entry)
        (entry / name).write_bytes(raw)


def test_what_is_not_a_file_is_found_without_blocking(entry: Path) -> None:
    for name in ("small", CHECKSUMS):
        raw = (entry / name).read_bytes()
        for make in (os.mkfifo, os.mkdir):
            (entry / name).unlink()
            make(entry / name)
            with pytest.raises(CorruptFileError, match=f"{name} is corrupt: it is not a file"):
                Entry(entry)
            (entry / name).unlink() if make is os.mkfifo else (entry / name).rmdir()
            (entry / name).write_bytes(raw)


def test_a_sparse_file_of_a_tebibyte_is_refused_without_being_read(entry: Path) -> None:
    os.truncate(entry / CHECKSUMS, 2**40)
    with pytest.raises(CorruptFileError, match=f"checksums is corrupt: it has {2**40} bytes"):
        Entry(entry)
    (entry / CHECKSUMS).unlink()
    seal(entry)
    os.truncate(entry / "small", 2**40)
    with pytest.raises(CorruptFileError, match=f"small is corrupt: it has {2**40} bytes, not 3"):
        Entry(entry)


def test_a_file_that_is_cut_while_it_is_open_is_found(entry: Path) -> None:
    file = Entry(entry).file("many-blocks")
    file.read(0, 3 * BLOCK_BYTES + 17)
    os.truncate(entry / "many-blocks", 5)
    with pytest.raises(CorruptFileError, match=f"many-blocks is corrupt: it was cut from {file.size} to 5 bytes"):
        file.read(2, 10)


def test_every_changed_byte_of_the_checksums_is_found(entry: Path) -> None:
    raw = (entry / CHECKSUMS).read_bytes()
    for place in range(len(raw)):
        (entry / CHECKSUMS).write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        with pytest.raises(CorruptFileError, match="checksums is corrupt"):
            Entry(entry)
        (entry / CHECKSUMS).write_bytes(raw[:place])
        with pytest.raises(CorruptFileError, match="checksums is corrupt"):
            Entry(entry)


def test_an_entry_that_was_invalidated_cannot_be_opened(entry: Path) -> None:
    opened = Entry(entry)
    assert opened.invalidate()
    assert opened.invalidate()
    assert opened.file("small").read(0, 3) == b"abc", "processes that have it open keep it"
    with pytest.raises(CorruptFileError, match=r"checksums cannot be read \(No such file or directory\)"):
        Entry(entry)
