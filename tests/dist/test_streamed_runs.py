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


def test_a_streamed_run_trains_alike_at_every_size_and_after_a_kill(tiny_model: TinyModel, tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl")
    model = tiny_model("gpt2", **DROPOUT, n_layer=4)
    data = DataConfig(sources=f"stream:{tmp_path / 'a.jsonl'}:0.6,demo:0.4", sequence=32, batch=6, seed=3, window=8)
    whole = dataclasses.replace(make_config(model, tmp_path / "one" / "run", "fp32", "none"), data=data)
    [trained] = on_ranks(1, train_ranks, tmp_path / "store-1", [whole])

    state = Checkpoint.open(checkpoint_of(whole, HALF)).run.streams[0]
    assert state is not None
    assert state.segment == 1  # half of the sequences are streamed: 12 of 24, in windows of 8
    assert state.position.offset

    grid = stopped_half_way(whole, tmp_path / "grid", stages=2)
    line = stopped_half_way(whole, tmp_path / "line", stages=4)
    by_rank = on_ranks(4, train_ranks, tmp_path / "store-4", [grid, line])
    for number, (config, pipelines) in enumerate([(grid, [0, 2]), (line, [0])]):
        parts = [by_rank[rank][number] for rank in pipelines]
        together = [
            (step, [sample for part in parts for sample in part[at][1]]) for at, (step, _) in enumerate(parts[0])
        ]
        assert together == trained[0][HALF:]
        assert losses_of(config) == pytest.approx(losses_of(whole), rel=RELATIVE)
