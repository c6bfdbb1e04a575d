"""Law: a failed save costs only that save; all ranks continue together or end together."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from acsgd import train
from acsgd.config.options import CheckpointConfig, Config
from acsgd.errors import RunError
from acsgd.io.checkpoint import saver as saver_module
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.checkpoint.saver import Saver
from acsgd.io.telemetry.metrics import Metrics
from acsgd.layers.batch import Batch
from acsgd.run.session import Session, StepResult
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import Manifest, StoredFile
from tests.lib.cache import share_cache, shared_model, with_shared_cache
from tests.lib.forks import Result, checkpoints_of, finish, make_config, result_of, started

STEPS, EVERY = 8, 2
HOST = socket.gethostname()
FAILED = "could not be saved"
FULL = "No space left on device; free space on its disk, or give a path on another one"
Runs = dict[int, tuple[Config, Result]]
"""Number of processes -> a run whose saves all succeed, and its result."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = tmp_path_factory.mktemp("calm")
    model, found = shared_model(runs), {}
    for processes in (1, 2):
        saves = CheckpointConfig(every=str(EVERY))
        config = make_config(model, runs / f"run-{processes}", processes=processes, steps=STEPS, checkpoint=saves)
        found[processes] = with_shared_cache(config), finish(config, processes)
    return found


def changed(config: Config, run_dir: Path, **checkpoint: Any) -> Config:
    share_cache(Path(config.model.name), run_dir / "run")
    return dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, **checkpoint),
        log=dataclasses.replace(config.log, dir=str(run_dir / "run")),
    )


def valid_steps(config: Config) -> list[int]:
    """Return the steps of all checkpoints, after checking that all are valid and that nothing else is left."""
    directory = checkpoints_of(config)
    for step in directory.steps():
        assert not list(ShardDirectory(directory.of(step)).corrupt_files())
    assert {path.name for path in directory.path.iterdir()} == {directory.of(step).name for step in directory.steps()}
    return directory.steps()


# Faults, called in the process of each rank: the saves of some steps fail.


def full_in_a_layer(steps: list[int], error: Callable[[str], Exception]) -> None:
    """Fail on the rank with the last layer, in the middle of its file."""
    write_layer = saver_module.write_layer

    def full(directory: Path, stem: str, *args: Any) -> StoredFile:
        entry = write_layer(directory, stem, *args)
        if is_partial(directory, steps) and stem == "head":
            os.truncate(directory / entry.file, entry.bytes // 2)
            raise error(str(directory / entry.file))
        return entry

    saver_module.write_layer = full


def full_in_the_manifest(steps: list[int]) -> None:
    write = Manifest.write

    def full(manifest: Manifest, directory: Path) -> None:
        write(manifest, directory)
        if manifest.step in steps:
            os.truncate(directory / "manifest.json", 100)
            raise no_space(str(directory / "manifest.json"))

    Manifest.write = full  # type: ignore[method-assign]


def not_writable(steps: list[int]) -> None:
    """Fail to create the directory; permissions do not stop root."""
    mkdir = Path.mkdir

    def refused(path: Path, *args: Any, **options: Any) -> None:
        if is_partial(path, steps):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        mkdir(path, *args, **options)

    Path.mkdir = refused  # type: ignore[method-assign]


def is_partial(path: Path, steps: list[int]) -> bool:
    """Return whether a path is of an incomplete checkpoint of one of these steps."""
    return path.suffix == ".partial" and any(path.name.startswith(f".step-{step:08d}.") for step in steps)


def no_space(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


FAULTS: dict[str, tuple[int, Callable[[list[int]], None], str]] = {
    # processes, fault, pattern of the message
    "layer, 1 rank": (1, partial(full_in_a_layer, error=no_space), rf"rank 0 on {HOST}: \S+/head.safetensors: {FULL}"),
    "layer, 1 of 2": (2, partial(full_in_a_layer, error=no_space), rf"rank 1 on {HOST}: \S+/head.safetensors: {FULL}"),
    "unexpected": (2, partial(full_in_a_layer, error=KeyError), f"rank 1 on {HOST}: KeyError: "),
    "manifest": (2, full_in_the_manifest, rf"rank 0 on {HOST}: \S+/manifest.json: {FULL}"),
    "permissions": (2, not_writable, rf"rank 0 on {HOST}: \S+.partial: Permission denied; give this user access to it"),
}


def at_fault(rank: int, *, fault: Callable[[list[int]], None], steps: list[int], ends: Path) -> None:
    """Inject a fault into this rank; record the step and the error with which it ends."""
    fault(steps)
    run_steps, train_step, copy_state = train.run_steps, train.train_step, Checkpointing.copy_state
    done = 0

    def counting_step(session: Session, batch: Batch, progress: Progress, *args: Any, **options: Any) -> StepResult:
        nonlocal done
        done = progress.step
        return train_step(session, batch, progress, *args, **options)

    def counting_save(checkpointing: Checkpointing, progress: Progress, **options: Any) -> float:
        nonlocal done
        done = progress.step
        return copy_state(checkpointing, progress, **options)

    def watched(*args: Any) -> None:
        try:
            run_steps(*args)
        except RunError as error:
            (ends / f"rank-{rank}").write_text(f"{done} {error}")
            raise

    train.run_steps, train.train_step = watched, counting_step
    Checkpointing.copy_state = counting_save  # type: ignore[method-assign]


def ends_of(directory: Path) -> list[tuple[int, str]]:
    """Return (step, error) of every rank that ended with an error."""
    ends = [path.read_text().partition(" ") for path in sorted(directory.glob("rank-*"))]
    return [(int(step), error) for step, _, error in ends]


@pytest.mark.parametrize("name", FAULTS)
def test_training_continues_without_failed_saves_and_reports_them(name: str, calm: Runs, tmp_path: Path) -> None:
    processes, fault, message = FAULTS[name]
    config = changed(calm[processes][0], tmp_path, on_error="continue")
    with started(config, processes, setup=partial(at_fault, fault=fault, steps=[2, 6], ends=tmp_path)) as run:
        assert run.join() == [0] * processes, run.notes()
    failures = [note for note in run.notes() if FAILED in note]
    assert len(failures) == 2
    second, sixth = failures
    assert second.startswith("step 2 could not be saved: ")
    assert sixth.startswith("step 6 could not be saved: ")
    assert re.search(message, second)
    assert re.search(message, sixth)
    assert "; there is no checkpoint yet; training continues" in second
    assert f"; the newest checkpoint is {checkpoints_of(config).of(4)}; training continues" in sixth
    assert valid_steps(config) == [4, 8]
    assert result_of(config) == calm[processes][1]


@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_end_after_the_same_step_with_the_same_error(name: str, calm: Runs, tmp_path: Path) -> None:
    processes, fault, message = FAULTS[name]
    config = changed(calm[processes][0], tmp_path, on_error="stop")
    with started(config, processes, setup=partial(at_fault, fault=fault, steps=[4], ends=tmp_path)) as run:
        assert run.join() == [1] * processes, run.notes()
    ends = ends_of(tmp_path)
    assert len(ends) == processes
    assert len(set(ends)) == 1, "one step, one error"
    step, error = ends[0]
    assert 4 <= step <= 6, "not later than the next save"
    assert error.startswith("step 4 could not be saved: ")
    assert re.search(message, error)
    assert f"; the newest checkpoint is {checkpoints_of(config).of(2)}; " in error
    assert valid_steps(config) == [2]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_whose_last_save_fails_fails(processes: int, calm: Runs, tmp_path: Path) -> None:
    config = changed(calm[processes][0], tmp_path, on_error="continue")
    fault = partial(full_in_a_layer, error=no_space)
    with started(config, processes, setup=partial(at_fault, fault=fault, steps=[STEPS], ends=tmp_path)) as run:
        assert run.join() == [1] * processes, run.notes()
    assert not any(note.startswith("done") for note in run.notes())
    ends = ends_of(tmp_path)
    assert len(ends) == processes
    assert len(set(ends)) == 1
    assert ends[0][0] == STEPS
    assert ends[0][1].startswith(f"step {STEPS} could not be saved: ")
    assert valid_steps(config) == [2, 4, 6]
    assert finish(config, processes) == calm[processes][1], "started again with free space"


# Real faults: a full disk, and a limit of the size of files.


@pytest.fixture
def disk(tmp_path: Path, calm: Runs) -> Iterator[Path]:
    """A disk with room for two and a half checkpoints."""
    one = sum(path.stat().st_size for path in checkpoints_of(calm[1][0]).of(2).iterdir())
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={one * 5 // 2}", "tmpfs", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"only root may mount a small disk, and not everywhere: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def filled_at_first(rank: int, *, ballast: Path) -> None:
    """Free the space of `ballast` when training reports a failed save."""

    def make_room() -> None:
        ballast.unlink(missing_ok=True)

    on_failure(make_room)


def limited(rank: int, *, at_step: int, nbytes: int) -> None:
    """Limit the size of files from a step on, until training reports a failed save."""
    snapshot = Saver.snapshot

    def limiting(saver: Saver, step: int, *args: Any, **options: Any) -> None:
        if step == at_step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
        snapshot(saver, step, *args, **options)

    Saver.snapshot = limiting  # type: ignore[method-assign]
    on_failure(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))


def on_failure(react: Callable[[], None]) -> None:
    note = Metrics.note

    def reacting(metrics: Metrics, text: str) -> None:
        if FAILED in text:
            react()
        note(metrics, text)

    Metrics.note = reacting  # type: ignore[method-assign]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_costs_one_save(processes: int, disk: Path, calm: Runs, tmp_path: Path) -> None:
    config = changed(calm[processes][0], tmp_path, dir=str(disk / "checkpoints"), on_error="continue", keep=1)
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        file.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize * 2 // 5))
    with started(config, processes, setup=partial(filled_at_first, ballast=ballast)) as run:
        assert run.join() == [0] * processes, run.notes()
    failures = [note for note in run.notes() if FAILED in note]
    assert len(failures) == 1
    assert failures[0].startswith("step 4 could not be saved: ")
    assert "No space left on device" in failures[0]
    assert f"the newest checkpoint is {checkpoints_of(config).of(2)}" in failures[0]
    assert valid_steps(config) == [8]
    assert result_of(config) == calm[processes][1]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_disk_that_stays_full_keeps_its_checkpoints(
    on_error: Literal["stop", "continue"], disk: Path, calm: Runs, tmp_path: Path
) -> None:
    config = changed(calm[2][0], tmp_path, dir=str(disk / "checkpoints"), on_error=on_error, keep=2)  # and a third one
    with started(config, 2) as run:
        assert run.join() == [1, 1], run.notes()
    lost = 6 if on_error == "stop" else STEPS
    assert run.notes()[-1].startswith(f"SaveError: step {lost} could not be saved: ")
    assert re.search(r"checkpoints/\S+: No space left on device; .* bytes are free now", run.notes()[-1])
    assert f"the newest checkpoint is {checkpoints_of(config).of(4)}" in run.notes()[-1]
    assert valid_steps(config) == [2, 4]


def test_an_error_of_the_disk_without_the_name_of_a_file_names_the_checkpoint(tmp_path: Path) -> None:
    """As those of write and fsync are."""
    rank: Any = SimpleNamespace(topology=SimpleNamespace(rank=1))

    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    error = Saver._attempt(rank, write, tmp_path)
    assert error is not None
    assert f"{tmp_path}: No space left on device" in error


def test_a_file_size_limit_costs_one_save(calm: Runs, tmp_path: Path) -> None:
    config = changed(calm[1][0], tmp_path, on_error="continue")
    largest = max(file.bytes for file in calm[1][1].layers.values())
    with started(config, 1, setup=partial(limited, at_step=4, nbytes=largest // 2)) as run:
        assert run.join() == [0], run.notes()
    failures = [note for note in run.notes() if FAILED in note]
    assert len(failures) == 1
    assert failures[0].startswith("step 4 could not be saved: ")
    assert "File too large" in failures[0]
    assert valid_steps(config) == [2, 6, 8]
    assert result_of(config) == calm[1][1]
