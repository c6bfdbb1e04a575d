"""Daemons of several hosts in one process, with clients that speak as their workers do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lib.daemons import COMPLETE, TIMING, Worker, complete_tasks, host
from lib.patience import stretched

from acsgd.elastic.host.daemon import Daemon
from acsgd.elastic.host.joining import DaemonOptions, open_membership
from acsgd.elastic.host.local_workers import LocalWorkers, WorkerEvents
from acsgd.elastic.host.register import VIEWS, DiskRegister, NoMajorityError, ViewRegister
from acsgd.elastic.membership.messages import Broken, End, Host, Leave, Setup, View
from acsgd.elastic.membership.plan import Plan
from acsgd.elastic.membership.views import Membership
from tests.lib.ports import free_addresses

pytestmark = COMPLETE


class NoEvents(WorkerEvents):
    """Ignores what happens to workers."""


@pytest.fixture(autouse=True)
def tasks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with complete_tasks(caplog):
        yield


@pytest.fixture
def addresses() -> list[str]:
    """Three free addresses of this host."""
    return free_addresses(3)


def test_hosts_that_start_in_any_order_form_one_view(addresses: list[str], tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(host(addresses, number, tmp_path, min_hosts=3)) for number in (2, 0, 1)]
        runs = [Worker(path, tmp_path / "run") for path in paths]
        views = [worker.next_view() for worker in runs]
        assert views[0] == views[1] == views[2]
        assert len(views[0].hosts) == 3
        assert views[0].plan.from_disk
        assert views[0].plan.is_first


def test_a_host_that_joins_gets_its_state_from_another_and_nobody_else_moves(
    addresses: list[str], tmp_path: Path
) -> None:
    with host(addresses, 0, tmp_path) as first, host(addresses, 2, tmp_path) as second:
        a = Worker(first, tmp_path / "run")
        before = a.next_view()
        b = Worker(second, tmp_path / "run")
        after = b.next_view(2)
        assert a.next_view(2) == after
        plan = after.plan
        assert not plan.from_disk
        assert plan.step == 5
        assert [(transfer.source, transfer.target) for transfer in plan.transfers] == [(0, 1)]
        assert plan.ranks[0] == before.plan.ranks[0]


def test_the_end_of_a_host_forms_the_next_view_at_once(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 1, tmp_path, min_hosts=2) as second:
        with host(addresses, 0, tmp_path, min_hosts=2) as first:
            a, b = Worker(first, tmp_path / "run"), Worker(second, tmp_path / "run")
            a.next_view()
            b.next_view()
        assert b.next_view(1).plan.step == 5


def test_a_worker_that_ends_and_comes_back_joins_again(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path, min_hosts=2) as first, host(addresses, 1, tmp_path, min_hosts=2) as second:
        a, b = Worker(first, tmp_path / "run"), Worker(second, tmp_path / "run")
        a.next_view()
        b.next_view()
        b.close()
        alone = a.next_view()
        assert alone.reason == f"worker 0 of {addresses[1]} ended"
        assert len(alone.hosts) == 2  # the host is a member, without workers
        assert len(alone.plan.ranks) == 1
        b = Worker(second, tmp_path / "run")
        assert len(a.next_view().plan.ranks) == 2
        assert len(b.next_view().plan.ranks) == 2


def test_a_view_does_not_run_on_a_worker_that_replaces_one_of_it(tmp_path: Path) -> None:
    """It has ended after its host has promised its state, and before the view that is planned with that state."""

    async def replace_worker() -> list[bool]:
        workers = LocalWorkers(NoEvents())
        await workers.listen(tmp_path / "socket", "127.0.0.1:1")
        planned = []
        for _ in range(2):
            worker = Worker(tmp_path / "socket", tmp_path / "run")
            while workers.states is None:
                await asyncio.sleep(0.01)
            planned.append(View(1, (), Plan(1, ranks=tuple(f"a/{name}" for name in workers.states))))
            runs = [workers.run(view, "a") for view in planned]
            worker.close()
            while workers.are_complete:
                await asyncio.sleep(0.01)
        workers.close()
        return runs

    assert asyncio.run(replace_worker()) == [False, True]


def test_a_lost_worker_and_a_lost_host_do_not_wait_for_a_heartbeat(addresses: list[str], tmp_path: Path) -> None:
    slow = replace(TIMING, heartbeat_s=stretched(1.0))
    with host(addresses, 1, tmp_path, min_hosts=2, timing=slow) as second:
        with host(addresses, 0, tmp_path, min_hosts=2, timing=slow) as first:
            a, b = (
                Worker(first, tmp_path / "run", silence_s=stretched(10.0)),
                Worker(second, tmp_path / "run", silence_s=stretched(10.0)),
            )
            a.next_view()
            view = b.next_view()
            ended_at = time.monotonic()
            b.close()
            assert len(a.next_view().plan.ranks) == 1
            assert time.monotonic() - ended_at < slow.heartbeat_s / 2
            b = Worker(second, tmp_path / "run", silence_s=stretched(10.0))
            assert len(b.next_view().plan.ranks) == 2
            first_epoch = view.epoch
        b.send(Broken(first_epoch + 2, "rank 0 has ended"))
        broken_at = time.monotonic()
        assert b.next_view(1).plan.step == 5
        assert time.monotonic() - broken_at < slow.heartbeat_s / 2


def test_a_host_that_leaves_ends_its_workers_and_the_last_host_stays(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path, min_hosts=2) as first, host(addresses, 1, tmp_path, min_hosts=2) as second:
        a, b = Worker(first, tmp_path / "run"), Worker(second, tmp_path / "run")
        a.next_view()
        b.next_view()
        a.send(Leave())
        assert b.next_view(1).plan.step == 5
        assert a.next() == End(None)


def test_a_host_that_was_excluded_leaves_before_it_joins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str | None] = []
    options = DaemonOptions("run", "127.0.0.1:1", (), b"secret", min_hosts=1, max_hosts=1)
    monkeypatch.setattr(LocalWorkers, "end", lambda self, error: ended.append(error))
    Daemon(options, tmp_path / "socket").on_leave()
    assert ended == [None]


def test_a_host_that_waits_for_others_leaves_at_once(addresses: list[str], tmp_path: Path) -> None:
    with host(addresses, 0, tmp_path, min_hosts=2) as first:
        a = Worker(first, tmp_path / "run")
        a.send(Leave())
        assert a.next() == End(None)
        with host(addresses, 1, tmp_path, min_hosts=1) as second:
            assert len(Worker(second, tmp_path / "run").next_view().hosts) == 1


@pytest.mark.parametrize("failed_rounds", [2, 3])
def test_a_view_without_a_majority_is_reported_after_several_rounds(
    failed_rounds: int,
    addresses: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds, record = itertools.count(), ViewRegister.record

    async def fail(self: ViewRegister, view: View, voters: tuple[str, ...], history: str | None) -> View:
        if next(rounds) < failed_rounds:
            raise NoMajorityError("no majority")
        return await record(self, view, voters, history)

    monkeypatch.setattr(ViewRegister, "record", fail)
    with host(addresses, 0, tmp_path) as first:
        Worker(first, tmp_path / "run").next_view()
    assert ("view 1 cannot be recorded: no majority" in "".join(capsys.readouterr())) is (failed_rounds == 3)


def test_force_gives_up_the_hosts_that_it_names_and_only_once(
    addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forced: list[bool] = []

    def open_forced(me: Host, options: DaemonOptions, setup: Setup, disk: DiskRegister) -> Membership:
        forced.append(setup.force)
        return open_membership(me, options, setup, disk)

    monkeypatch.setattr("acsgd.elastic.host.daemon.open_membership", open_forced)
    others = (Host("b", addresses[1], "b"), Host("c", addresses[2], "c"))
    last = View(5, others, Plan(1, ranks=("b/0", "c/0")), voters=("b", "c"), history="first")
    DiskRegister(tmp_path / "run" / VIEWS).keep(last)
    options = DaemonOptions("run", addresses[0], addresses[:1], b"s", min_hosts=1, max_hosts=8, timing=TIMING)
    daemon = Daemon(options, tmp_path / "socket")
    daemon.start()
    worker = Worker(tmp_path / "socket", tmp_path / "run", force=True)
    view = worker.next_view()
    daemon._loop.call_soon_threadsafe(lambda: daemon._exclude(left=False))
    while len(forced) < 2:
        time.sleep(0.01)
    daemon.stop()
    assert (view.epoch, view.history == last.history) == (6, False)
    assert forced == [True, False]
    printed = "".join(capsys.readouterr())
    assert "elastic.force is set; remove it" in printed
    assert f"continues by elastic.force, without {addresses[1]}, {addresses[2]}: what they have done" in printed
