"""Law: a rank that needs no tokens opens no source, and trains as if it had."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

import pytest
from lib.cache import with_shared_cache
from lib.forks import make_config, result_of, save_model, started

from acsgd.config.options import CheckpointConfig, PipelineConfig
from acsgd.run.setup import rows as rows_module

STAGES = 4


def middle_without_data(rank: int) -> None:
    """End a rank in the middle that opens a source."""

    def opened(*args: Any, **options: Any) -> NoReturn:
        raise AssertionError("a middle stage opens a source")

    if 0 < rank < STAGES - 1:
        rows_module.open_tokens = opened


def test_a_middle_stage_opens_no_source(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", blocks=2)
    results = []
    for stages in (1, STAGES):
        checkpoint = CheckpointConfig(every="4")
        config = make_config(model, tmp_path / f"run-{stages}", processes=stages, steps=4, checkpoint=checkpoint)
        config = with_shared_cache(dataclasses.replace(config, pp=PipelineConfig(stages=stages, micro=2)))
        with started(config, stages, setup=middle_without_data) as run:
            assert run.join() == [0] * stages, run.stderr
        results.append(result_of(config))
    one, four = results
    losses = [[loss for step in each.losses for loss in step if loss is not None] for each in results]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert one.run is not None
    assert four.run is not None
    assert one.run["identity"] == four.run["identity"]
