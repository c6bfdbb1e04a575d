"""Runs some of whose parameters are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from acsgd.config.options import Config
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.report import PP_BACKWARD_BYTES, TIED_BYTES
from acsgd.run.setup.build import build_session
from acsgd.train import train_step
from lib.training import TIMEOUT, batches_of


class Outcome(NamedTuple):
    """What a rank did in a run."""

    losses: list[float]
    backward_bytes: float
    """Bytes of activation gradients that all ranks have sent."""
    tied_bytes: float
    """Bytes for tied weights that all ranks have sent."""
    moved: list[str]
    """Frozen parameters of this rank whose bits have changed, or that have a gradient."""
    updated: set[str]
    """Parameters of this rank with optimizer state."""


def train_rank(rank: int, world_size: int, store: Path, configs: list[Config]) -> list[Outcome]:
    """Train each config on this rank."""
    torch.set_num_threads(1)
    return [_train(rank, world_size, Path(f"{store}-{number}"), config) for number, config in enumerate(configs)]


def _train(rank: int, world_size: int, store: Path, config: Config) -> Outcome:
    job = prepare(config, Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        session = build_session(job, open_weight_source(job), groups)
        layers = [layer for stage in session.stages.values() for layer in stage.layers]
        model, frozen = next(iter(session.stages.values())).composed.model, {*job.model.description.frozen}
        own = {key: model.get_parameter(key) for layer in layers for key in layer.spec.parameters if key in frozen}
        before = {key: param.detach().clone() for key, param in own.items()}
        progress, results = Progress(), []
        for batch in batches_of(job):
            results.append(train_step(session, batch, progress))
            progress = results[-1].progress
        moved = [key for key, param in own.items() if not torch.equal(param, before[key]) or param.grad is not None]
        state = session.optimizer.state_of(session.weights)
        sent = sum(result.summary[PP_BACKWARD_BYTES] for result in results)
        return Outcome(
            [result.loss for result in results],
            sent,
            sum(result.summary[TIED_BYTES] for result in results),
            moved,
            {key for each in state.values() for key in each},
        )
