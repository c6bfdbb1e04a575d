"""Law: a run that streams its source trains alike at every size, and after a resume without the segments on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from lib.corpora import write_records
from lib.models import DROPOUT
from lib.ranks import on_ranks
from lib.resume import HALF, TinyModel, checkpoint_of, losses_of, make_config, stopped_half_way, train_ranks
from lib.training import RELATIVE

from acsgd.config.options import DataConfig
from acsgd.io.checkpoint.resume import Checkpoint


@pytest.mark.parametrize(
    ("stages", "replicas"), [(2, 1), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, 2), (4, 1)))]
)
def test_a_streamed_run_trains_alike_at_every_size_and_after_a_kill(
    stages: int, replicas: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    write_records(tmp_path / "a.jsonl")
    model = tiny_model("gpt2", **DROPOUT, n_layer=4)
    data = DataConfig(sources=f"stream:{tmp_path / 'a.jsonl'}:0.6,demo:0.4", sequence=32, batch=6, seed=3, window=8)
    whole = dataclasses.replace(make_config(model, tmp_path / "one" / "run", "fp32", "none"), data=data)
    [trained] = on_ranks(1, train_ranks, tmp_path / "store-1", [whole])

    state = Checkpoint.open(checkpoint_of(whole, HALF)).run.streams[0]
    assert state is not None
    assert state.segment == 1  # half of the sequences are streamed: 12 of 24, in windows of 8
    assert state.position.offset

    config = stopped_half_way(whole, tmp_path / "resumed", stages=stages)
    by_rank = on_ranks(stages * replicas, train_ranks, tmp_path / "store", [config])
    parts = [by_rank[replica * stages][0] for replica in range(replicas)]
    together = [(step, [sample for part in parts for sample in part[at][1]]) for at, (step, _) in enumerate(parts[0])]
    assert together == trained[0][HALF:]
    assert losses_of(config) == pytest.approx(losses_of(whole), rel=RELATIVE)
