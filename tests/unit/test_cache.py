"""once_per_host: one process of a host builds, completely or not at all."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from acsgd.io.cache import _lock_file, once_per_host


def build_slowly(target: Path) -> None:
    """Record the build beside the cache, and hold the lock long enough for all processes to wait for it."""
    (target.parents[2] / f"built-{os.getpid()}").touch()
    target.write_text("complete")
    time.sleep(0.2)


def test_many_processes_build_once(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "a.npy"
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=once_per_host, args=(path, build_slowly)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert os.listdir(path.parent) == ["a.npy"]
    assert path.read_text() == "complete"


def test_an_existing_path_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert once_per_host(tmp_path / "a", build=lambda _: pytest.fail("built again")) == tmp_path / "a"


def test_a_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    def build(target: Path) -> None:
        target.mkdir()
        (target / "x").write_text("1")
        assert not (tmp_path / "shards").exists()

    assert (once_per_host(tmp_path / "shards", build) / "x").read_text() == "1"
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
        once_per_host(path, build)
    assert os.listdir(tmp_path) == []
    assert once_per_host(path, lambda target: target.write_text("complete") and None).read_text() == "complete"


def test_a_failed_build_keeps_directories_in_use(tmp_path: Path) -> None:
    def build(target: Path) -> None:
        (tmp_path / "new" / "other").touch()
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        once_per_host(tmp_path / "new" / "deep" / "a", build)
    assert os.listdir(tmp_path / "new") == ["other"]


def test_another_host_that_finishes_first_wins(tmp_path: Path) -> None:
    """On a network file system: processes may have mapped its result, so it stays and ours is removed."""
    path = tmp_path / "shards"

    def build(target: Path) -> None:
        target.mkdir()
        path.mkdir()
        (path / "theirs").touch()

    once_per_host(path, build)
    assert os.listdir(tmp_path) == ["shards"]
    assert os.listdir(path) == ["theirs"]


def test_waiting_for_a_build_times_out(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with FileLock(_lock_file(path)), pytest.raises(RuntimeError, match=rf"waited 0\.1 s .* build {path}"):
        once_per_host(path, build_slowly, timeout_s=0.1)
