"""Law: a slow rank is named, and gets fewer micro-batches, and the losses are those of equal ranks."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from lib.forks import make_config, save_model, started
from lib.patience import stretched
from lib.training import RELATIVE, oracle_losses

from acsgd.config.options import CheckpointConfig, EvalConfig, LogConfig, PipelineConfig
from acsgd.pp.stage import Stage
from acsgd.run.step.pace import PATIENCE

STEPS = PATIENCE + 2
SLEEP_S = stretched(0.2)
"""Several times as long as a micro-batch of this model takes."""


def slow_down(rank: int) -> None:
    """Let rank 1 sleep in each forward."""
    if rank == 1:
        forward = Stage.forward

        def slow_forward(*args: object, **options: object) -> object:
            time.sleep(SLEEP_S)
            return forward(*args, **options)  # type: ignore[arg-type]

        Stage.forward = slow_forward  # type: ignore[method-assign,assignment]


def test_a_slow_rank_is_named_and_relieved_without_a_change_of_the_losses(tmp_path: Path) -> None:
    config = make_config(
        save_model(tmp_path / "model"), tmp_path / "run", processes=1, steps=STEPS, checkpoint=CheckpointConfig()
    )
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch=8, deal="speed"),
        pp=PipelineConfig(micro=1),
        eval=EvalConfig(),
        log=LogConfig(str(tmp_path / "run"), to="jsonl,print"),
    )
    with started(config, 2, setup=slow_down) as run:
        assert run.join() == [0, 0], run.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "step" in line]
    alone = dataclasses.replace(config, log=LogConfig(dir=str(tmp_path / "oracle" / "run")))
    assert losses == pytest.approx(oracle_losses(alone), rel=RELATIVE)
    deals = [line["micros"] for line in lines if line.get("event") == "deal"]
    assert deals
    assert all(sum(micros) == 8 and micros[1] < 4 for micros in deals)
    (named,) = [line for line in lines if line.get("event") == "slow_rank"]
    assert (named["rank"], named["after_step"]) == (1, PATIENCE)
    assert named["factor"] > 2
