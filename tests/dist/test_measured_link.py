"""Law: the estimated time of a transfer follows from the size of the state, not from when the other rank answers."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.training import TIMEOUT

from acsgd.elastic.state import transfer
from acsgd.groups import connect
from acsgd.topology import Topology

SIZE = 100
"""Size of the state in probes."""
LATE_S, EMPTY_S = 0.06, 0.01
"""Delay of a late answer, and more than the round trip of an empty message that is answered at once, seconds."""
BUSY = (False,) * (1 + transfer.MAX_PROBES) + (True,) + (False,) * transfer.MAX_PROBES
"""The answer to the first probe is late, those to the empty messages before it and to the other probes are not."""


def measure(rank: int, world_size: int, path: Path, late: tuple[bool, ...]) -> float:
    """Measure the link from rank 0 to rank 1, which answers LATE_S seconds late as often as `late` says, in turn."""
    send, is_late = transfer._send, itertools.cycle(late)

    def answer(*args: Any) -> None:
        if next(is_late):
            time.sleep(LATE_S)
        send(*args)

    with connect(
        Topology.of(rank, world_size, 1), timeout=TIMEOUT, store=dist.FileStore(str(path), world_size)
    ) as groups:
        if rank == 0:
            return transfer.measure_link(groups, 1, SIZE * transfer.PROBE_BYTES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "_send", answer)
            transfer.answer_link(groups, 0)
    return 0.0


@pytest.mark.parametrize("late", [(True,), BUSY], ids=["a long link", "a busy core"])
def test_the_delay_of_an_answer_does_not_count_once_per_probe_of_the_state(
    tmp_path: Path, late: tuple[bool, ...]
) -> None:
    estimated_s, _ = on_ranks(2, measure, tmp_path / "store", late)
    assert estimated_s < SIZE * (LATE_S - EMPTY_S)
