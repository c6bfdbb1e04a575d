"""The emulated ordered transport: operations run in the order of issue, a wrong order never ends, schedules do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.ordered import OrderedBackend, OrderedWork, ordered_transport
from lib.patience import NO_LIMIT_S, wait_until
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from acsgd.comm.communicators import Backend, Communicator, CommunicatorWatch
from acsgd.comm.liveness import PeerWatch
from acsgd.comm.waits import Work
from acsgd.config.spec import from_spec
from acsgd.errors import RunError
from acsgd.pp import SCHEDULES, Action, Program, lower, parse_action, validate
from acsgd.pp.schedules.dependencies import Dependencies

Open = Callable[[dist.Store, int, int, timedelta], Any]
TIMEOUT = timedelta(seconds=NO_LIMIT_S)
HANG_S = 0.2
"""Time in which two messages that match would have arrived."""


def open_both(open_end: Open) -> list[Any]:
    """Return both ends of a communicator."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(lambda rank: open_end(store, rank, 2, TIMEOUT), range(2))]


def ordered_ends() -> list[OrderedBackend]:
    return open_both(ordered_transport(seed=1).open)


def test_operations_run_in_the_order_of_issue() -> None:
    first, second = ordered_ends()
    sent, got = torch.arange(5.0), [torch.zeros(5) for _ in range(4)]
    works = [first.send([sent + n], 1, n) for n in range(4)]
    works += [second.recv([buffer], 0, 3 - n) for n, buffer in enumerate(got)]  # tags have no meaning
    sums = [torch.full((3,), 1.0 + rank) for rank in range(2)]
    works += [end.allreduce([x]) for end, x in zip((first, second), sums, strict=True)]
    for work in works:
        work.wait()
    assert torch.equal(torch.stack(got), torch.stack([sent + n for n in range(4)]))
    assert [x.tolist() for x in sums] == [[3.0] * 3] * 2


def both_receive_first(ends: Sequence[Backend], mine: Tensor, other: Tensor) -> list[Work]:
    return [
        work
        for rank, end in enumerate(ends)
        for work in (end.recv([other], 1 - rank, 0), end.send([mine], 1 - rank, 0))
    ]


def both_send_first(ends: Sequence[Backend], mine: Tensor, other: Tensor) -> list[Work]:
    return [
        work
        for rank, end in enumerate(ends)
        for work in (end.send([mine], 1 - rank, 0), end.recv([other], 1 - rank, 0))
    ]


@pytest.mark.parametrize("issue", [both_receive_first, both_send_first])
def test_an_order_that_gloo_accepts_hangs_until_an_abort(
    issue: Callable[[Sequence[Backend], Tensor, Tensor], list[Any]],
) -> None:
    for work in issue(open_both(dist.ProcessGroupGloo), torch.ones(3), torch.zeros(3)):
        work.wait()
    ends = ordered_ends()
    works: list[OrderedWork] = issue(ends, torch.ones(3), torch.zeros(3))
    assert not works[0].is_completed(HANG_S)
    assert not any(work.is_completed() for work in works)
    for end in ends:
        end.abort()
    late = ends[0].send([torch.ones(1)], 1, 0)
    for work in (*works, late):
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()


def test_a_rank_that_ends_leaves_the_other_waiting() -> None:
    first, second = ordered_ends()
    work = first.recv([torch.zeros(3)], 1, 0)
    second.abort()
    assert not work.is_completed(HANG_S)
    assert first.get_error() == ErrorType.COMM_ERROR
    first.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        work.wait()


class LivePeers(PeerWatch):
    """Ranks that have not ended."""

    def __init__(self) -> None:
        self.checked = list[list[int]]()

    def check(self, ranks: list[int]) -> None:
        self.checked.append(ranks)


def test_the_watch_ends_operations_when_none_has_ended_for_too_long() -> None:
    first, second = (
        Communicator(end, [4, 7], position, "x", torch.device("cpu")) for position, end in enumerate(ordered_ends())
    )
    peers = LivePeers()
    watch = CommunicatorWatch(lambda: [first], 4, peers, 100.0, first.abort)
    watch.close()  # it is asked below, at times to come
    begin = time.monotonic()
    watch.check(begin + 1000)
    works = [first.isend(torch.ones(1), 7, f"activation {n}") for n in range(2)]
    watch.check(begin + 90)
    second.irecv(torch.zeros(1), 4).wait()
    works[0].wait()
    watch.check(begin + 190)
    watch.check(begin + 280)
    with pytest.raises(RunError, match=r"rank 4 on \S+: sending activation 1, with ranks \[7\]: not done") as error:
        watch.check(begin + 300)
    assert error.value.awaited == (7,)
    second.abort()
    wait_until(lambda: first.failed() is not None)
    with pytest.raises(RunError, match=r"sending activation 1, with ranks \[7\]: a connection has broken") as error:
        watch.check(begin + 190)
    assert error.value.awaited == (7,)
    assert peers.checked == [[7]] * 5
    first.abort()


def performs(program: Program, within_s: float, *, is_on_device: bool = False) -> bool:
    """Perform the messages of a lowered program, each rank in a thread; return whether all end within some seconds.

    Each direction of each boundary has a communicator. A rank waits for each of its sends: the strictest network that
    receives ahead. is_on_device: it waits for none, and receives a message when it needs it, as a device over NCCL.
    """
    dependencies = Dependencies.of(program)
    sends = {action for actions in program for action in actions if action.operation.kind == "send"}
    ends = {(send.op, send.stage): ordered_ends() for send in sends}

    def receive(action: Action) -> tuple[OrderedWork, Tensor]:
        buffer, route = torch.zeros(2), action.operation.route
        assert route is not None
        return ends[route.send, action.peer][1].recv([buffer], 0, 0), buffer

    def perform(actions: Sequence[Action]) -> None:
        received: dict[Action, tuple[OrderedWork, Tensor]] = {}
        for action in actions:
            if action.operation.kind == "receive" and not is_on_device:
                received[action] = receive(action)
            elif action.operation.kind == "send":
                message = torch.tensor([action.stage, action.micro]).float()
                sent = ends[action.op, action.stage][0].send([message], 1, 0)
                if not is_on_device:
                    sent.wait()
            elif action.is_compute and (source := dependencies.source(action)):
                for awaited in dependencies.messages(source)[1:]:
                    work, buffer = receive(awaited) if is_on_device else received.pop(awaited)
                    work.wait()
                    assert buffer.tolist() == [source.stage, source.micro]

    with ThreadPoolExecutor(len(program)) as pool:
        ranks = [pool.submit(perform, actions) for actions in program]
        waiting = wait(ranks, within_s).not_done
        for end in chain(*ends.values()):
            end.abort()
    return not waiting and all(rank.result() is None for rank in ranks)


@pytest.mark.parametrize("spec", [*SCHEDULES, "1f1b:lead=2,split_last=true"])
def test_validated_programs_end_where_each_send_lasts_until_its_receive(spec: str) -> None:
    program = lower(from_spec(spec, SCHEDULES, key="").program(3, 4), ahead=2)
    validate(program)
    assert performs(program, NO_LIMIT_S)
    assert performs(program, NO_LIMIT_S, is_on_device=True)


def test_a_program_that_hangs_is_refused() -> None:
    """Both ranks send before they post a receive."""
    texts = ["0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 0R", "1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1 1R"]
    program = [[parse_action(text) for text in of_rank.split()] for of_rank in texts]
    assert not performs(program, HANG_S)
    with pytest.raises(ValueError, match="wait for each other"):
        validate(program)
