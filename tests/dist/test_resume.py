"""Law: a resumed run equals the uninterrupted run: bit for bit at the same size, up to rounding at another size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from lib.models import DROPOUT
from lib.ranks import on_ranks
from lib.resume import (
    HALF,
    TinyModel,
    Trained,
    checkpoint_of,
    losses_of,
    make_config,
    stopped_half_way,
    train_ranks,
)
from lib.training import RELATIVE, TOPOLOGIES

from acsgd.config.options import Config
from acsgd.shards.disk import Manifest, ShardDirectory

ROUNDED = 2.0**-8
"""A sum in another order may round a bf16 weight otherwise, by half of 2**-8; fp16's 2**-11 is less."""


def weights_of(config: Config) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint."""
    shards = ShardDirectory(checkpoint_of(config))
    assert not list(shards.corrupt_files())
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
