"""Law: a run whose links remember on disk may lose a rank at any moment, and goes on with what both ends have kept."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
from pathlib import Path

import pytest
import test_crash
from test_crash import Started
from test_ends import Run

from acsgd.config.options import CheckpointConfig, EvalConfig
from tests.lib.forks import make_config, save_model

STEPS = 100
TEXT = "the quick brown fox jumps over the lazy dog, again and again and "


def kill_second_rank(run: Run) -> None:
    os.kill(run.ranks()[1], signal.SIGKILL)


def test_a_run_with_memory_on_disk_that_loses_a_rank_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_crash, "MORE", 10)  # so that each start visits every sequence before its end
    text = tmp_path / "little.txt"
    text.write_text(TEXT * 10)
    config = make_config(
        save_model(tmp_path / "model"), tmp_path / "calm", processes=2, steps=STEPS, checkpoint=CheckpointConfig()
    )
    config = dataclasses.replace(
        config,
        eval=EvalConfig(),
        data=dataclasses.replace(config.data, sources=str(text), eval_fraction=0.1),
        pp=dataclasses.replace(config.pp, forward="delta:bits=4,cache=disk"),
    )
    starts = Started(config, 2, tmp_path)
    epoch = math.ceil(len(text.read_bytes()) / config.data.sequence / config.data.batch)  # or less, in steps
    for _ in range(2):
        code, _, err = starts.end(kill_second_rank)
        assert code == 1
        assert "SIGKILL" in err or "-9" in err
    began_at = starts.newest
    code, out, err = starts.end(lambda run: run.process.wait(60))
    assert code == 0, err
    assert "Traceback" not in out + err
    files = sorted(path.name.split(".", 1)[1] for path in (tmp_path / "run" / "activation-cache").rglob("block-*"))
    assert files == ["receiver.hidden", "sender.hidden"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    sent = [line["pp_forward_bytes"] for line in lines]
    whole, known = sent[0], min(sent)
    assert known < whole / 2
    assert began_at > epoch, "or there would be nothing to go on with"
    # lost is what rank 1 had not written: two steps at most, and what rank 0 was ahead of it, of nine
    assert sum(sent[began_at : began_at + epoch]) < epoch * (known + whole) / 2
    assert sent[-epoch - 1 : -1] == [known] * epoch  # after the last step an evaluation may have sent some, too
