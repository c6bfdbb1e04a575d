"""Law: a run that is stopped and started again is the run that was never stopped; at another size, up to rounding."""

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
from lib.ranks import on_ranks
from test_same_training import DROPOUT, RELATIVE, TOPOLOGIES

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
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.sampling.batches import Batch
from acsgd.run.inputs import open_inputs
from acsgd.run.job import prepare
from acsgd.run.session import Session, StepResult
from acsgd.shards.disk import Manifest, ShardDirectory
from acsgd.topology import Launch, connect

STEPS, HALF = 10, 5
TIMEOUT = timedelta(seconds=120)
ROUNDED = 2.0**-8
"""A sum in another order may round a bf16 weight otherwise, by half of 2**-8; fp16's 2**-11 is less."""

TinyModel = Callable[..., Path]
Trained = list[tuple[int, list[int]]]
"""(step, sample ids) of every batch a rank trained on."""


def make_config(
    model: Path, run_dir: Path, dtype: Literal["fp32", "bf16", "fp16"], recompute: Literal["none", "layers"]
) -> Config:
    """Return a run of ten steps that is saved in the middle."""
    return Config(
        model=ModelConfig(str(model), dtype=dtype, recompute=recompute),
        data=DataConfig(sources="demo", sequence=32, batch=6, seed=3, eval_fraction=0.001),
        optim=OptimConfig(lr=1e-3, steps=STEPS, warmup=3, clip=0.5, weight_decay=0.1, loss_scale=2.0**15),
        pp=PipelineConfig(micro=2),
        checkpoint=CheckpointConfig(every=str(HALF)),
        log=LogConfig(dir=str(run_dir), to="jsonl"),
    )


def train_ranks(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[Trained]:
    """Start each run on this rank, one after the other; return what each trained on."""
    torch.set_num_threads(1)
    all_trained = []
    for number, config in enumerate(configs):
        trained: Trained = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "train_step", _noting(trained))
            job = prepare(config, Launch(rank, rank, world_size))
            inputs = open_inputs(job)
            file_store = dist.FileStore(f"{store}-{number}", world_size)
            with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
                train.train(job, inputs, groups)
        all_trained.append(trained)
    return all_trained


def _noting(trained: Trained) -> Callable[..., StepResult]:
    train_step = Session.train_step

    def noted(worker: Session, batch: Batch, progress: Progress, *args: Any, **options: Any) -> StepResult:
        trained.append((progress.step, batch.sample_ids.flatten().tolist()))
        return train_step(worker, batch, progress, *args, **options)

    return noted


def checkpoint_of(config: Config, step: int = STEPS) -> Path:
    return Path(config.log.dir) / "checkpoints" / f"step-{step:08d}"


def losses_of(config: Config) -> list[float]:
    """Return the loss of each step, having checked that each is there once, in order."""
    records = [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def weights_of(config: Config) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint."""
    shards = ShardDirectory(checkpoint_of(config))
    assert not list(shards.damages())
    return {
        key: tensor
        for layer in shards.manifest.layers
        for key, tensor in shards.tensors(layer, _keys(shards, layer)).items()
    }


def _keys(shards: ShardDirectory, layer: str) -> list[str]:
    return list(shards.state(layer)["exp_avg"])


@pytest.fixture(scope="module")
def whole(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Config], list[Trained]]:
    """Return runs of one process that were never stopped, and what they trained on."""
    runs = tmp_path_factory.mktemp("whole")
    configs = [
        make_config(tiny_model("gpt2", **DROPOUT), runs / "dropout", "fp32", "none"),
        make_config(tiny_model("gpt2", **DROPOUT), runs / "recompute", "fp32", "layers"),
        make_config(tiny_model("llama"), runs / "bf16", "bf16", "none"),
        make_config(tiny_model("gpt2", **DROPOUT), runs / "fp16", "fp16", "layers"),
    ]
    return configs, on_ranks(1, train_ranks, runs / "store", configs)[0]


def stopped_half_way(config: Config, run_dir: Path, **pp: Any) -> Config:
    """Return a run that finds what `config` had written when it was at its half, and goes on with another cut."""
    run = run_dir / Path(config.log.dir).name
    (run / "checkpoints").mkdir(parents=True)
    shutil.copytree(checkpoint_of(config, HALF), run / "checkpoints" / f"step-{HALF:08d}")
    # a run that was killed may have logged steps that its checkpoint knows nothing of, the last one in half
    text = (Path(config.log.dir) / "metrics.jsonl").read_text()
    lines = text.splitlines(keepends=True)[: HALF + 3]
    (run / "metrics.jsonl").write_text("".join(lines) + f'{{"step": {HALF + 4}, "lo')
    return dataclasses.replace(
        config,
        pp=dataclasses.replace(config.pp, **pp),
        log=dataclasses.replace(config.log, dir=str(run)),
    )


def test_at_the_same_size_it_is_the_same_run_bit_for_bit(
    whole: tuple[list[Config], list[Trained]], tmp_path: Path
) -> None:
    configs, _ = whole
    halves = [stopped_half_way(config, tmp_path) for config in configs]
    on_ranks(1, train_ranks, tmp_path / "store", halves)
    for config, half in zip(configs, halves, strict=True):
        assert losses_of(half) == losses_of(config)
        one, other = (Manifest.read(checkpoint_of(each)) for each in (config, half))
        assert one.layers == other.layers, "weights, moments and step counts, by their sha256"
        assert one.run == other.run


@pytest.mark.parametrize(("stages", "replicas"), TOPOLOGIES[1:])
def test_at_another_size_it_is_the_same_run_up_to_rounding(
    stages: int, replicas: int, whole: tuple[list[Config], list[Trained]], tmp_path: Path
) -> None:
    configs, all_trained = whole
    schedule = "interleaved" if stages == 2 else "1f1b"
    halves = [stopped_half_way(config, tmp_path, stages=stages, schedule=schedule) for config in configs]
    by_rank = on_ranks(stages * replicas, train_ranks, tmp_path / "store", halves)
    for number, (config, half) in enumerate(zip(configs, halves, strict=True)):
        relative = RELATIVE if config.model.dtype == "fp32" else ROUNDED
        assert losses_of(half) == pytest.approx(losses_of(config), rel=relative), config.log.dir
        pipelines = [by_rank[replica * stages][number] for replica in range(replicas)]
        together = [
            (step, [sample for trained in pipelines for sample in trained[at][1]])
            for at, (step, _) in enumerate(pipelines[0])
        ]
        assert together == all_trained[number][HALF:], "the samples, each once"


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 2), (4, 1)])
def test_a_run_of_many_ranks_goes_on_bit_for_bit(
    stages: int, replicas: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = make_config(tiny_model("gpt2", **DROPOUT), tmp_path / "whole" / "run", "fp32", "none")
    config = dataclasses.replace(config, pp=dataclasses.replace(config.pp, stages=stages))
    on_ranks(stages * replicas, train_ranks, tmp_path / "store", [config])
    half = stopped_half_way(config, tmp_path)
    on_ranks(stages * replicas, train_ranks, tmp_path / "half", [half])
    assert losses_of(half) == losses_of(config)
    assert Manifest.read(checkpoint_of(half)).layers == Manifest.read(checkpoint_of(config)).layers


def test_the_whole_runs_learn(whole: tuple[list[Config], list[Trained]]) -> None:
    for config in whole[0]:
        losses = losses_of(config)
        assert losses[-1] < losses[0]
        assert all(tensor.isfinite().all() for tensor in weights_of(config).values())
