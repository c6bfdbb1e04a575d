"""`acsgd eval` under torchrun: the metrics of stages and replicas are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from acsgd.evaluation import command
from acsgd.launch import Launch
from tests.lib.launched import TORCHRUN, running

LIMIT_S = 120.0


def test_stages_and_replicas_find_what_one_process_finds(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is one JSON object, whatever the number of ranks."""
    (tmp_path / "text.txt").write_text("The statement of the list is a statement.\n" * 70)
    data = ["--data", str(tmp_path / "text.txt"), "--sequence", "32", "--cache", str(tmp_path / "runs" / "cache")]
    command.main([str(tiny_model()), *data, "--json", "--micro", "4"], Launch(), prog="acsgd eval")
    one = json.loads(capsys.readouterr().out)
    flags = [*data, "--json", "--micro", "3", "--stages", "2"]
    with running([*TORCHRUN, "4", "-m", "acsgd", "eval", str(tiny_model()), *flags], tmp_path) as run:
        assert run.process.wait(LIMIT_S) == 0, run.stderr
        four = json.loads(run.stdout)
    assert four["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    assert four["sequences"] == one["sequences"] > 10
