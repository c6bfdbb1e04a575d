"""Law: the estimated time of a transfer follows from the size of the state, not from when the other rank answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lib.patience import slowdown
from lib.ranks import on_ranks
from lib.training import TIMEOUT

from acsgd.elastic.state import transfer
from acsgd.groups import connect
from acsgd.topology import Topology

SIZE = 100
"""Size of the state in probes."""
LATE_S, EMPTY_S = 0.06, 0.01
"""Delay of a late answer, and more than the round trip of an empty message that is answered at once; seconds on a
quiet machine."""
LATE = {
    "a long link": (True,),
    # the answer to the first probe, not those to the empty messages before it or to the other probes
    "a busy core": (False,) * (1 + transfer.MAX_PROBES) + (True,) + (False,) * transfer.MAX_PROBES,
}
"""Which answers are late, in turn."""


def measure(rank: int, world_size: int, path: Path, late_s: float) -> list[float]:
    """Measure the link from rank 0 to rank 1 for each of LATE; rank 1 answers `late_s` seconds late when it says so."""
    send, measured = transfer._send, list[float]()
    with (
        connect(
            Topology.of(rank, world_size, 1), timeout=TIMEOUT, store=dist.FileStore(str(path), world_size)
        ) as groups,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(transfer, "PROBES_S", late_s / LATE_S * transfer.PROBES_S)
        for late in LATE.values():
            is_late = itertools.cycle(late)

            def answer(*args: Any, is_late: Iterator[bool] = is_late) -> None:
                if next(is_late):
                    time.sleep(late_s)
                send(*args)

            if rank == 0:
                measured.append(transfer.measure_link(groups, 1, SIZE * transfer.PROBE_BYTES))
            else:
                patch.setattr(transfer, "_send", answer)
                transfer.answer_link(groups, 0)
    return measured


def test_the_delay_of_an_answer_does_not_count_once_per_probe_of_the_state(tmp_path: Path) -> None:
    times = slowdown()
    for estimated_s in on_ranks(2, measure, tmp_path / "store", times * LATE_S)[0]:
        assert estimated_s < SIZE * times * (LATE_S - EMPTY_S)
