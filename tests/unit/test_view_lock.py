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
from acsgd.elastic.view_resources import ViewLock, check_disks
from acsgd.errors import RefusedError, RunError, WaitInterruptedError
from acsgd.groups import Groups
from acsgd.io.checkpoint.copies import Disks
from acsgd.run.lock.lock import RunLock, leases_of
from acsgd.run.plan.job import Job
from acsgd.run.setup.directories import RunDisks

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


def test_a_host_whose_views_are_a_copy_of_those_of_another_is_refused() -> None:
    hosts = tuple(Host(name, f"{name}:1", disk) for name, disk in (("a", "1"), ("b", "1"), ("c", "2")))
    plan, disks = Plan(1, ranks=("a/0", "b/0", "c/0")), Disks(((0,), (1,), (2,)), ("a", "b", "c"))
    for rank, kind in enumerate((RunError, RefusedError, RunError)):
        with pytest.raises(RunError, match="of b is a copy of that of a; remove it on b") as caught:
            check_disks(View(1, hosts, plan), disks, rank)
        assert type(caught.value) is kind
    check_disks(View(1, hosts, plan), Disks(((0, 1), (2,)), ("a", "c")), 0)


def test_a_leader_of_a_disk_keeps_its_lock_beside_that_of_rank_0(job: Job, lock: ViewLock) -> None:
    disks, job.topology.rank = RunDisks(Disks(((0,), (1,)), ("a", "b"))), 1  # type: ignore[misc]
    held = lock.of(job, CONNECTED, view(1, is_first=True), 1.0, disks)
    assert lock.of(job, CONNECTED, view(2), 1.0, disks) is held
    assert [path.name for path in Path(job.config.log.dir).iterdir()] == [".lock"]
    assert lock.of(job, CONNECTED, view(3), 1.0) is not held
    assert not [*Path(job.config.log.dir).iterdir()]


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
