"""Law: a batch that spoils the training is a batch that was never learnt from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from test_same_training import DROPOUT

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
from acsgd.errors import RunError
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.progress import RECENT, Progress
from acsgd.io.sampling.batches import Batch, Reader
from acsgd.optim.loss_scale import LossScale
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.run.inputs import open_inputs
from acsgd.run.job import prepare
from acsgd.run.lock import RunLock
from acsgd.run.session import Session, StepResult
from acsgd.shards.disk import Manifest, ShardDirectory
from acsgd.topology import Launch, connect

TIMEOUT = timedelta(seconds=120)
STEPS = 24
NEVER = 511
"""A token that the text hardly has."""
FACTOR = 1.2
"""What a loss is a spike by."""
TOPOLOGIES = [(1, 1), (2, 1), (1, 2)]
"""Stages, replicas."""

TinyModel = Callable[..., Path]


class Plan(NamedTuple):
    """A run, and what goes wrong in it; steps count from 0."""

    config: Config
    garbled: frozenset[int] = frozenset()
    """Steps whose labels are nonsense."""
    left_out: frozenset[int] = frozenset()
    """Steps whose update is left out."""
    scale: tuple[int, float] | None = None
    """A step, and fp16's loss scale from there on."""
    nan: tuple[int, int, str] | None = None
    """Step, rank and module whose output is NaN."""


class Step(NamedTuple):
    """What a rank knows of a step it made."""

    step: int
    updated: bool
    scale: float
    """The loss scale in it."""
    samples: list[list[int]]
    """By micro-batch of this replica."""


class Told(NamedTuple):
    """What one rank has seen of a run."""

    steps: list[Step]
    error: str | None
    notes: list[str]


def run_ranks(rank: int, world_size: int, store: Path, plans: Sequence[Plan]) -> list[Told]:
    """Make this rank's part of each run, one after the other."""
    torch.set_num_threads(1)
    all_told = []
    for number, plan in enumerate(plans):
        steps: list[Step] = []
        notes: list[str] = []
        error = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "train_step", _noting(plan, steps))
            patch.setattr(Reader, "batch", _garbling(plan.garbled))
            patch.setattr("acsgd.io.telemetry.metrics.Metrics.note", lambda _, text, notes=notes: notes.append(text))
            if plan.nan is not None and plan.nan[1] == rank:
                patch.setattr(Stage, "forward", _spoiling(plan.nan[0], plan.nan[2]))
            job = prepare(plan.config, Launch(rank, rank, world_size))
            inputs = open_inputs(job)
            file_store = dist.FileStore(f"{store}-{number}", world_size)
            with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
                try:
                    train.train(job, inputs, groups, RunLock([]))
                except RunError as failure:
                    error = str(failure)
        all_told.append(Told(steps, error, notes))
    return all_told


def _noting(plan: Plan, made: list[Step]) -> Callable[..., StepResult]:
    """Return a step that is noted, and whose update is left out where the plan says so."""
    train_step = train.train_step

    def noted(worker: Session, batch: Batch, progress: Progress, *args: Any, update: bool = True) -> StepResult:
        step = progress.step
        if plan.scale is not None and plan.scale[0] == step:
            progress = dataclasses.replace(progress, loss_scale=LossScale(plan.scale[1], dynamic=True))
        made.append(Step(step, False, progress.loss_scale.value, batch.sample_ids.tolist()))
        result = train_step(worker, batch, progress, *args, update=update and step not in plan.left_out)
        made[-1] = made[-1]._replace(updated=result.updated)
        return result

    return noted


def _garbling(garbled: frozenset[int]) -> Callable[[Reader, int], Batch]:
    read = Reader.batch

    def batch(reader: Reader, step: int) -> Batch:
        made = read(reader, step)
        if step in garbled and made.labels is not None:
            made.labels.fill_(NEVER)
        return made

    return batch


def _spoiling(at_step: int, module: str) -> Callable[..., Any]:
    """Return a forward of a stage in which, at one step, the output of a module is NaN, however often it is made."""
    forward, hooked, now = Stage.forward, set[int](), -1

    def spoil(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if now == at_step else output

    def spoilt(stage: Stage, micro: MicroBatch, *args: Any, **options: Any) -> Any:
        nonlocal now
        now = micro.step
        if id(stage) not in hooked:  # once, at the first step, so that it comes before the hooks of a search
            hooked.add(id(stage))
            stage.model.get_submodule(module).register_forward_hook(spoil)
        return forward(stage, micro, *args, **options)

    return spoilt


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("gpt2", **DROPOUT, n_layer=2, n_embd=16)


def make_config(
    model: Path, run_dir: Path, *, stages: int = 1, dtype: Any = "fp32", every: str = "10", **optim: Any
) -> Config:
    return Config(
        model=ModelConfig(str(model), dtype=dtype),
        data=DataConfig(sources="demo", sequence=32, batch=4, seed=3),
        optim=OptimConfig(**{"lr": 3e-2, "steps": STEPS, "clip": 0.5} | optim),
        pp=PipelineConfig(stages=stages, micro=1),
        checkpoint=CheckpointConfig(every=every),
        log=LogConfig(dir=str(run_dir), to="jsonl"),
    )


def records_of(config: Config) -> list[dict[str, Any]]:
    """Return the line of each step, having checked that each is there once, in order."""
    records = [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, config.optim.steps + 1))
    return records


def checkpoints_of(config: Config) -> CheckpointDirectory:
    return CheckpointDirectory(Path(config.log.dir) / "checkpoints")


def end_of(config: Config) -> Manifest:
    """Return the manifest of the last checkpoint, which must be sound: it has the hash of all layers."""
    shards = ShardDirectory(checkpoints_of(config).of(config.optim.steps))
    assert not list(shards.corrupt_files())
    return shards.manifest


def assert_same_end(one: Config, other: Config) -> None:
    """Check that two runs have ended with the same weights and moments, bit for bit, and the same progress."""
    assert end_of(one).layers == end_of(other).layers
    assert end_of(one).run == end_of(other).run
    assert [record["loss"] for record in records_of(one)] == [record["loss"] for record in records_of(other)]


SPIKES = (18, 19, 21)
MADE = [*range(19), *range(10, 20), *range(10, 22), *range(20, STEPS)]
"""The steps that are made, if it is saved after 10 and 20 of them."""


@pytest.mark.parametrize(("stages", "replicas"), TOPOLOGIES)
def test_a_spike_sends_the_run_back_and_past_the_batch(stages: int, replicas: int, model: Path, tmp_path: Path) -> None:
    dtype = "bf16" if replicas == 2 else "fp32"
    options: dict[str, Any] = {"stages": stages, "dtype": dtype}
    spiking = make_config(model, tmp_path / "runs" / "spiking", spike=FACTOR, **options)
    simple = make_config(model, tmp_path / "runs" / "left-out", **options)
    spikes = frozenset(SPIKES)
    plans = [Plan(spiking, garbled=spikes), Plan(simple, garbled=spikes, left_out=spikes)]
    by_rank = on_ranks(stages * replicas, run_ranks, tmp_path / "store", plans)
    for told in by_rank:
        assert [step.step for step in told[0].steps] == MADE
        assert [step.step for step in told[1].steps] == list(range(STEPS))
    assert_same_end(spiking, simple)
    assert records_of(spiking)[-1]["skipped"] == len(SPIKES)
    notes = [note for note in by_rank[0][0].notes if "is a spike" in note]
    for note, spike, goal in zip(notes, SPIKES, (10, 10, 20), strict=True):
        assert note.startswith(f"step {spike + 1}: loss ")
        assert f"restored {checkpoints_of(spiking).of(goal)}" in note


def test_what_was_learnt_from_a_spike_would_have_mattered(model: Path, tmp_path: Path) -> None:
    """The runs that are compared above are not equal for want of a spike."""
    plans = [
        Plan(make_config(model, tmp_path / "runs" / "learnt"), garbled=frozenset({18})),
        Plan(make_config(model, tmp_path / "runs" / "left-out"), garbled=frozenset({18}), left_out=frozenset({18})),
        Plan(make_config(model, tmp_path / "runs" / "calm", spike=FACTOR)),
        Plan(make_config(model, tmp_path / "runs" / "early", spike=FACTOR), garbled=frozenset({RECENT - 1})),
        Plan(make_config(model, tmp_path / "runs" / "unsaved", spike=FACTOR, every="20"), garbled=frozenset({18})),
    ]
    (told,) = on_ranks(1, run_ranks, tmp_path / "store", plans)
    learnt, left_out = (plan.config for plan in plans[:2])
    losses = [record["loss"] for record in records_of(learnt)]
    assert losses[18] > FACTOR * sum(losses[2:18]) / RECENT
    assert end_of(learnt).layers != end_of(left_out).layers
    for number in (2, 3, 4):  # no spike; too early to be measured; no checkpoint to go back to
        assert [step.step for step in told[number].steps] == list(range(STEPS))
        assert all(step.updated for step in told[number].steps)


AT = 5
"""The step whose loss is NaN."""
MODULE = "transformer.h.1.mlp.c_fc"
"""The module of the last stage whose output is."""


@pytest.mark.parametrize(("stages", "replicas"), TOPOLOGIES)
def test_nan_ends_the_run_names_its_origin_and_leaves_checkpoints_alone(
    stages: int, replicas: int, model: Path, tmp_path: Path
) -> None:
    world_size = stages * replicas
    whole = make_config(model, tmp_path / "runs" / "whole", stages=stages, steps=8, every="2")
    by_rank = on_ranks(world_size, run_ranks, tmp_path / "whole", [Plan(whole)])
    config = make_config(model, tmp_path / "runs" / "nan", stages=stages, steps=8, every="2")
    directory = checkpoints_of(config)
    for step in (2, 4):
        shutil.copytree(checkpoints_of(whole).of(step), directory.of(step))
    before = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
    at_rank = world_size - 1
    plan = Plan(config, nan=(AT, at_rank, MODULE))
    again = on_ranks(world_size, run_ranks, tmp_path / "nan", [plan])
    samples = by_rank[at_rank][0].steps[AT].samples[0]
    micro = 0 if replicas == 1 else 2
    for told in again:
        assert [step.step for step in told[0].steps] == [4, AT]
        error = told[0].error
        assert error is not None
        assert error.startswith(f"step {AT + 1}: loss nan, gradient norm nan; first in output of {MODULE} (nan; ")
        assert f"(nan; forward, stage {stages - 1}, micro-batch {micro}), samples {samples};" in error
        assert error == again[0][0].error, "all ranks say the same"
    assert {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()} == before
    on_ranks(world_size, run_ranks, tmp_path / "cured", [Plan(config)])
    assert end_of(config).layers == end_of(whole).layers


@pytest.mark.parametrize(("stages", "replicas"), TOPOLOGIES)
def test_nan_is_left_out_and_counted_if_asked_for(stages: int, replicas: int, model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"stages": stages, "steps": 8, "on_nan": "skip"}
    nan = make_config(model, tmp_path / "runs" / "nan", **options)
    simple = make_config(model, tmp_path / "runs" / "left-out", **options)
    plans = [
        Plan(nan, nan=(AT, stages * replicas - 1, MODULE)),
        Plan(simple, left_out=frozenset({AT})),
    ]
    by_rank = on_ranks(stages * replicas, run_ranks, tmp_path / "store", plans)
    for told in by_rank:
        assert [step.updated for step in told[0].steps] == [step != AT for step in range(8)]
    records = records_of(nan)
    assert [record["skipped"] for record in records] == [0] * AT + [1] * (8 - AT)
    assert (records[AT]["loss"], records[AT]["grad_norm"]) == (None, None)
    others = [(one["loss"], other["loss"]) for one, other in zip(records, records_of(simple), strict=True)]
    assert all(one == other for one, other in others[:AT] + others[AT + 1 :])
    assert end_of(nan).layers == end_of(simple).layers
    assert end_of(nan).run == end_of(simple).run


TOO_LARGE = 2.0**30


@pytest.mark.parametrize(("stages", "replicas"), TOPOLOGIES)
def test_an_overflow_of_fp16_halves_the_scale_and_costs_one_update(
    stages: int, replicas: int, model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"stages": stages, "dtype": "fp16", "steps": STEPS}
    config = make_config(model, tmp_path / "runs" / "run", loss_scale=TOO_LARGE, **options)
    by_rank = on_ranks(stages * replicas, run_ranks, tmp_path / "store", [Plan(config)])
    steps = [step._replace(samples=[]) for step in by_rank[0][0].steps]
    for told in by_rank:
        assert [step._replace(samples=[]) for step in told[0].steps] == steps, "all ranks alike"
    scale = TOO_LARGE
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        assert step.scale == scale
        scale = scale if step.updated else scale / 2
        assert after is None or after.scale == scale
    overflows = [step.step for step in steps if not step.updated]
    assert overflows, "nothing overflowed"
    assert len(overflows) < STEPS - 4, "training does not go on"
    records = records_of(config)
    assert [record["skipped"] for record in records] == [
        sum(overflow <= step for overflow in overflows) for step in range(STEPS)
    ]
    assert all(record["loss"] is not None for record in records), "the loss itself is finite"
    assert [record["grad_norm"] is None for record in records] == [not step.updated for step in steps]
    # the same as if the first of them were left out at a small scale
    first = next(step.step for step in steps if step.updated)
    simple = make_config(model, tmp_path / "runs" / "left-out", loss_scale=1.0, **options)
    plan = Plan(simple, left_out=frozenset(range(first)), scale=(first, steps[first].scale))
    ((told, *_), *_) = on_ranks(stages * replicas, run_ranks, tmp_path / "simple", [plan])
    assert {step.scale for step in told.steps[:first]} == {1.0}
    assert end_of(config).layers == end_of(simple).layers
    assert [record["loss"] for record in records] == [record["loss"] for record in records_of(simple)]
