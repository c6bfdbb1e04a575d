"""Laws of the numbers that all ranks tell each other."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks

from acsgd.errors import RunError
from acsgd.run.control import Gather
from acsgd.topology import Topology, connect

TIMEOUT = timedelta(seconds=60)
STEPS = 3


def tell(rank: int, world_size: int, store: Path) -> list[list[list[float]]]:
    """Tell a few rounds of numbers, each rank later than the one before it, and return all that was heard."""
    file_store = dist.FileStore(str(store), world_size)
    heard = []
    with connect(Topology(rank, world_size, 1), timeout=TIMEOUT, store=file_store) as groups:
        for step in range(STEPS):
            gather = Gather(2, groups.world)
            time.sleep(0.02 * rank)
            heard.append(gather.rows(torch.tensor([rank, step], dtype=torch.float64)).tolist())
    return heard


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_hears_every_rank(world_size: int, tmp_path: Path) -> None:
    expected = [[[rank, step] for rank in range(world_size)] for step in range(STEPS)]
    assert on_ranks(world_size, tell, tmp_path / "store") == [expected] * world_size


def miss(rank: int, world_size: int, store: Path) -> tuple[int, ...]:
    """Wait for rank 1, which is alive but says nothing; return whom the failure names."""
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology(rank, world_size, 1), timeout=timedelta(seconds=2), store=file_store) as groups:
        gather = Gather(1, groups.world)
        if rank == 1:
            file_store.wait(["failed 0", "failed 2"], TIMEOUT)
            return ()
        with pytest.raises(RunError, match=r"exchanging loss and gradient norm with ranks \[1") as failed:
            gather.rows(torch.zeros(1, dtype=torch.float64))
        file_store.set(f"failed {rank}", "")
        file_store.wait(["failed 0", "failed 2"], TIMEOUT)  # a rank that is gone would not be a silent one
        return failed.value.awaited


def test_who_keeps_silent_is_named(tmp_path: Path) -> None:
    """Rank 0 waits in the order of ranks, so it has not heard rank 2 either; rank 2 has heard rank 0."""
    assert on_ranks(3, miss, tmp_path / "store") == [(1, 2), (), (1,)]
