"""A run with activation caches on disk may lose a rank at any moment, and resumes with the entries both ends saved."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from pathlib import Path

from acsgd.config.options import CheckpointConfig, Config, EvalConfig, RunConfig
from tests.lib.cache import shared_model, with_shared_cache
from tests.lib.forks import LIMIT_S, checkpoints_of, make_config, started
from tests.lib.patience import stretched

STEPS = 60
STEPS_UNTIL_KILLED = 10
"""Long enough that each start reads every sequence before it is killed."""
RUN_TIMEOUT_S = stretched(6.0)
TEXT = "the quick brown fox jumps over the lazy dog, again and again and "


def newest(config: Config) -> int:
    return max(checkpoints_of(config).steps(), default=0)


def lose_second_rank(config: Config) -> None:
    """Start the run, and kill rank 1 after some steps."""
    found = newest(config)
    with started(config, 2) as run:
        while newest(config) < found + STEPS_UNTIL_KILLED and run.processes[0].is_alive():
            time.sleep(0.01)
        run.send(signal.SIGKILL, [1])
        limit_s = LIMIT_S + 10 * RUN_TIMEOUT_S  # rank 0 may wait ten times run.timeout for a save
        assert run.join(limit_s) == [1, -signal.SIGKILL], run.notes()


def test_run_that_loses_a_rank_resumes_with_its_activation_caches(tmp_path: Path) -> None:
    text = tmp_path / "little.txt"
    text.write_text(TEXT * 10)
    config = make_config(
        shared_model(tmp_path),
        tmp_path / "run",
        processes=2,
        steps=STEPS,
        checkpoint=CheckpointConfig(every="1", keep=2),
    )
    config = dataclasses.replace(
        with_shared_cache(config),
        run=RunConfig(timeout=RUN_TIMEOUT_S),
        eval=EvalConfig(),
        data=dataclasses.replace(config.data, sources=str(text), eval_fraction=0.1),
        pp=dataclasses.replace(config.pp, forward="delta:bits=4,cache=disk"),
    )
    epoch = math.ceil(len(text.read_bytes()) / config.data.sequence / config.data.batch)  # at most, in steps
    for _ in range(2):
        lose_second_rank(config)
    resumed_at = newest(config)
    assert resumed_at > epoch, "or no entry would be reused"
    with started(config, 2) as run:
        assert run.join() == [0, 0], run.notes()
        assert run.resumed_at() == resumed_at
    files = sorted(path.name.split(".", 1)[1] for path in (tmp_path / "run" / "activation-cache").rglob("block-*"))
    assert files == ["receiver.hidden", "sender.hidden"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    sent = [line["pp_forward_bytes"] for line in lines]
    misses, hits = sent[0], min(sent)
    assert hits < misses / 2
    # lost is what rank 1 had not written, at most two steps, and the steps by which rank 0 was ahead
    assert sum(sent[resumed_at : resumed_at + epoch]) < epoch * (hits + misses) / 2
    assert sent[-epoch - 1 : -1] == [hits] * epoch  # the evaluation after the last step sends, too
