"""Law: a rank that has reported a step completes it alone, from the summary that another rank has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.training import RELATIVE, TIMEOUT, batches_of, make_config, oracle_losses

from acsgd import train
from acsgd.config.options import Config, ReplicaConfig
from acsgd.errors import WaitInterruptedError
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.report import StepSummary
from acsgd.run.setup.build import build_session
from acsgd.run.step.hooks import LoopState

STEPS, INTERRUPTED = 4, 1


def train_with_an_interrupt(rank: int, world_size: int, store: Path, config: Config) -> list[float]:
    """Train; the last rank is interrupted in a step that the others complete, and completes it alone."""
    torch.set_num_threads(1)
    job, losses = prepare(config, Launch(rank, rank, world_size)), list[float]()
    file_store = dist.FileStore(str(store), world_size)
    state, is_late = LoopState(Progress()), rank == world_size - 1
    with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
        session = build_session(job, open_weight_source(job), groups)
        for step, batch in enumerate(batches_of(job)):
            with pytest.MonkeyPatch.context() as patch:
                if is_late and step == INTERRUPTED:
                    patch.setattr(train, "apply_step", interrupted)
                    with pytest.raises(WaitInterruptedError):
                        train.train_step(session, batch, state.progress, state=state)
                else:
                    train.train_step(session, batch, state.progress, state=state)
            if step == INTERRUPTED and not is_late:
                assert state.summary is not None
                file_store.set(f"summary of {rank}", json.dumps(state.summary.numbers))
            elif step == INTERRUPTED:
                assert (state.progress.step, state.has_reported) == (step, True)
                summary = StepSummary(json.loads(file_store.get("summary of 0")))
                state.complete(train.apply_step(session, None, state.progress, summary), is_synced=False)
                session.sync_alone(step)
            assert (state.progress.step, state.has_reported) == (step + 1, False)
            assert state.record is not None
            assert state.record.loss is not None
            losses.append(state.record.loss)
    return losses


def interrupted(*args: object, **options: object) -> None:
    raise WaitInterruptedError("another view follows")


@pytest.mark.parametrize("mode", ["allreduce", "sharded_ps", "central_ps"])
def test_a_rank_that_is_behind_completes_the_step_alone(
    mode: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(
        make_config(tiny_model(n_layer=2), tmp_path, steps=STEPS, stages=2, micro=2), dp=ReplicaConfig(mode)
    )
    expected = pytest.approx(oracle_losses(config), rel=RELATIVE)
    for losses in on_ranks(4, train_with_an_interrupt, tmp_path / "store", config):
        assert losses == expected
