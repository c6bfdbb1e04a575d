"""Training runs on several ranks in which something goes wrong at a given step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

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
from acsgd.errors import RunError, WaitInterruptedError
from acsgd.groups import connect
from acsgd.io.checkpoint import saver
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.io.data.batches import BatchReader
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.optim.gradient_scale import LossScale
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import prepare
from acsgd.run.report import Report
from acsgd.run.session import Session, StepResult
from acsgd.run.setup.inputs import open_inputs
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.run import TrainingRun
from acsgd.run.step.spikes import SKIP
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import Manifest, StoredFile
from lib.cache import with_shared_cache
from lib.patience import NO_LIMIT_S
from lib.saved import rewrite_tensors

TIMEOUT = timedelta(seconds=NO_LIMIT_S)
STEPS = 24
RARE_TOKEN = 511
"""A token that hardly occurs in the text."""


class Step(NamedTuple):
    """One step as a rank ran it."""

    step: int
    updated: bool
    scale: float
    """Loss scale of the step."""
    samples: list[list[int]]
    """Sample ids of each micro-batch of this replica."""


class Outcome(NamedTuple):
    """What one rank observed of a run."""

    steps: list[Step]
    error: str | None
    notes: list[str]
    saved: list[int]
    """Steps of the checkpoints at the end."""


class Plan(NamedTuple):
    """A run and its disturbances. Steps count from 0."""

    config: Config
    garbled: frozenset[int] = frozenset()
    """Steps whose labels are all RARE_TOKEN."""
    skipped: frozenset[int] = frozenset()
    """Steps whose update is skipped."""
    scale: tuple[int, float] | None = None
    """A step, and the fp16 loss scale from there on."""
    skip_overflows_of: int | None = None
    """Index of an earlier plan: skip the updates before its first, and continue with its loss scale."""
    nan: tuple[int, int, str] | None = None
    """Step, rank and module whose output is NaN."""
    gone: frozenset[int] = frozenset()
    """Steps whose checkpoints are removed before a rollback."""
    invalid: frozenset[int] = frozenset()
    """Steps whose checkpoints have NaN in a weight of the last layer, though all hashes match, from a rollback on."""
    interrupted: frozenset[int] = frozenset()
    """Steps after whose update the loop is interrupted once, and starts again from its state, as in a new view."""
    saves_after_nan: bool = False
    """Whether the writing of a checkpoint waits until loss or gradients are not finite."""


def run_ranks(rank: int, world_size: int, store: Path, plans: Sequence[Plan]) -> list[Outcome]:
    """Run this rank's part of each plan, one after the other."""
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    for number, plan in enumerate(plans):
        if plan.skip_overflows_of is not None:
            first = next(step for step in outcomes[plan.skip_overflows_of].steps if step.updated)
            plan = plan._replace(skipped=frozenset(range(first.step)), scale=(first.step, first.scale))
        steps: list[Step] = []
        notes: list[str] = []
        error = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "train_step", _recording(plan, steps))
            patch.setattr(train, "run_steps", _starting_again(patch, plan.interrupted))
            patch.setattr(BatchReader, "batch", _garbling(plan.garbled))
            patch.setattr("acsgd.io.telemetry.metrics.Metrics.note", lambda _, text, notes=notes: notes.append(text))
            if plan.nan is not None and plan.nan[1] == rank:
                patch.setattr(Stage, "forward", _planting_nan(plan.nan[0], plan.nan[2]))
            if plan.gone or plan.invalid:
                patch.setattr(Checkpointing, "newest_checkpoint", _damaging(plan))
            if plan.saves_after_nan:
                _delay_writes_until_nan(patch)
            job = prepare(plan.config, Launch(rank, rank, world_size))
            inputs = open_inputs(job)
            file_store = dist.FileStore(f"{store}-{number}", world_size)
            with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
                try:
                    train.train(job, inputs, groups, RunLock([]))
                except RunError as failure:
                    error = str(failure)
                saved = checkpoints_of(plan.config).steps()
        outcomes.append(Outcome(steps, error, notes, saved))
    return outcomes


def _recording(plan: Plan, recorded: list[Step]) -> Callable[..., StepResult]:
    """Return a train_step that records each step, and skips the updates of the steps that the plan lists."""
    train_step = train.train_step

    def recording(session: Session, batch: Batch, progress: Progress, votes: Report, **options: Any) -> StepResult:
        step = progress.step
        if plan.scale is not None and plan.scale[0] == step:
            progress = dataclasses.replace(progress, loss_scale=LossScale(plan.scale[1], dynamic=True))
        recorded.append(Step(step, False, progress.loss_scale.value, batch.sample_ids.tolist()))
        votes = {**votes, SKIP: votes[SKIP] or step in plan.skipped}
        result = train_step(session, batch, progress, votes, **options)
        recorded[-1] = recorded[-1]._replace(updated=result.updated)
        return result

    return recording


def _starting_again(patch: pytest.MonkeyPatch, interrupted: frozenset[int]) -> Callable[..., None]:
    """Return a run_steps that an exception ends after some steps, and that starts again from the state it has left."""
    run_steps, train_step, left = train.run_steps, train.train_step, set(interrupted)

    def ending(session: Session, batch: Batch, progress: Progress, *args: Any, **options: Any) -> StepResult:
        result = train_step(session, batch, progress, *args, **options)
        if progress.step in left:
            left.remove(progress.step)
            raise WaitInterruptedError("the view has ended")
        return result

    def starting_again(run: TrainingRun) -> None:
        while True:
            with contextlib.suppress(WaitInterruptedError):
                return run_steps(run)

    patch.setattr(train, "train_step", ending)
    return starting_again


def _garbling(garbled: frozenset[int]) -> Callable[[BatchReader, int, range | None], Batch]:
    read = BatchReader.batch

    def batch(reader: BatchReader, step: int, micros: range | None = None) -> Batch:
        made = read(reader, step, micros)
        if step in garbled and made.labels is not None:
            made.labels.fill_(RARE_TOKEN)
        return made

    return batch


def _planting_nan(at_step: int, module: str) -> Callable[..., Any]:
    """Return a Stage.forward in which the output of a module is NaN in one step, however often that is run."""
    forward, hooked, now = Stage.forward, set[int](), -1

    def hook(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if now == at_step else output

    def planted(stage: Stage, micro: MicroBatch, *args: Any, **options: Any) -> Any:
        nonlocal now
        now = micro.step
        if id(stage) not in hooked:  # at the first step, so that it runs before the hooks of a diagnosis
            hooked.add(id(stage))
            stage.composed.model.get_submodule(module).register_forward_hook(hook)
        return forward(stage, micro, *args, **options)

    return planted


def _damaging(plan: Plan) -> Callable[[Checkpointing, int], Checkpoint | None]:
    """Return a `newest_checkpoint` before which rank 0 damages checkpoints."""
    newest_checkpoint, directory = Checkpointing.newest_checkpoint, checkpoints_of(plan.config)

    def set_nan(tensors: dict[str, torch.Tensor]) -> None:
        next(tensor for key, tensor in tensors.items() if "/" not in key).view(-1)[0] = torch.nan

    def damaging(checkpointing: Checkpointing, step: int) -> Checkpoint | None:
        checkpointing.finish_save(wait=True)
        if dist.get_rank() == 0:
            for each in plan.gone:
                shutil.rmtree(directory.of(each), ignore_errors=True)
            for each in plan.invalid:
                if directory.of(each).is_dir():
                    rewrite_tensors(directory.of(each) / "head.safetensors", set_nan)
        dist.barrier()
        return newest_checkpoint(checkpointing, step)

    return damaging


def _delay_writes_until_nan(patch: pytest.MonkeyPatch) -> None:
    """Let each rank write the layers of its checkpoints only after it has found the origin of NaN."""
    write, explain, found = saver.write_layer, Session.explain_non_finite, threading.Event()

    def delayed(*args: Any) -> StoredFile:
        assert found.wait(TIMEOUT.total_seconds())
        return write(*args)

    def explaining(session: Session, *args: Any, **options: Any) -> str:
        text = explain(session, *args, **options)
        found.set()
        return text

    patch.setattr(saver, "write_layer", delayed)
    patch.setattr(Session, "explain_non_finite", explaining)


def make_config(
    model: Path, run_dir: Path, *, stages: int = 1, dtype: Any = "fp32", every: str = "10", **optim: Any
) -> Config:
    """Return a run of STEPS steps; optim: overrides options of [optim]."""
    return with_shared_cache(
        Config(
            model=ModelConfig(str(model), dtype=dtype),
            data=DataConfig(sources="demo", sequence=32, batch=4, seed=3),
            optim=OptimConfig(**{"lr": 3e-2, "steps": STEPS, "clip": 0.5} | optim),
            pp=PipelineConfig(stages=stages, micro=2),
            checkpoint=CheckpointConfig(every=every),
            log=LogConfig(dir=str(run_dir), to="jsonl"),
        )
    )


def records_of(config: Config) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; each step must be there once, in order."""
    records = [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, config.optim.steps + 1))
    return records


def checkpoints_of(config: Config) -> CheckpointDirectory:
    """Return the directory of a run's checkpoints."""
    return CheckpointDirectory(Path(config.log.dir) / "checkpoints")


def end_of(config: Config) -> Manifest:
    """Return the manifest of the last checkpoint, which must be valid; it has the hashes of all layers."""
    shards = ShardDirectory(checkpoints_of(config).of(config.optim.steps))
    assert not list(shards.corrupt_files())
    return shards.manifest


def progress_of(config: Config) -> Any:
    """Return the progress in the manifest of the last checkpoint."""
    run = end_of(config).run
    assert run is not None
    return run["progress"]


def assert_same_end(one: Config, other: Config) -> None:
    """Check that two runs end with the same weights and moments, bit for bit, and the same progress and losses."""
    assert end_of(one).layers == end_of(other).layers
    assert progress_of(one) == progress_of(other)
    assert [record["loss"] for record in records_of(one)] == [record["loss"] for record in records_of(other)]
