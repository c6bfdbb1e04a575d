"""Law: a run that is interrupted at any moments and started again equals the undisturbed run."""

from __future__ import annotations

import dataclasses
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from acsgd.config.options import CheckpointConfig
from acsgd.config.run_file import to_toml
from acsgd.errors import RunError
from acsgd.io.checkpoint import saver
from acsgd.run.session import Session
from tests.lib.cache import shared_model, with_shared_cache
from tests.lib.crashes import Campaign, summary
from tests.lib.forked_torchrun import Host, forked_torchrun
from tests.lib.forks import checkpoints_of, finish, make_config, started
from tests.lib.injection import Pace
from tests.lib.launched import MARGIN_S, TRAIN

STEPS = 40


@pytest.mark.parametrize(("processes", "kills"), [(2, 2)])
def test_a_run_that_is_killed_repeatedly_equals_the_undisturbed_one(processes: int, kills: int, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, processes, seed=processes, steps=STEPS)
    campaign.run(kills)
    result = summary(campaign, 0.0)
    assert result["kills"] == kills
    assert result["runs_finished_and_equal"] >= 1


def test_a_run_that_is_stopped_repeatedly_equals_the_undisturbed_one(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, 2, signal.SIGTERM, steps=STEPS)
    for number in (signal.SIGUSR1, signal.SIGINT):
        campaign.interrupt(number)
    campaign.run(2)
    assert summary(campaign, 0.0)["leftovers"] == 0


def test_a_torchrun_that_is_ended_saves_and_resumes_to_the_undisturbed_run(tmp_path: Path) -> None:
    """torchrun receives SIGTERM and forwards it to its ranks."""
    rarely, often = CheckpointConfig(best="eval_loss"), CheckpointConfig(every="1", keep=2, best="eval_loss")
    model = shared_model(tmp_path)
    undisturbed = make_config(model, tmp_path / "undisturbed", processes=2, steps=STEPS, checkpoint=rarely)
    with_shared_cache(undisturbed)
    expected = finish(undisturbed, 2)
    config = make_config(model, tmp_path / "run", processes=2, steps=STEPS, checkpoint=often)
    printing = dataclasses.replace(config, log=dataclasses.replace(config.log, to="print,jsonl"))
    (tmp_path / "run.toml").write_text(to_toml(printing))
    arguments = ["--standalone", "--nproc-per-node", "2", TRAIN, "run.toml"]
    with forked_torchrun(Host(arguments, {"OMP_NUM_THREADS": "1"}, tmp_path, worker=Pace(0.05))) as run:
        run.wait_until(lambda: run.exit_code is not None or len(checkpoints_of(config).steps()) >= 2, 120)
        run.signal(signal.SIGTERM)
        code = run.wait(MARGIN_S)
        assert not run.pids()
        newest = max(checkpoints_of(config).steps())
        assert f"stopped after step {newest} of {STEPS} on SIG" in run.stdout
        assert run.stdout.endswith(f"resumes from {checkpoints_of(config).of(newest)}\n")
        assert not run.errors
        assert code == 1
        assert "SignalException" in run.stderr, "torchrun itself exits with an exception"
    assert finish(config, 2) == expected


def fail_while_saving(rank: int) -> None:
    """Patch this process to raise in step 4 while a save is stuck in native code, where Python aborts if it exits."""
    writing, train_forward = threading.Event(), Session.forward_backward

    def write_forever(*_: Any) -> None:
        writing.set()
        store = dist.HashStore()
        while True:
            store.check(["nothing"])

    def fail(self: Session, batch: Any, step: int, *args: Any) -> Any:
        if step == 3:
            writing.wait()
            raise RunError("a failure of the network")
        return train_forward(self, batch, step, *args)

    saver.write_layer = write_forever  # type: ignore[assignment]
    Session.forward_backward = fail  # type: ignore[method-assign]


def test_a_run_that_fails_during_a_save_ends_with_its_error_alone(tmp_path: Path) -> None:
    model, every = shared_model(tmp_path), CheckpointConfig(every="3")
    config = make_config(model, tmp_path / "run", processes=1, steps=STEPS, checkpoint=every)
    with_shared_cache(config)
    with started(config, 1, setup=fail_while_saving) as run:
        assert run.join() == [1]
        assert run.stderr.strip() == "error: a failure of the network"
    assert checkpoints_of(config).steps() == []
    (leftover,) = checkpoints_of(config).leftovers()
    assert re.fullmatch(r"\.step-00000003\.[0-9a-f]{8}\.partial", leftover.name)
