"""What a worker does on its own when the view changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig
from acsgd.elastic.worker import open_metrics
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.record import Record
from acsgd.run.loop_state import LoopState


def record(step: int) -> Record:
    return Record(step, 1.0, 10 * step, 1.0, 1.0, 1e-3, 1.0, 0, 0, 0, 1.0, 0)


@pytest.mark.parametrize("num_logged", [2, 3])
def test_a_new_rank_0_logs_the_last_step_unless_the_rank_0_before_has(tmp_path: Path, num_logged: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record(step).numbers()) + "\n" for step in range(1, num_logged + 1)))
    config = Config(
        ModelConfig("m"),
        DataConfig("demo", 8, 2),
        OptimConfig(lr=1e-3, steps=9),
        log=LogConfig(dir=str(tmp_path), to="jsonl"),
    )
    state = LoopState(Progress(step=3), is_elastic=True, record=record(3))
    with open_metrics(config, state) as metrics:
        metrics.log(record(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
