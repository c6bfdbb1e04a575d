"""Ranks that lose a peer leave their waits, and form new groups in the same process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib import patience
from lib.patience import NO_LIMIT_S, stretched
from lib.processes import CONTEXT, WAIT_S, started, wait_until
from lib.ranks import on_ranks

from acsgd.comm.waits import InterruptibleWaits
from acsgd.errors import WaitInterruptedError
from acsgd.groups import Groups, connect
from acsgd.run.report import Gather
from acsgd.topology import Topology

TIMEOUT = timedelta(seconds=NO_LIMIT_S)
SOON_S = 10.0
"""Time limit for what takes 10 ms, seconds on a quiet machine; far below the timeout."""
ELEMENTS = 1 << 24
"""Of a message that is longer than what sockets buffer."""
VICTIM = 2


def exchange_with_victim(rank: int, groups: Groups, store: dist.Store) -> None:
    """Send (rank 0) or receive (rank 1) one message after another. The victim stops in the middle of the first ones."""
    message, other = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    if rank == VICTIM:
        store.wait(["posted 0", "posted 1"], TIMEOUT)
        works = groups.world.isend(other, 1), groups.world.irecv(message, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        assert not works
    while True:
        work = groups.world.isend(message, VICTIM) if rank == 0 else groups.world.irecv(message, VICTIM)
        store.set(f"posted {rank}", "")
        groups.waits.wait(work)


def survive(rank: int, port: int, pipe: Connection) -> None:
    """Lose a peer in the middle of a message; leave when the test says so; communicate without the peer.

    Sends how long it took to leave, and to form new groups, and what the new groups gathered.
    """
    store, waits, interrupted_at = dist.TCPStore("127.0.0.1", port), InterruptibleWaits(), list[float]()

    def interrupt() -> None:
        pipe.recv()
        interrupted_at.append(time.monotonic())
        waits.interrupt("rank 2 has ended")

    control = threading.Thread(target=interrupt, daemon=True)
    control.start()
    view = connect(Topology.of(rank, 3, 1), timeout=TIMEOUT, store=dist.PrefixStore("0", store), waits=waits)
    with contextlib.suppress(WaitInterruptedError, RuntimeError), view as groups:  # gloo may notice the end
        exchange_with_victim(rank, groups, store)
    left_at = time.monotonic()
    control.join(WAIT_S)
    new_store, new_waits = dist.PrefixStore("1", store), InterruptibleWaits()
    with connect(Topology.of(rank, 2, 1), timeout=TIMEOUT, store=new_store, waits=new_waits) as groups:
        formed_at = time.monotonic()
        rows = Gather([2, 2], groups).rows(torch.full((2,), float(rank), dtype=torch.float64))
        assert groups.all_equal("text")
        assert groups.all_gather_text("names", str(rank), timeout_s=NO_LIMIT_S) == ["0", "1"]
        pipe.send((left_at - interrupted_at[0], formed_at - left_at, [row.tolist() for row in rows]))
        pipe.recv()


def test_survivors_of_a_peer_killed_in_the_middle_of_a_message_form_new_groups() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [CONTEXT.Pipe() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(started(survive, rank, store.port, pipes[rank][1])) for rank in range(3)]
        pid = ranks[VICTIM].pid
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T", ranks[VICTIM])
        ranks[VICTIM].kill()
        ranks[VICTIM].join(WAIT_S)
        time.sleep(0.2)  # gloo could notice the end by now
        for pipe, _ in pipes[:2]:
            pipe.send("interrupt")
        results: list[Any] = []
        for pipe, _ in pipes[:2]:
            assert pipe.poll(WAIT_S)
            results.append(pipe.recv())
        for pipe, _ in pipes[:2]:
            pipe.send("end")
        for rank in ranks[:2]:
            rank.join(WAIT_S)
        assert [rank.exitcode for rank in ranks[:2]] == [0, 0]
    for left_s, formed_s, rows in results:
        assert left_s < stretched(SOON_S)
        assert formed_s < stretched(SOON_S)
        assert rows == [[0.0, 0.0], [1.0, 1.0]]


class LateWaits(InterruptibleWaits):
    """Keeps what an interrupt calls, so that a test can call it late, as a thread does that was not scheduled."""

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        super().on_interrupt(callback)


def connect_without_peer(rank: int, world_size: int, path: Path) -> float:
    """Interrupt a connect whose peer never comes, then connect with it; return how long it took to leave."""
    store = dist.FileStore(str(path), world_size)
    waits = LateWaits()
    if rank == 0:
        left_at = list[float]()
        timer = threading.Timer(0.2, waits.interrupt, ["rank 1 does not come"])
        timer.start()
        view = connect(Topology.of(0, 2, 1), timeout=TIMEOUT, store=dist.PrefixStore("0", store), waits=waits)
        with contextlib.suppress(WaitInterruptedError), view:
            raise AssertionError("connected to nobody")
        left_at.append(time.monotonic())
        store.set("left", "")
    store.wait(["left"], TIMEOUT)
    with connect(Topology.of(rank, 2, 1), timeout=TIMEOUT, store=dist.PrefixStore("1", store)) as groups:
        begin = time.monotonic()
        if rank == 0:
            waits.callback()
        assert groups.all_equal("text")
        return time.monotonic() - begin


def test_a_connect_can_be_interrupted_and_another_one_follows(tmp_path: Path) -> None:
    assert max(on_ranks(2, connect_without_peer, tmp_path / "store")) < stretched(SOON_S)


def lose_peer(rank: int, world_size: int, store: dist.Store) -> None:
    """Form groups, and abort them while an operation waits."""
    waits = InterruptibleWaits()
    timer = threading.Timer(0.01, waits.interrupt, ["the view changes"])
    with connect(Topology.of(rank, world_size, 1), timeout=TIMEOUT, store=store, waits=waits) as groups:
        try:
            assert groups.all_equal("text")
            work = groups.world.irecv(torch.empty(1 << 20), 1 - rank)
            assert work is not None
            timer.start()
            waits.wait(work)
        except (WaitInterruptedError, RuntimeError):  # the other rank may be earlier
            groups.abort("the view changes")


def lose_peer_often(rank: int, world_size: int, path: Path, rounds: int) -> list[tuple[int, int, int]]:
    """Form groups and abort them again and again; return file descriptors, threads and memory after each round."""
    used, store = [], dist.FileStore(str(path), world_size)
    for number in range(rounds):
        lose_peer(rank, world_size, dist.PrefixStore(str(number), store))
        patience.wait_until(lambda: all(thread.name != "aborted groups" for thread in threading.enumerate()))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        used.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * 4096))
    return used


def test_aborted_groups_leave_no_files_and_no_threads(tmp_path: Path) -> None:
    for used in on_ranks(2, lose_peer_often, tmp_path / "store", 8):
        files, threads, _ = zip(*used, strict=True)
        assert max(files[1:]) <= files[1] + 1  # one that is being closed
        assert max(threads[1:]) <= threads[1] + 1
