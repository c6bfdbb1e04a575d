"""Law: the two copies of a tied weight stay equal, bit for bit, wherever they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, make_config, train

from acsgd.config.options import Config
from acsgd.run.build import build_session
from acsgd.run.inputs import open_weight_source
from acsgd.run.job import prepare
from acsgd.topology import Launch, connect

TinyModel = Callable[..., Path]
NAMES = ("transformer.wte.weight", "lm_head.weight")


def train_and_hash(rank: int, world_size: int, store: Path, config: Config) -> dict[str, tuple[str, str | None]]:
    """Return key -> (hash, of what it is a copy) of this rank's tied weights after some steps."""
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    file_store = dist.FileStore(str(store), world_size)
    with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
        worker = build_session(job, open_weight_source(job), groups)
        train(worker, batches_of(job))
        return {
            w.key: (hashlib.sha256(w.param.detach().numpy().tobytes()).hexdigest(), w.copy_of)
            for w in worker.weights
            if w.key in NAMES
        }


@pytest.mark.parametrize(("world_size", "stages", "schedule"), [(2, 2, "1f1b"), (4, 2, "interleaved"), (3, 3, "gpipe")])
def test_copies_on_two_ranks_stay_equal(
    world_size: int, stages: int, schedule: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = make_config(tiny_model(), tmp_path, steps=8, stages=stages, schedule=schedule)
    by_rank = on_ranks(world_size, train_and_hash, tmp_path / "store", config)
    first, last = by_rank[0], by_rank[stages - 1]
    assert first.keys() == {NAMES[0]}
    assert last.keys() == {NAMES[1]}
    assert last[NAMES[1]] == (first[NAMES[0]][0], NAMES[0])
    for rank, held in enumerate(by_rank):
        assert held == by_rank[rank % stages], "replicas differ"


def test_on_one_rank_there_is_one_weight(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model(), tmp_path, steps=3, schedule="interleaved:chunks=2")
    (held,) = on_ranks(1, train_and_hash, tmp_path / "store", config)
    assert held.keys() == {NAMES[0]}
