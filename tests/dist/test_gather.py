"""All-gather of the numbers that ranks report, and failures to report."""

from __future__ import annotations

import itertools
import math
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lib.patience import NO_LIMIT_S, stretched
from lib.ranks import on_ranks

from acsgd.comm.waits import DIRECT
from acsgd.errors import RunError
from acsgd.failures.failures import FailureReport, attribute_failure
from acsgd.groups import connect
from acsgd.run import report
from acsgd.run.report import Gather, gather_rounds
from acsgd.topology import Topology

TIMEOUT = timedelta(seconds=NO_LIMIT_S)
STEPS = 3


def gather_rows(rank: int, world_size: int, store: Path) -> list[list[list[float]]]:
    """Gather a few rounds of 0 to 2 numbers per rank, each rank sending later than the one before it."""
    file_store = dist.FileStore(str(store), world_size)
    rounds = []
    with connect(Topology.of(rank, world_size, 1), timeout=TIMEOUT, store=file_store) as groups:
        for step in range(STEPS):
            lengths = [(rank + step) % 3 for rank in range(world_size)]
            gather = Gather(lengths, groups)
            time.sleep(0.02 * rank)
            mine = torch.full((lengths[rank],), 10.0 * rank + step, dtype=torch.float64)
            rounds.append([row.tolist() for row in gather.rows(mine)])
    return rounds


@pytest.mark.parametrize("world_size", [1, 4, 11])
def test_every_rank_gets_the_numbers_of_every_rank(world_size: int, tmp_path: Path) -> None:
    expected = [[[10 * rank + step] * ((rank + step) % 3) for rank in range(world_size)] for step in range(STEPS)]
    assert on_ranks(world_size, gather_rows, tmp_path / "store") == [expected] * world_size


def test_messages_bring_all_numbers_to_every_rank() -> None:
    """In one round to each of a few ranks, in two rounds of few messages to many; sends and receives match."""
    for size, most_direct in [*itertools.product(range(1, 40), (8, 32)), (64, 8), (1000, 32)]:
        by_rank = [gather_rounds(rank, size, most_direct) for rank in range(size)]
        known = [{rank} for rank in range(size)]
        for rounds in zip(*by_rank, strict=True):
            sent = {(rank, peer): ranks for rank, each in enumerate(rounds) for peer, ranks in each.sent}
            assert sent == {(peer, rank): ranks for rank, each in enumerate(rounds) for peer, ranks in each.received}
            assert all(known[source].issuperset(ranks) for (source, _), ranks in sent.items())
            for (_, target), ranks in sent.items():
                known[target] |= {*ranks}
        assert known == [{*range(size)}] * size
        is_direct = size <= most_direct
        assert {len(rounds) for rounds in by_rank} == {1 if is_direct else 2}
        most = max(len(each.sent) + len(each.received) for rounds in by_rank for each in rounds)
        assert most <= (2 * (size - 1) if is_direct else 4 * math.isqrt(size))


def test_many_ranks_of_one_host_take_two_rounds_and_those_of_several_hosts_one() -> None:
    world = SimpleNamespace(ranks=[*range(16)], rank=lambda: 3, size=lambda: 16)
    for has_several_hosts, rounds in ((False, 2), (True, 1)):
        groups: Any = SimpleNamespace(world=world, waits=DIRECT, has_several_hosts=has_several_hosts)
        assert len(Gather([0] * 16, groups)._rounds) == rounds


def wait_for_rank_1(rank: int, world_size: int, store: Path, most_direct: int) -> tuple[int, ...]:
    """Wait for rank 1, which is alive but sends nothing; return the ranks that the failure names."""
    file_store, others = dist.FileStore(str(store), world_size), [each for each in range(world_size) if each != 1]
    with (
        mock.patch.object(report, "MAX_DIRECT_ON_HOST", most_direct),
        connect(
            Topology.of(rank, world_size, 1), timeout=timedelta(seconds=stretched(1.0)), store=file_store
        ) as groups,
    ):
        gather = Gather([1] * world_size, groups)
        if rank == 1:
            file_store.wait([f"failed {each}" for each in others], TIMEOUT)
            return ()
        with pytest.raises(RunError, match=r"exchanging loss and gradient norm with ranks \[\d") as failed:
            gather.rows(torch.zeros(1, dtype=torch.float64))
        file_store.set(f"failed {rank}", "")
        file_store.wait([f"failed {each}" for each in others], TIMEOUT)  # connections outlive the others' timeouts
        return failed.value.awaited


@pytest.mark.parametrize(
    ("size", "most_direct", "awaited"),
    [
        # rank 0 waits in the order of ranks, so it still waits for rank 2, too; rank 2 has received from rank 0
        (3, 3, [(1, 2), (), (1,)]),
        # two rows of two ranks: rank 2 waits for rank 0, which reports that it waits for rank 1
        (4, 1, [(1,), (), (0,), (1,)]),
    ],
)
def test_ranks_that_do_not_report_are_named(
    size: int, most_direct: int, awaited: list[tuple[int, ...]], tmp_path: Path
) -> None:
    assert on_ranks(size, wait_for_rank_1, tmp_path / "store", most_direct) == awaited
    reports = {rank: FailureReport("", ranks) for rank, ranks in enumerate(awaited) if ranks}
    assert "rank 1 on host is alive, but stuck" in attribute_failure(reports, [], 0, lambda _: "host")
