"""Law: a checkpoint is the state after its step, though training continues; saves are made one at a time."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lib.patience import NO_LIMIT_S
from safetensors import safe_open

from acsgd import train
from acsgd.config.options import CheckpointConfig, Config
from acsgd.io.checkpoint import saver as saver_module
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.saver import Saver
from acsgd.io.telemetry.metrics import Metrics
from acsgd.io.telemetry.record import StepRecord
from acsgd.run.session import Session, StepResult
from acsgd.shards.manifest import Manifest, StoredFile
from tests.lib.cache import shared_model, with_shared_cache
from tests.lib.forks import checkpoints_of, finish, make_config, started

PROCESSES = 2
TIMEOUT_S = NO_LIMIT_S
WRITTEN_S = 1.0
"""Longer than a save takes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_model(tmp_path_factory.mktemp("model"))


def saving(
    model: Path, run_dir: Path, every: int, *, processes: int = PROCESSES, steps: int = 7, best: str | None = None
) -> Config:
    saves = CheckpointConfig(every=str(every), keep=10, best=best)
    return with_shared_cache(make_config(model, run_dir, processes=processes, steps=steps, checkpoint=saves))


def manifests(config: Config) -> dict[int, Manifest]:
    directory = checkpoints_of(config)
    return {step: Manifest.read(directory.of(step)) for step in directory.steps()}


def assert_same(config: Config, calm: Config) -> None:
    """Compare all checkpoints of two runs: their manifests, which have the hashes of weights and moments."""
    mine, theirs = manifests(config), manifests(calm)
    assert mine == theirs
    assert len({str(manifest.layers) for manifest in mine.values()}) == len(mine), (
        "the weights do not change from save to save"
    )


# Changes of the processes of a test: called with the rank.


def written_late(rank: int, *, save: int, until: int, out: Path) -> None:
    """Delay the write of a save until training has completed step `until`; record that it was delayed."""
    trained = threading.Event()
    train_step, write_layer = train.train_step, saver_module.write_layer

    def step_made(session: Session, *args: Any, **options: Any) -> StepResult:
        result = train_step(session, *args, **options)
        if result.progress.step == until:
            trained.set()
        return result

    def write(directory: Path, *args: Any) -> StoredFile:
        if f"{save:08d}" in directory.name:
            assert trained.wait(TIMEOUT_S)
            (out / f"late-{rank}").touch()
        return write_layer(directory, *args)

    train.train_step = step_made
    saver_module.write_layer = write


def test_a_checkpoint_is_the_state_after_its_step(model: Path, tmp_path: Path) -> None:
    calm, late = (saving(model, tmp_path / name, every=3) for name in ("calm", "late"))
    finish(calm, PROCESSES)
    setup = partial(written_late, save=3, until=5, out=tmp_path)
    with started(late, PROCESSES, setup=setup) as run:
        assert run.join() == [0] * PROCESSES, run.notes()
    assert all((tmp_path / f"late-{rank}").exists() for rank in range(PROCESSES))
    assert list(manifests(calm)) == [3, 6, 7]
    assert_same(late, calm)


def one_at_a_time(rank: int, *, save: int, out: Path) -> None:
    """Delay the write of a save until the next save waits for it; record what was seen, and the time it waited."""
    waiting = threading.Event()
    wait, snapshot, write_layer = Saver.wait, Saver.snapshot, saver_module.write_layer
    seen: dict[str, Any] = {"partials": [], "published": {}}

    def awaited(saver: Saver) -> Any:
        due = saver._thread is not None and saver._thread.name == f"save {save}"
        seen["in progress"] = seen.get("in progress", False) or (due and saver.result is None)
        started = time.perf_counter()
        if due:
            waiting.set()
        result = wait(saver)
        if due:
            seen["waited_s"] = time.perf_counter() - started
        return result

    def copied(saver: Saver, step: int, *args: Any, **options: Any) -> None:
        seen["published"][step] = saver.directory.steps()
        snapshot(saver, step, *args, **options)

    def write(directory: Path, *args: Any) -> StoredFile:
        if f"{save:08d}" in directory.name:
            assert waiting.wait(TIMEOUT_S)
            time.sleep(0.01)  # a wait that can be measured
        seen["partials"].append(len(list(directory.parent.glob(".step-*.partial"))))
        return write_layer(directory, *args)

    Saver.wait = awaited  # type: ignore[method-assign]
    Saver.snapshot = copied  # type: ignore[method-assign]
    saver_module.write_layer = write
    at_the_end(lambda: (out / f"seen-{rank}").write_text(json.dumps(seen)))


def at_the_end(act: Callable[[], Any]) -> None:
    run_steps = train.run_steps

    def acting(*args: Any) -> None:
        run_steps(*args)
        act()

    train.run_steps = acting


def test_a_save_waits_for_the_previous_one_and_the_wait_is_reported(model: Path, tmp_path: Path) -> None:
    calm, busy = (saving(model, tmp_path / name, every=1) for name in ("calm", "busy"))
    finish(calm, PROCESSES)
    with started(busy, PROCESSES, setup=partial(one_at_a_time, save=3, out=tmp_path)) as run:
        assert run.join() == [0] * PROCESSES, run.notes()
    for rank in range(PROCESSES):
        seen = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert seen["in progress"], "save 4 was not due while save 3 was in progress"
        assert seen["published"]["4"] == [1, 2, 3], "save 4 copied the state before save 3 ended"
        assert set(seen["partials"]) == {1}
    assert_same(busy, calm)
    lines = [json.loads(line) for line in (Path(busy.log.dir) / "metrics.jsonl").read_text().splitlines()]
    waited_s = json.loads((tmp_path / "seen-0").read_text())["waited_s"]
    assert lines[3]["save_stall_s"] >= waited_s >= 0.01


def killed_before_it_logs(rank: int, *, at_step: int) -> None:
    log = Metrics.log

    def killed(metrics: Metrics, record: StepRecord) -> None:
        if record.step == at_step:
            time.sleep(WRITTEN_S)
            os.kill(os.getpid(), signal.SIGKILL)
        log(metrics, record)

    Metrics.log = killed  # type: ignore[method-assign]


def test_no_checkpoint_is_ahead_of_the_metrics(model: Path, tmp_path: Path) -> None:
    config = saving(model, tmp_path / "run", every=1, processes=1)
    with started(config, 1, setup=partial(killed_before_it_logs, at_step=4)) as run:
        assert run.join() == [-signal.SIGKILL]
    assert checkpoints_of(config).steps() == [1, 2, 3]
    finish(config, 1)  # finds each step once in metrics.jsonl


def recording_buffers(rank: int, *, out: Path) -> None:
    """Record address and size of the copies of each save."""
    snapshot, saves = Saver.snapshot, []

    def copied(saver: Saver, *args: Any, **options: Any) -> None:
        snapshot(saver, *args, **options)
        saves.append([(buffer.data_ptr(), buffer.nbytes) for buffer in saver._buffers.values()])

    Saver.snapshot = copied  # type: ignore[method-assign]
    at_the_end(lambda: (out / f"buffers-{rank}").write_text(json.dumps(saves)))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_extra_memory_is_one_copy_of_what_a_rank_writes(processes: int, model: Path, tmp_path: Path) -> None:
    config = saving(model, tmp_path / "run", every=1, processes=processes, steps=3)
    with started(config, processes, setup=partial(recording_buffers, out=tmp_path)) as run:
        assert run.join() == [0] * processes, run.notes()
    first, last = ["embed", "block-00000"], ["block-00001", "head", "table-00000"]
    stages = [first + last] if processes == 1 else [first, last]
    turns = {"embed": 0, "block-00000": 1, "block-00001": 2, "head": 3, "table-00000": 0}
    replicas = processes // len(stages)
    for rank in range(processes):
        replica, stage = divmod(rank, len(stages))
        saves = json.loads((tmp_path / f"buffers-{rank}").read_text())
        assert len(saves) == 3
        assert saves[0] == saves[1] == saves[2], "saves do not share their memory"
        mine = [file for file in stages[stage] if turns[file] % replicas == replica]
        sizes = [bytes_of(checkpoints_of(config).of(3), file) for file in mine]
        assert sum(nbytes for _, nbytes in saves[0]) == sum(sizes) > 0


def recording_disk(rank: int, *, out: Path) -> None:
    """Record when each file reached the disk, by inode, and when each checkpoint got its name, with its inodes."""
    fsync, publish = os.fsync, CheckpointDirectory.publish
    on_disk: dict[int, float] = {}
    published: list[Any] = []

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = time.monotonic()

    def named(directory: CheckpointDirectory, step: int, run_id: str) -> Path:
        partial = directory.partial(step, run_id)
        inodes = {path.name: path.stat().st_ino for path in [partial, *partial.iterdir()]}
        published.append((time.monotonic(), inodes))
        return publish(directory, step, run_id)

    os.fsync = synced
    CheckpointDirectory.publish = named  # type: ignore[method-assign]
    at_the_end(lambda: (out / f"disk-{rank}").write_text(json.dumps([on_disk, published])))


def test_a_checkpoint_gets_its_name_when_all_its_files_are_on_disk(model: Path, tmp_path: Path) -> None:
    config = saving(model, tmp_path / "run", every=7)
    with started(config, PROCESSES, setup=partial(recording_disk, out=tmp_path)) as run:
        assert run.join() == [0] * PROCESSES, run.notes()
    records = [json.loads((tmp_path / f"disk-{rank}").read_text()) for rank in range(PROCESSES)]
    on_disk = {inode: time_s for by_inode, _ in records for inode, time_s in by_inode.items()}
    [(named_s, inodes)] = [each for _, published in records for each in published]
    assert {"embed.safetensors", "head.safetensors"} <= inodes.keys()
    late = [name for name, inode in inodes.items() if on_disk.get(str(inode), math.inf) > named_s]
    assert not late


def bytes_of(directory: Path, name: str) -> int:
    """Return 12 bytes per parameter (master weight and two moments) and 4 per tensor (step count)."""
    with safe_open(directory / f"{name}.safetensors", framework="pt") as file:
        weights = [file.get_tensor(key) for key in list(file.keys()) if "/" not in key]
    return sum(12 * weight.numel() + 4 for weight in weights)


def killed_before_the_best_is_marked(rank: int, *, at_step: int) -> None:
    mark_best = CheckpointDirectory.mark_best

    def killed(directory: CheckpointDirectory, step: int) -> None:
        if step == at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        mark_best(directory, step)

    CheckpointDirectory.mark_best = killed  # type: ignore[method-assign]


def ended_before_training(rank: int) -> None:
    def ended(*args: Any) -> None:
        raise SystemExit

    train.run_steps = ended


def test_best_is_restored_after_a_kill_and_after_corruption(model: Path, tmp_path: Path) -> None:
    calm, config = (saving(model, tmp_path / name, 1, processes=1, best="eval_loss") for name in ("calm", "run"))
    expected = finish(calm, 1)
    evaluated = [3, 6, 7]
    losses = [expected.losses[step - 1][2] for step in evaluated]
    assert losses == sorted(losses, reverse=True), "each evaluation is the best so far"
    directory = checkpoints_of(config)
    with started(config, 1, setup=partial(killed_before_the_best_is_marked, at_step=6)) as run:
        assert run.join() == [-signal.SIGKILL]
    assert directory.steps()[-1] == 6
    assert directory.best() == directory.of(3)
    with started(config, 1, setup=ended_before_training) as run:
        assert run.join() == [0]
    assert directory.best() == directory.of(6)
    file = directory.of(6) / "head.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with started(config, 1, setup=ended_before_training) as run:
        assert run.join() == [0]
    assert directory.steps() == [1, 2, 3, 4, 5]
    assert directory.best() == directory.of(3)
    assert finish(config, 1) == expected


def not_removable(rank: int) -> None:
    def refused(directory: CheckpointDirectory, step: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory.of(step)))

    CheckpointDirectory.remove = refused  # type: ignore[method-assign]


def test_a_checkpoint_that_cannot_be_removed_does_not_fail_the_run(model: Path, tmp_path: Path) -> None:
    config = saving(model, tmp_path / "run", every=2, processes=1)
    config = dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, keep=1),
        log=dataclasses.replace(config.log, to="jsonl,text"),
    )
    with started(config, 1, setup=not_removable) as run:
        assert run.join() == [0], run.notes()
    assert checkpoints_of(config).steps() == [2, 4, 6, 7]
    assert "could not be removed: [Errno 13]" in (Path(config.log.dir) / "logs/rank-00000.log").read_text()
