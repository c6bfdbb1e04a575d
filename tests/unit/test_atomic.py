"""build_atomically: a path is complete or absent, whatever other builds do and killed builds left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from queue import Queue

import pytest
from lib.processes import CONTEXT, WAIT_S, kill, started, wait_for_a_signal

from acsgd.io.files.atomic import build_atomically, replace_text, write_once


def build_text(path: Path) -> None:
    path.mkdir()
    (path / "text").write_text("complete")


def build_and_meet(path: Path, barrier: Barrier, results: Queue[bool]) -> None:
    def build(directory: Path) -> None:
        build_text(directory)
        barrier.wait(WAIT_S)

    results.put(build_atomically(path, build))


def test_of_builders_at_the_same_time_one_wins_and_nothing_else_stays(tmp_path: Path) -> None:
    path, barrier, results = tmp_path / "target", CONTEXT.Barrier(4), CONTEXT.Queue()
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(build_and_meet, path, barrier, results)) for _ in range(4)]
        won = [results.get(timeout=WAIT_S) for _ in processes]
        for process in processes:
            process.join(WAIT_S)
    assert sorted(won) == [False, False, False, True]
    assert os.listdir(tmp_path) == ["target"]
    assert (path / "text").read_text() == "complete"


def build_and_wait(path: Path, writing: Event) -> None:
    def build(directory: Path) -> None:
        build_text(directory)
        writing.set()
        wait_for_a_signal()

    build_atomically(path, build)


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[BaseProcess]:
    """A process in the middle of a build of another path in the same directory."""
    writing = CONTEXT.Event()
    with started(build_and_wait, tmp_path / "other", writing) as process:
        assert writing.wait(WAIT_S)
        yield process


def test_what_a_killed_build_left_is_removed_by_the_next(builder: BaseProcess, tmp_path: Path) -> None:
    kill(builder)
    assert len(os.listdir(tmp_path)) == 1
    assert build_atomically(tmp_path / "target", build_text)
    assert os.listdir(tmp_path) == ["target"]


def test_a_build_in_progress_is_not_disturbed(builder: BaseProcess, tmp_path: Path) -> None:
    before = os.listdir(tmp_path)
    assert build_atomically(tmp_path / "target", build_text)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "target"])
    assert (tmp_path / before[0] / "other" / "text").read_text() == "complete"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_looks_like_a_leftover_blocks_no_build(kind: str, tmp_path: Path) -> None:
    name = ".acsgd-1234.partial"
    outside = tmp_path / "outside"
    outside.mkdir()
    if kind == "file":
        (tmp_path / name).touch()
    elif kind == "link":
        (tmp_path / name).symlink_to(outside)
    (tmp_path / ".target.partial").symlink_to(outside)
    assert build_atomically(tmp_path / "target", build_text)
    assert os.listdir(outside) == []
    assert (tmp_path / ".target.partial").is_symlink()


def test_a_taken_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "directory").mkdir()
    for name in ("file", "dangling", "directory"):
        assert not build_atomically(tmp_path / name, build_text), name
    assert sorted(os.listdir(tmp_path)) == ["dangling", "directory", "file"]
    assert (tmp_path / "file").read_text() == "theirs"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The limit of the size of files stands for the disk: the system refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    def build(path: Path) -> None:
        path.mkdir()
        (path / "large").write_bytes(bytes(2**17))

    with full_disk(), pytest.raises(OSError) as refused:
        build_atomically(tmp_path / "new" / "target", build)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / "new" / "target"))
    assert os.listdir(tmp_path) == []


def test_a_text_is_replaced_as_a_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    replace_text(path, "former")
    with full_disk(), pytest.raises(OSError) as refused:
        replace_text(path, "x" * 2**17)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(path))
    assert (path.read_text(), os.listdir(tmp_path)) == ("former", [path.name])


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_is_written_once_is_on_disk_or_absent(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system without hard links, where its second write is the one of the name."""
    synced, fails_at, fsync = [0], [0], os.fsync

    def full(descriptor: int) -> None:
        synced[0] += 1
        if synced[0] == fails_at[0]:
            raise OSError(errno.ENOSPC, "no space")
        fsync(descriptor)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "fsync", full)
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    for fails_at[0] in range(1, 2 + (not has_links)):
        synced[0] = 0
        with pytest.raises(OSError, match="no space"):
            write_once(tmp_path / "vote", "first")
        assert os.listdir(tmp_path) == []
    for text in ("first", "second"):
        write_once(tmp_path / "vote", text)
    assert os.listdir(tmp_path) == ["vote"]
    assert (tmp_path / "vote").read_text() == "first"
