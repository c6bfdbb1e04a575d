"""Law: whenever a process is killed, every published checkpoint is complete and none to be kept is missing."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lib.models import NO_LAYERS

from acsgd.io.checkpoint.directory import CheckpointDirectory, best_checkpoint
from acsgd.shards.disk import ShardDirectory, copy_model_files
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile


class Killed(BaseException):
    """Raised in place of a kill: nothing catches it."""


def write(directory: CheckpointDirectory, step: int, content: str = "") -> None:
    """Write a complete checkpoint that is not published yet."""
    partial, source = directory.partial(step, "run"), directory.path.parent / "model"
    for path in (partial, source):
        path.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(f"{step} {content}")
    layers: dict[str, StoredFile] = {}
    model_files = copy_model_files(source, partial)
    Manifest(
        step=step, task="lm", model=NO_LAYERS, layers=layers, replicas={}, model_files=model_files, run=None
    ).write(partial)


def save(directory: CheckpointDirectory, *steps: int, content: str = "") -> None:
    for step in steps:
        write(directory, step, content)
        directory.publish(step, "run")


def content_of(directory: CheckpointDirectory, step: int) -> str:
    """Return the content of a checkpoint, after verifying it."""
    shards = ShardDirectory(directory.of(step))
    assert shards.step == step
    assert not list(shards.corrupt_files())
    return (directory.of(step) / "config.json").read_text()


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints")


def test_a_missing_directory_has_no_checkpoints(directory: CheckpointDirectory) -> None:
    assert directory.steps() == directory.leftovers() == []
    assert directory.best() is None
    with pytest.raises(ValueError, match="has no best checkpoint"):
        best_checkpoint(directory.path)


def test_only_published_checkpoints_are_listed_oldest_first(directory: CheckpointDirectory) -> None:
    save(directory, 20, 100_000_000, 3)
    write(directory, 7)
    for name in ("step-1", "step-00000001x", "corrupt-step-00000005", ".step-00000009.removed"):
        (directory.path / name).mkdir()
    (directory.path / "step-00000004").touch()
    directory.mark_best(20)
    assert directory.steps() == [3, 20, 100_000_000]
    assert [path.name for path in directory.leftovers()] == [".step-00000007.run.partial", ".step-00000009.removed"]
    (directory.path / ".step-00000010.run.partial").symlink_to(directory.of(3))
    directory.clean()
    assert directory.leftovers() == []
    assert directory.steps() == [3, 20, 100_000_000]


def test_prune_keeps_the_newest_the_multiples_and_the_best(tmp_path: Path) -> None:
    everything = list(range(1, 13))
    for case in itertools.product([1, 2, 5, 20], [None, 1, 3, 4], [None, 1, 6, 12]):
        keep, keep_every, best = case
        directory = CheckpointDirectory(tmp_path / f"{case}")
        for step in everything:
            directory.of(step).mkdir(parents=True)
        if best is not None:
            directory.mark_best(best)
        directory.prune(12, keep=keep, keep_every=keep_every)
        multiples = {step for step in everything if keep_every and step % keep_every == 0}
        assert directory.steps() == sorted({*everything[-keep:], *multiples, *({best} - {None})}), case
        assert directory.leftovers() == [], case


def test_prune_ignores_checkpoints_newer_than_the_save(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2, 3, 4, 8, 9)
    directory.prune(4, keep=2, keep_every=None)
    assert directory.steps() == [3, 4, 8, 9]


def test_a_step_that_is_saved_again_is_replaced(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2, content="first")
    save(directory, 2, content="second")
    assert [content_of(directory, step) for step in directory.steps()] == ["1 first", "2 second"]
    assert directory.leftovers() == []


def test_leftovers_do_not_prevent_a_save(directory: CheckpointDirectory) -> None:
    save(directory, 1)
    for name in (".step-00000001.old", ".step-00000001.removed"):
        shutil.copytree(directory.of(1), directory.path / name)
    save(directory, 1, content="second")
    assert content_of(directory, 1) == "1 second"
    directory.remove(1)
    assert directory.steps() == directory.leftovers() == []


def test_a_corrupt_checkpoint_can_be_set_aside_twice(directory: CheckpointDirectory) -> None:
    for content in ("first", "second"):
        save(directory, 1, 2, content=content)
        aside = directory.set_aside(directory.of(2))
        assert aside == directory.path / "corrupt-step-00000002"
        assert (aside / "config.json").read_text() == f"2 {content}"
        assert directory.steps() == [1]


def test_best_points_to_the_last_one_marked_also_in_a_moved_run(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2)
    for step in (1, 2, 1):
        directory.mark_best(step)
        assert directory.best() == best_checkpoint(directory.path) == directory.of(step)
    moved = CheckpointDirectory(directory.path.rename(directory.path.with_name("moved")))
    assert moved.best() == moved.of(1)
    assert (moved.path / "best" / MANIFEST).read_bytes() == (moved.of(1) / MANIFEST).read_bytes()


def test_best_of_a_run_that_was_copied_without_links_is_its_copy_until_another_is_marked(
    directory: CheckpointDirectory,
) -> None:
    """As scp -r copies it."""
    save(directory, 1, 2)
    directory.mark_best(1)
    copied = CheckpointDirectory(shutil.copytree(directory.path, directory.path.with_name("copied")))
    assert copied.best() == copied.path / "best"
    copied.mark_best(2)
    assert copied.best() == copied.of(2)
    assert copied.steps() == [1, 2]


CHANGES: dict[str, tuple[Callable[[CheckpointDirectory], Any], set[int], set[int]]] = {
    # change of checkpoints 1 2 3 with best = 1; steps present at any time; steps present afterwards
    "publish": (lambda directory: directory.publish(4, "run"), {1, 2, 3}, {1, 2, 3, 4}),
    "publish again": (lambda directory: directory.publish(3, "run"), {1, 2}, {1, 2, 3}),
    "remove": (lambda directory: directory.remove(2), {1, 3}, {1, 3}),
    "prune": (lambda directory: directory.prune(3, keep=1, keep_every=None), {1, 3}, {1, 3}),
    "mark best": (lambda directory: directory.mark_best(3), {1, 2, 3}, {1, 2, 3}),
    "set aside": (lambda directory: directory.set_aside(directory.of(3)), {1, 2}, {1, 2}),
    "clean": (lambda directory: directory.clean(), {1, 2, 3}, {1, 2, 3}),
}
CALLS = ["rename", "replace", "unlink", "rmdir", "symlink", "link", "remove", "fsync"]
"""Functions of os that change directories; pathlib and shutil call them, too."""


def kill_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Raise Killed at the n-th call that changes a directory, n from 0."""
    calls = itertools.count()

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                raise Killed
            return call(*args, **options)

        return called

    for name in CALLS:
        patch.setattr(os, name, mortal(getattr(os, name)))


def interrupted(tmp_path: Path, change: Callable[[CheckpointDirectory], Any]) -> Iterator[CheckpointDirectory]:
    """Yield the directory after a kill at each call of a change; at last, after the complete change."""
    for number in itertools.count():
        directory = CheckpointDirectory(tmp_path / f"kill-{number}" / "checkpoints")
        save(directory, 1, 2, 3, content="old")
        directory.mark_best(1)
        write(directory, 3, "new")
        write(directory, 4, "new")
        with pytest.MonkeyPatch.context() as patch:
            kill_at(number, patch)
            try:
                change(directory)
            except Killed:
                was_killed = True
            else:
                was_killed = False
        yield directory
        if not was_killed:
            assert number, "no call was seen"
            return


@pytest.mark.parametrize("name", CHANGES)
def test_published_checkpoints_are_complete_whenever_a_run_is_killed(name: str, tmp_path: Path) -> None:
    change, always, afterwards = CHANGES[name]
    for directory in interrupted(tmp_path, change):
        assert always <= set(directory.steps()) <= always | afterwards | {1, 2, 3}
        contents = [content_of(directory, step) for step in directory.steps()]
        assert all(content.split()[1] in ("old", "new") for content in contents)
        best = directory.best()
        assert best in (directory.of(1), directory.of(3))
        assert (best / MANIFEST).is_file(), "best is a dangling link"
        directory.clean()
        assert directory.leftovers() == []
        assert_can_save(directory)
    assert set(directory.steps()) - {5} == afterwards


def assert_can_save(directory: CheckpointDirectory) -> None:
    """Check that the next run can save, mark and prune after a kill."""
    save(directory, 5)
    directory.mark_best(1)
    directory.prune(5, keep=10, keep_every=None)
    assert directory.steps()[-1] == 5
    assert directory.best() == directory.of(1)
