"""Caches: one process of a host builds a path, completely or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from lib.cache import locked
from lib.processes import CONTEXT, WAIT_S, kill, started, wait_for_a_signal, wait_until

from acsgd import notes as notes_module
from acsgd.errors import CorruptFileError, RunError
from acsgd.io.files.atomic import build_atomically, describe_build
from acsgd.io.files.cache import HostLock, lock_file, open_cached


def build_slowly(target: Path) -> None:
    """Record the build beside the cache, and hold the lock long enough for all processes to wait for it."""
    (target.parents[2] / f"built-{os.getpid()}").touch()
    target.write_text("complete")
    time.sleep(0.2)


def test_many_processes_build_once(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "a.npy"
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(open_cached, path, build_slowly, Path)) for _ in range(3)]
        for process in processes:
            process.join(WAIT_S)
        assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert os.listdir(path.parent) == ["a.npy"]
    assert path.read_text() == "complete"


def test_an_existing_path_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert open_cached(tmp_path / "a", lambda _: pytest.fail("built again"), Path) == tmp_path / "a"


def test_a_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    def build(target: Path) -> None:
        target.mkdir()
        (target / "x").write_text("1")
        assert not (tmp_path / "shards").exists()

    assert (open_cached(tmp_path / "shards", build, Path) / "x").read_text() == "1"
    assert os.listdir(tmp_path) == ["shards"]


@pytest.mark.parametrize("kind", ["nothing", "file", "directory"])
def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "new" / "deep" / "a.npy"

    def build(target: Path) -> None:
        if kind == "file":
            target.write_text("half")
        if kind == "directory":
            (target / "b").mkdir(parents=True)
            (target / "b" / "c").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_cached(path, build, Path)
    assert os.listdir(tmp_path) == []
    assert open_cached(path, lambda target: target.write_text("complete") and None, Path).read_text() == "complete"


def build_half_and_wait(path: Path, writing: Event) -> None:
    def build(target: Path) -> None:
        target.mkdir()
        (target / "first").write_text("complete")
        writing.set()
        wait_for_a_signal()

    build_atomically(path, build, resumable=True)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_build_continues_what_a_killed_one_wrote_but_not_what_another_host_writes(
    is_killed: bool, tmp_path: Path
) -> None:
    """Another host is a process without the lock of this host."""
    path, writing = tmp_path / "cache" / "a", CONTEXT.Event()
    found: list[list[str]] = []

    def build(target: Path) -> None:
        target.mkdir(exist_ok=True)
        found.append(os.listdir(target))
        (target / "second").write_text("complete")

    with started(build_half_and_wait, path, writing) as process:
        assert writing.wait(WAIT_S)
        if is_killed:
            kill(process)
        assert open_cached(path, build, Path, resumable=True) == path
        assert found == [["first"] if is_killed else []]
    assert sorted(os.listdir(path)) == (["first", "second"] if is_killed else ["second"])
    assert sorted(os.listdir(path.parent)) == [*([] if is_killed else [".acsgd-a.resumable"]), "a"]


def test_a_failed_build_keeps_directories_in_use(tmp_path: Path) -> None:
    def build(target: Path) -> None:
        (tmp_path / "new" / "other").touch()
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        open_cached(tmp_path / "new" / "deep" / "a", build, Path)
    assert os.listdir(tmp_path / "new") == ["other"]


def test_another_host_that_finishes_first_wins(tmp_path: Path) -> None:
    """On a network file system: processes may have mapped its result, so it stays and ours is removed."""
    path = tmp_path / "shards"

    def build(target: Path) -> None:
        target.mkdir()
        path.mkdir()
        (path / "theirs").touch()

    open_cached(path, build, Path)
    assert os.listdir(tmp_path) == ["shards"]
    assert os.listdir(path) == ["theirs"]


def hold_build(target: Path) -> None:
    """Write a megabyte and wait until the file "go on" appears beside the cache."""
    target.write_bytes(bytes(10**6))
    while not (target.parents[2] / "go on").exists():
        time.sleep(0.01)


def test_a_long_wait_names_the_process_that_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache" / "a.npy"
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        (tmp_path / "go on").touch()

    monkeypatch.setattr(notes_module, "FIRST_REPORT_S", 0.05)
    with started(open_cached, path, hold_build, Path) as holder:
        wait_until(lambda: "1.0 MB" in str(describe_build(path)), holder)
        opened = open_cached(path, lambda _: pytest.fail("built again"), Path.read_bytes, note=note)
    host = socket.gethostname()
    assert opened == bytes(10**6)
    assert notes == [f"waiting until process {holder.pid} on {host} (1.0 MB so far) has built {path}"]


def test_a_short_wait_is_silent(tmp_path: Path) -> None:
    open_cached(tmp_path / "a", lambda target: target.touch(), Path.stat, note=lambda text: pytest.fail(text))


def open_if_good(path: Path) -> str:
    """Open a file that holds "good"."""
    if (text := path.read_text()) != "good":
        raise CorruptFileError(path, f"is {text}")
    return text


@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling"])
def test_what_is_corrupt_is_built_again_once_with_a_note(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "directory":
        (path / "b").mkdir(parents=True)
    elif kind == "link":
        (tmp_path / "bad").write_text("bad")
        path.symlink_to("bad")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    else:
        path.write_text("bad")

    def open_built(built: Path) -> str:
        if built.is_dir() or not built.exists():
            raise CorruptFileError(built, "is bad")
        return open_if_good(built)

    notes: list[str] = []
    for _ in range(2):
        assert open_cached(path, lambda target: target.write_text("good") and None, open_built, note=notes.append)
    assert notes == [f"{path} is bad; {path} is built again now"]


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError) as refused:
        open_cached(tmp_path / "file" / "a", build_slowly, Path)
    assert str(refused.value).startswith("the cache beside log.dir cannot be written: ")
    assert str(tmp_path / "file") in str(refused.value)


def test_waiting_for_a_build_times_out(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with locked(path), pytest.raises(RuntimeError, match=rf"waited 0\.1 s .* build {path}"):
        open_cached(path, build_slowly, Path, timeout_s=0.1)


def test_one_at_a_time_holds_a_lock_and_its_file_is_removed(tmp_path: Path) -> None:
    path, holding, most = tmp_path / "a", list[int](), list[int]()

    def hold(number: int) -> None:
        lock = HostLock(path)
        for _ in range(20):
            assert lock.acquire(60.0)
            holding.append(number)
            most.append(len(holding))
            holding.remove(number)
            lock.release()
            lock.release()

    with ThreadPoolExecutor() as pool:
        list(pool.map(hold, range(4)))
    assert most == [1] * 80
    assert not lock_file(path).exists()


def test_a_lock_whose_file_was_removed_before_it_was_locked_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder before removes the file, between the moments at which another process opens and locks it."""
    lock, flock = HostLock(tmp_path / "a"), fcntl.flock

    def removed_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        lock_file(tmp_path / "a").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    assert not lock.acquire(0.0)
    assert lock.acquire(0.0)
    assert lock_file(tmp_path / "a").exists()
    lock.release()
    assert not lock_file(tmp_path / "a").exists()


def test_files_of_locks_that_killed_processes_left_are_removed_by_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held, new, left = (tmp_path / name for name in ("held", "new", "left"))
    holder, later = HostLock(held), HostLock(tmp_path / "later")
    assert holder.acquire(0.0)
    for path in (new, left):
        lock_file(path).touch()
    for path in (held, left):
        os.utime(lock_file(path), (0, 0))
    assert later.acquire(0.0)
    assert [lock_file(path).exists() for path in (held, new, left)] == [True, True, False]
    later.release()
    holder.release()
    assert [*tmp_path.iterdir()] == [lock_file(new)]
