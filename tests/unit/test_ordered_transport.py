"""The emulated ordered transport: operations run in the order of issue, and a wrong order never ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.ordered import OrderedBackend, OrderedWork, ordered_transport
from lib.patience import NO_LIMIT_S
from torch import Tensor

from acsgd.comm.process_groups import Backend
from acsgd.comm.waits import Work

Open = Callable[[dist.Store, int, int, timedelta], Backend]
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
    first.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        work.wait()
