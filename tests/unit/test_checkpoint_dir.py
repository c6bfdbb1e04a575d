"""Law: whenever a run dies, each checkpoint in sight is whole, and those that were to stay are there."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.shards.disk import MANIFEST, Manifest, ShardDirectory, StoredFile, copy_model_files


class Died(BaseException):
    """What a process that is killed raises: nothing catches it."""


def write(directory: CheckpointDirectory, step: int, content: str = "") -> None:
    """Write a complete checkpoint that is not in place yet."""
    partial, source = directory.partial(step), directory.path.parent / "model"
    for path in (partial, source):
        path.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(f"{step} {content}")
    layers: dict[str, StoredFile] = {}
    model_files = copy_model_files(source, partial)
    Manifest(step=step, layers=layers, replicas={}, model_files=model_files, run=None).write(partial)


def save(directory: CheckpointDirectory, *steps: int, content: str = "") -> None:
    for step in steps:
        write(directory, step, content)
        directory.publish(step)


def content_of(directory: CheckpointDirectory, step: int) -> str:
    """Return what a checkpoint holds; all of it must be sound."""
    shards = ShardDirectory(directory.of(step))
    assert shards.step == step
    assert not list(shards.corrupt_files())
    return (directory.of(step) / "config.json").read_text()


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints")


def test_a_directory_that_is_not_there_holds_nothing(directory: CheckpointDirectory) -> None:
    assert directory.steps() == directory.leftovers() == []
    assert directory.best() is None


def test_only_checkpoints_in_place_are_listed_oldest_first(directory: CheckpointDirectory) -> None:
    save(directory, 20, 100_000_000, 3)
    write(directory, 7)
    for name in ("step-1", "step-00000001x", "damaged-step-00000005", ".step-00000009.removed"):
        (directory.path / name).mkdir()
    (directory.path / "step-00000004").touch()
    directory.mark_best(20)
    assert directory.steps() == [3, 20, 100_000_000]
    assert [path.name for path in directory.leftovers()] == [".step-00000007.partial", ".step-00000009.removed"]
    directory.clean()
    assert directory.leftovers() == []
    assert directory.steps() == [3, 20, 100_000_000]


@pytest.mark.parametrize("keep", [1, 2, 5, 20])
@pytest.mark.parametrize("keep_every", [None, 1, 3, 4])
@pytest.mark.parametrize("best", [None, 1, 6, 12])
def test_the_newest_the_multiples_and_the_best_stay(
    keep: int, keep_every: int | None, best: int | None, directory: CheckpointDirectory
) -> None:
    everything = list(range(1, 13))
    save(directory, *everything)
    if best is not None:
        directory.mark_best(best)
    directory.prune(12, keep=keep, keep_every=keep_every)
    multiples = {step for step in everything if keep_every and step % keep_every == 0}
    assert directory.steps() == sorted({*everything[-keep:], *multiples, *({best} - {None})})
    assert directory.leftovers() == []


def test_what_is_newer_than_the_save_neither_counts_nor_goes(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2, 3, 4, 8, 9)
    directory.prune(4, keep=2, keep_every=None)
    assert directory.steps() == [3, 4, 8, 9]


def test_a_step_that_is_saved_again_is_replaced(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2, content="first")
    save(directory, 2, content="second")
    assert [content_of(directory, step) for step in directory.steps()] == ["1 first", "2 second"]
    assert directory.leftovers() == []


def test_hidden_remains_are_in_nobodys_way(directory: CheckpointDirectory) -> None:
    save(directory, 1)
    for name in (".step-00000001.old", ".step-00000001.removed"):
        shutil.copytree(directory.of(1), directory.path / name)
    save(directory, 1, content="second")
    assert content_of(directory, 1) == "1 second"
    directory.remove(1)
    assert directory.steps() == directory.leftovers() == []


def test_what_is_damaged_is_set_aside_once_and_again(directory: CheckpointDirectory) -> None:
    for content in ("first", "second"):
        save(directory, 1, 2, content=content)
        aside = directory.set_aside(directory.of(2))
        assert aside == directory.path / "damaged-step-00000002"
        assert (aside / "config.json").read_text() == f"2 {content}"
        assert directory.steps() == [1]


def test_best_leads_to_the_last_one_marked_wherever_the_run_is_moved(directory: CheckpointDirectory) -> None:
    save(directory, 1, 2)
    for step in (1, 2, 1):
        directory.mark_best(step)
        assert directory.best() == directory.of(step)
    moved = CheckpointDirectory(directory.path.rename(directory.path.with_name("moved")))
    assert moved.best() == moved.of(1)
    assert (moved.path / "best" / MANIFEST).read_bytes() == (moved.of(1) / MANIFEST).read_bytes()


CHANGES: dict[str, tuple[Callable[[CheckpointDirectory], Any], set[int], set[int]]] = {
    # what is done to checkpoints 1 2 3 with best = 1; which must be there at any time, and which afterwards
    "publish": (lambda directory: directory.publish(4), {1, 2, 3}, {1, 2, 3, 4}),
    "publish again": (lambda directory: directory.publish(3), {1, 2}, {1, 2, 3}),
    "remove": (lambda directory: directory.remove(2), {1, 3}, {1, 3}),
    "prune": (lambda directory: directory.prune(3, keep=1, keep_every=None), {1, 3}, {1, 3}),
    "mark best": (lambda directory: directory.mark_best(3), {1, 2, 3}, {1, 2, 3}),
    "set aside": (lambda directory: directory.set_aside(directory.of(3)), {1, 2}, {1, 2}),
    "clean": (lambda directory: directory.clean(), {1, 2, 3}, {1, 2, 3}),
}
CALLS = ["rename", "replace", "unlink", "rmdir", "symlink", "link", "remove", "fsync"]
"""Of os, by which names and files come and go; pathlib and shutil call them as well."""


def dying_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Let the process die at its n-th call that changes a directory, n from 0."""
    calls = itertools.count()

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                raise Died
            return call(*args, **options)

        return called

    for name in CALLS:
        patch.setattr(os, name, mortal(getattr(os, name)))


def deaths(tmp_path: Path, change: Callable[[CheckpointDirectory], Any]) -> Iterator[CheckpointDirectory]:
    """Yield what each possible death during a change leaves; at last, what the change itself does."""
    for number in itertools.count():
        directory = CheckpointDirectory(tmp_path / f"death-{number}" / "checkpoints")
        save(directory, 1, 2, 3, content="old")
        directory.mark_best(1)
        write(directory, 3, "new")
        write(directory, 4, "new")
        with pytest.MonkeyPatch.context() as patch:
            dying_at(number, patch)
            try:
                change(directory)
            except Died:
                died = True
            else:
                died = False
        yield directory
        if not died:
            assert number, "no call was seen"
            return


@pytest.mark.parametrize("name", CHANGES)
def test_whenever_a_run_dies_all_in_sight_is_whole(name: str, tmp_path: Path) -> None:
    change, always, afterwards = CHANGES[name]
    for directory in deaths(tmp_path, change):
        assert always <= set(directory.steps()) <= always | afterwards | {1, 2, 3}
        contents = [content_of(directory, step) for step in directory.steps()]
        assert all(content.split()[1] in ("old", "new") for content in contents)
        best = directory.best()
        assert best in (directory.of(1), directory.of(3))
        assert (best / MANIFEST).is_file(), "best leads nowhere"
        directory.clean()
        assert directory.leftovers() == []
        change_again_is_possible(directory)
    assert set(directory.steps()) - {5} == afterwards


def change_again_is_possible(directory: CheckpointDirectory) -> None:
    """Check that the next start can save, mark and prune in what a death has left."""
    save(directory, 5)
    directory.mark_best(1)
    directory.prune(5, keep=10, keep_every=None)
    assert directory.steps()[-1] == 5
    assert directory.best() == directory.of(1)
