"""Law: the two copies of a tied weight stay equal, bit for bit, on whichever ranks they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, make_config, train

from acsgd.config.options import Config
from acsgd.launch import Launch
from acsgd.run.build import build_session
from acsgd.run.inputs import open_weight_source
from acsgd.run.job import prepare
from acsgd.topology import connect

TinyModel = Callable[..., Path]
NAME = "transformer.wte.weight"


def train_and_hash(
    rank: int, world_size: int, store: Path, configs: Sequence[Config]
) -> list[dict[str, tuple[str, bool]]]:
    """Train each config; return its tied weights on this rank: key -> (hash, whether it is a copy)."""
    torch.set_num_threads(1)
    trained = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size))
        file_store = dist.FileStore(f"{store}-{number}", world_size)
        with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
            session = build_session(job, open_weight_source(job), groups)
            train(session, batches_of(job))
            trained.append(
                {
                    w.key: (hashlib.sha256(w.param.detach().numpy().tobytes()).hexdigest(), w.is_copy)
                    for w in session.weights
                    if w.is_tied
                }
            )
    return trained


def test_copies_on_two_ranks_stay_equal(tiny_model: TinyModel, tmp_path: Path) -> None:
    cuts = [(2, "1f1b"), (2, "interleaved"), (4, "gpipe")]
    configs = [
        make_config(tiny_model(n_layer=2), tmp_path, steps=4, stages=stages, schedule=schedule)
        for stages, schedule in cuts
    ]
    by_rank = on_ranks(4, train_and_hash, tmp_path / "store", configs)
    for (stages, schedule), *weights in zip(cuts, *by_rank, strict=True):
        first, last = weights[0], weights[stages - 1]
        assert first.keys() == last.keys() == {NAME}, schedule
        assert not first[NAME][1], schedule
        assert last[NAME] == (first[NAME][0], True), schedule
        for rank, of_rank in enumerate(weights):
            assert of_rank == weights[rank % stages], f"replicas differ: {schedule}"


def test_on_one_rank_there_is_one_weight(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model(n_layer=2), tmp_path, steps=3, schedule="interleaved:chunks=2")
    ((weights,),) = on_ranks(1, train_and_hash, tmp_path / "store", [config])
    assert weights.keys() == {NAME}
