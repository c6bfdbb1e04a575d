"""Laws of the run lock of an elastic run, whose rank 0 changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig
from acsgd.elastic.membership.messages import Host, View
from acsgd.elastic.membership.plan import Plan
from acsgd.elastic.view_resources import ViewLock
from acsgd.errors import RunError, WaitInterruptedError
from acsgd.groups import Groups
from acsgd.run.lock.lock import RunLock, leases_of
from acsgd.run.plan.job import Job

CONNECTED = cast(Groups, SimpleNamespace(wait_for_all=lambda *_, **__: None))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """That of rank 0."""
    data, optim = DataConfig("demo", 8, 2), OptimConfig(lr=1e-3, steps=9)
    config = Config(ModelConfig("m"), data, optim, log=LogConfig(dir=str(tmp_path)))
    topology, checkpoints = SimpleNamespace(rank=0), SimpleNamespace(path=tmp_path / "checkpoints")
    return cast(Job, SimpleNamespace(topology=topology, paths=SimpleNamespace(checkpoints=checkpoints), config=config))


@pytest.fixture
def lock() -> Iterator[ViewLock]:
    with contextlib.closing(ViewLock()) as opened:
        yield opened


def view(epoch: int, *, is_first: bool = False) -> View:
    return View(epoch, (Host("a", "h:1"),), Plan(1, ranks=("a/0",), is_first=is_first))


def test_a_rank_0_keeps_the_lock_from_view_to_view(job: Job, lock: ViewLock) -> None:
    first = lock.of(job, CONNECTED, view(1, is_first=True), 1.0)
    assert lock.of(job, CONNECTED, view(2), 1.0) is first
    first.verify()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_rank_0_that_has_missed_a_view_takes_the_lock_again(job: Job, lock: ViewLock, is_first: bool) -> None:
    """Another rank 0 may have held it meanwhile; if all of its hosts have ended, a run may begin as if it were new."""
    lock.of(job, CONNECTED, view(1, is_first=True), 1.0)
    other = RunLock(leases_of(job))
    other.take_over()
    if is_first:
        other.release()
    lock.of(job, CONNECTED, view(3, is_first=is_first), 1.0).verify()
    if not is_first:
        with pytest.raises(RunError, match="taken over"):
            other.verify()


def test_a_rank_0_that_was_interrupted_while_it_acquired_the_lock_takes_it_in_the_next_view(
    job: Job, lock: ViewLock
) -> None:
    """Else no thread would renew the leases."""

    def interrupt(*_: object, **__: object) -> None:
        raise WaitInterruptedError("another view follows")

    groups = cast(Groups, SimpleNamespace(wait_for_all=interrupt))
    with pytest.raises(WaitInterruptedError):
        lock.of(job, groups, view(1, is_first=True), 1.0)
    held = lock.of(job, CONNECTED, view(2), 1.0)
    held.verify()
    assert held._thread.is_alive()
