"""Laws of the run lock: one holder per directory, taken over only from a holder that has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lib.processes import CONTEXT, started, wait_for_a_signal

from acsgd.errors import RunError
from acsgd.failures.processes import ProcessIdentity, start_time
from acsgd.groups import Groups
from acsgd.run.lock import lease as lease_module
from acsgd.run.lock import lock
from acsgd.run.lock.lease import STALE_S, WAIT_S, Lease
from acsgd.run.lock.lock import HEARTBEAT_S, RunLock

HERE = ProcessIdentity.current()
ELSEWHERE = dataclasses.replace(HERE, host="other-host", machine="another boot")


class Clock:
    """A clock that runs only in sleep; `every` seconds, it calls `event`."""

    def __init__(self, event: Callable[[], object] = lambda: None, every: float = HEARTBEAT_S) -> None:
        self.now = 100.0
        self._event = event
        self._every = every
        self._next = self.now + every

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self._next:
            self._next += self._every
            self._event()

    @property
    def elapsed(self) -> float:
        return self.now - 100.0


def lease_of(directory: Path, process: ProcessIdentity = HERE, clock: Clock | None = None) -> Lease:
    clock = clock or Clock()
    return Lease(directory, "log.dir", process, clock=clock, sleep=clock.sleep)


def leases(directory: Path) -> list[str]:
    """Return the names of all leases; asserts that the lock has left nothing else."""
    assert [path.name for path in directory.glob(".lock*")] in ([], [".lock"])
    return [path.name for path in directory.glob(".lock/*")]


def acquired(directory: Path, process: ProcessIdentity = HERE) -> Lease:
    lease = lease_of(directory, process)
    lease.acquire(pytest.fail)
    return lease


def dead_process() -> ProcessIdentity:
    """Return a process of this host that has ended and is a zombie, so that its pid is not reused."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = start_time(child.pid)
    while start_time(child.pid):
        time.sleep(0.01)
    return dataclasses.replace(HERE, pid=child.pid, started=started)


def test_a_free_directory_is_taken_at_once_and_left_as_it_was(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "new"):
        for _ in range(2):
            lease = acquired(directory)
            assert len(leases(directory)) == 1
            lease.release()
            assert list(tmp_path.iterdir()) == []


def test_a_live_holder_is_waited_for_and_then_named(tmp_path: Path) -> None:
    for holder in (HERE, ELSEWHERE):
        directory = tmp_path / holder.host
        held = acquired(directory, holder)
        clock, notes = Clock(held.renew), list[str]()
        with pytest.raises(RunError) as error:
            lease_of(directory, clock=clock).acquire(notes.append)
        assert WAIT_S <= clock.elapsed < WAIT_S + 2 * HEARTBEAT_S
        message = f"log.dir: {directory} is in use by another run: process {holder.pid} on {holder.host}, started "
        assert str(error.value).startswith(message)
        assert f"(on {holder.host}: kill {holder.pid}), or use another --log.dir" in str(error.value)
        assert len(notes) == 1
        assert notes[0].endswith("Waiting up to 30 s for it to end")
        held.renew()


def test_a_live_holder_in_a_container_is_ended_there_and_not_by_its_pid_here(tmp_path: Path) -> None:
    machine = HERE.machine.rpartition(" ")[0] + " pid:[4026532000]"
    held = acquired(tmp_path, dataclasses.replace(HERE, pid=1, host="box", machine=machine))
    with pytest.raises(RunError) as error:
        lease_of(tmp_path, clock=Clock(held.renew)).acquire(lambda note: None)
    assert ": process 1 in a container with host name box, started " in str(error.value)
    assert ", it is taken over 20 s after its last heartbeat; end it (stop the container, or in it: kill 1), " in str(
        error.value
    )


def test_two_directories_of_a_dead_run_on_another_host_are_waited_for_at_once(tmp_path: Path) -> None:
    clock, directories = Clock(), (tmp_path / "a", tmp_path / "b")
    for directory in directories:
        acquired(directory, ELSEWHERE)
    run_lock = RunLock([lease_of(directory, clock=clock) for directory in directories])
    run_lock.acquire(cast(Groups, SimpleNamespace(wait_for_all=lambda *_, **__: None)), 1.0)
    run_lock.release()
    assert STALE_S <= clock.elapsed < STALE_S + 1


def test_a_live_holder_of_this_host_is_never_taken_over_even_without_heartbeats(tmp_path: Path) -> None:
    acquired(tmp_path)
    with pytest.raises(RunError, match="heartbeat 30 s ago"):
        lease_of(tmp_path).acquire(lambda note: None)


def test_a_holder_of_another_user_that_proc_hides_is_never_known_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    ended = dead_process()
    assert ended.is_alive() is False
    monkeypatch.setattr(os, "kill", refuse)
    assert ended.is_alive() is None
    assert HERE.is_alive() is True


def test_a_holder_that_ends_meanwhile_leaves_the_directory_free(tmp_path: Path) -> None:
    held = acquired(tmp_path)
    clock = Clock(held.release, every=WAIT_S / 2)
    lease_of(tmp_path, clock=clock).acquire(lambda note: None)
    assert clock.elapsed < WAIT_S


def test_a_dead_process_of_this_host_is_taken_over_at_once(tmp_path: Path) -> None:
    reused = dataclasses.replace(HERE, started="1")
    for number, gone in enumerate((dead_process(), reused)):
        directory = tmp_path / str(number)
        acquired(directory, gone)
        (ended,) = leases(directory)
        acquired(directory)
        assert len(leases(directory)) == 1
        assert leases(directory) != [ended]


def test_a_holder_of_another_host_is_taken_over_after_it_was_silent_for_long_enough(tmp_path: Path) -> None:
    held = acquired(tmp_path, ELSEWHERE)
    clock = Clock()
    taker = lease_of(tmp_path, clock=clock)
    taker.acquire(lambda note: None)
    assert STALE_S <= clock.elapsed < STALE_S + 1
    with pytest.raises(RunError, match=rf"{tmp_path} was taken over by process {HERE.pid} on {HERE.host}, because"):
        held.renew()
    taker.renew()
    held.release()
    taker.renew()


def test_a_holder_that_was_stopped_finds_that_its_successor_has_come_and_gone(tmp_path: Path) -> None:
    for is_followed in (False, True):
        directory = tmp_path / str(is_followed)
        directory.mkdir()
        stopped = acquired(directory, ELSEWHERE)
        taker = lease_of(directory)
        taker.acquire(lambda note: None)
        taker.release()
        follower = acquired(directory) if is_followed else None
        with pytest.raises(RunError, match=f"was taken over by {'process' if is_followed else 'another run'}"):
            stopped.renew()
        stopped.release()
        if follower is not None:
            follower.renew()
        assert len(leases(directory)) == is_followed


def test_a_check_after_a_pause_reads_the_lease_itself(tmp_path: Path) -> None:
    """The thread that renews it may run later than the thread that trains."""
    clock = Clock()
    held = RunLock([acquired(tmp_path, ELSEWHERE)], clock=clock)
    lease_of(tmp_path).acquire(lambda note: None)
    held.check()
    clock.sleep(STALE_S / 2)
    with pytest.raises(RunError, match="was taken over by process"):
        held.check()


def test_a_check_after_a_pause_within_a_heartbeat_reads_the_lease_again(tmp_path: Path) -> None:
    clock = Clock()

    class Stopped(Lease):
        """Lease of a process that is stopped at the end of a heartbeat, until another has taken over."""

        def renew(self) -> None:
            super().renew()
            clock.sleep(STALE_S)
            lease_of(tmp_path).acquire(lambda note: None)

    lease = Stopped(tmp_path, "log.dir", ELSEWHERE)
    lease.acquire(pytest.fail)
    held = RunLock([lease], clock=clock)
    held.verify()
    with pytest.raises(RunError, match="was taken over by process"):
        held.check()


@pytest.mark.parametrize("call", ["unlink", "rename"])
def test_a_start_that_was_stopped_while_it_took_over_removes_no_later_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It stands still before it removes, or replaces, the lease that it judged: by then another run holds it."""
    acquired(tmp_path, dead_process())
    (tmp_path / "metrics.jsonl").touch()
    late, holders = lease_of(tmp_path), list[Lease]()

    def stopped(path: Path, *args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        acquired(tmp_path).release()
        holders.append(acquired(tmp_path))
        return getattr(path, call)(*args, **options)

    monkeypatch.setattr(Path, call, stopped)
    with pytest.raises(RunError, match="is in use by another run"):
        late.acquire(lambda note: None)
    holders[0].renew()
    assert len(leases(tmp_path)) == 1


def test_what_a_start_left_that_was_killed_while_it_took_the_lease_blocks_nobody(tmp_path: Path) -> None:
    for leftover in (".lock", ".lock.0123", ".lock.0123/0123"):
        (tmp_path / leftover).mkdir(parents=True, exist_ok=True)
        lease = acquired(tmp_path)
        assert len(leases(tmp_path)) == 1
        lease.release()
        assert list(tmp_path.iterdir()) == []


def test_a_lease_whose_content_is_damaged_is_taken_over_like_one_of_another_host(tmp_path: Path) -> None:
    acquired(tmp_path)
    (tmp_path / ".lock" / leases(tmp_path)[0]).write_text("")
    clock = Clock()
    lease_of(tmp_path, clock=clock).acquire(lambda note: None)
    assert STALE_S <= clock.elapsed < STALE_S + 1
    assert len(leases(tmp_path)) == 1


def hold(directory: Path, go: float, results: Queue[str]) -> None:
    lease_module.WAIT_S = 1.0
    time.sleep(max(0.0, go - time.monotonic()))
    try:
        lease = Lease(directory, "log.dir", ProcessIdentity.current())
        lease.acquire(lambda note: None)
        results.put(f"holds {os.getpid()}")
        wait_for_a_signal()
    except RunError as error:
        results.put(str(error))


def test_of_several_starts_that_find_a_killed_holder_one_takes_over(tmp_path: Path) -> None:
    for _ in range(3):
        results, go = CONTEXT.Queue(), time.monotonic() + 0.2
        with contextlib.ExitStack() as stack:
            starts = [stack.enter_context(started(hold, tmp_path, go, results)) for _ in range(4)]
            holder, *refused = sorted(results.get(timeout=60) for _ in starts)
        pid = holder.removeprefix("holds ")
        assert all(f"process {pid} on" in message for message in refused), [holder, *refused]


def test_a_lock_that_is_lost_fails_every_later_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    with RunLock([acquired(tmp_path)]) as held:
        held.start()
        held.verify()
        held.check()
        (tmp_path / ".lock" / leases(tmp_path)[0]).unlink()
        while not held.is_lost:
            time.sleep(0.01)
        for check in (held.check, held.verify):
            with pytest.raises(RunError, match="was taken over by another run"):
                check()
    assert leases(tmp_path) == []


def test_a_heartbeat_that_cannot_be_written_loses_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = acquired(tmp_path)

    def full(*_: object) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    held.renew()


def test_a_removed_directory_is_created_again_unless_another_run_holds_it(tmp_path: Path) -> None:
    directory = tmp_path / "runs/one"
    held = acquired(directory)
    for is_created_again in (False, True):
        shutil.rmtree(tmp_path)
        if is_created_again:
            (directory / "logs").mkdir(parents=True)
        held.renew()
        assert len(leases(directory)) == 1
        with pytest.raises(RunError, match=f"is in use by another run: process {HERE.pid} on {HERE.host}"):
            lease_of(directory).acquire(lambda note: None)
    shutil.rmtree(directory)
    newcomer = acquired(directory, ELSEWHERE)
    with pytest.raises(RunError, match=r"was taken over by process \d+ on other-host, because "):
        held.renew()
    newcomer.renew()


def test_a_rank_without_leases_passes_all_checks() -> None:
    with RunLock([]) as held:
        held.start()
        held.check()
        held.verify()
