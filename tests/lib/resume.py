"""A run that is saved in the middle, stopped, and resumed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from acsgd import train
from acsgd.config.options import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
)
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session, StepResult
from acsgd.run.setup.inputs import open_inputs
from lib.cache import share_cache, with_shared_cache
from lib.patience import NO_LIMIT_S

STEPS, HALF = 6, 4
TIMEOUT = timedelta(seconds=NO_LIMIT_S)
TinyModel = Callable[..., Path]
Trained = list[tuple[int, list[int]]]
"""(step, sample ids) of every batch a rank trained on."""


def make_config(
    model: Path,
    run_dir: Path,
    dtype: Literal["fp32", "bf16", "fp16"],
    recompute: Literal["none", "layers"],
    rows: Literal["concat", "pack", "single"] = "concat",
) -> Config:
    """Return a run of STEPS steps with checkpoints after HALF of them and at the end."""
    return with_shared_cache(
        Config(
            model=ModelConfig(str(model), dtype=dtype, recompute=recompute),
            data=DataConfig(sources="demo", sequence=32, batch=6, seed=3, eval_fraction=0.0001, rows=rows),
            optim=OptimConfig(lr=1e-3, steps=STEPS, warmup=3, clip=0.5, weight_decay=0.1, loss_scale=2.0**15),
            pp=PipelineConfig(micro=2),
            checkpoint=CheckpointConfig(every=str(HALF)),
            log=LogConfig(dir=str(run_dir), to="jsonl"),
        )
    )


def train_ranks(rank: int, world_size: int, store: Path, configs: Sequence[Config], domains: str = "") -> list[Trained]:
    """Train each run on this rank, one after the other, and return the batches of each. domains: a letter per rank."""
    torch.set_num_threads(1)
    all_trained = []
    for number, config in enumerate(configs):
        trained: Trained = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "train_step", _recording(trained))
            of_rank = dataclasses.replace(
                config, dp=dataclasses.replace(config.dp, domain=domains[rank : rank + 1] or None)
            )
            job = prepare(of_rank, Launch(rank, rank, world_size))
            inputs = open_inputs(job)
            file_store = dist.FileStore(f"{store}-{number}", world_size)
            divides = config.dp.shard != "none"
            with connect(job.topology, timeout=TIMEOUT, store=file_store, domain=job.domain, divides=divides) as groups:
                train.train(job, inputs, groups, RunLock([]))
        all_trained.append(trained)
    return all_trained


def _recording(trained: Trained) -> Callable[..., StepResult]:
    train_step = train.train_step

    def recorded(session: Session, batch: Batch, progress: Progress, *args: Any, **options: Any) -> StepResult:
        trained.append((progress.step, batch.sample_ids.flatten().tolist()))
        return train_step(session, batch, progress, *args, **options)

    return recorded


def checkpoint_of(config: Config, step: int = STEPS) -> Path:
    """Return the path of a checkpoint, by default of the last one."""
    return Path(config.log.dir) / "checkpoints" / f"step-{step:08d}"


def losses_of(config: Config) -> list[float]:
    """Return the loss of each step, after checking that metrics.jsonl has each step once, in order."""
    records = [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def stopped_half_way(config: Config, run_dir: Path, **pp: Any) -> Config:
    """Copy a finished run as if it had been killed after step HALF + 1; return a config that resumes it.

    pp: options of the pipeline that differ in the resumed run.
    """
    run = run_dir / Path(config.log.dir).name
    share_cache(Path(config.model.name), run)
    (run / "checkpoints").mkdir(parents=True)
    shutil.copytree(checkpoint_of(config, HALF), run / "checkpoints" / f"step-{HALF:08d}")
    # metrics.jsonl is ahead of the checkpoint, and its last line is torn
    text = (Path(config.log.dir) / "metrics.jsonl").read_text()
    lines = text.splitlines(keepends=True)[: HALF + 1]
    (run / "metrics.jsonl").write_text("".join(lines) + f'{{"step": {HALF + 2}, "lo')
    return dataclasses.replace(
        config,
        pp=dataclasses.replace(config.pp, **pp),
        log=dataclasses.replace(config.log, dir=str(run)),
    )
