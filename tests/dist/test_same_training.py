"""Law: however a run is cut into stages, replicas and micro-batches, it is the same training as one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from ranks import on_ranks
from training import losses_of_rank, oracle_losses

from acsgd.config import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig

STEPS = 20
RELATIVE = 1e-5
"""Sums in another order differ by some 1e-7 in fp32, which 20 steps of AdamW let grow."""
SCHEDULES = ["gpipe", "1f1b", "interleaved:chunks=2"]
TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}

TinyModel = Callable[..., Path]


def make_config(model: Path, run_dir: Path, *, steps: int = STEPS, **pp: object) -> Config:
    """Return a run of 6 sequences per step: in micro-batches of 2 they are three, uneven for two replicas."""
    return Config(
        model=ModelConfig(name=str(model)),
        data=DataConfig(task="demo", sequence=32, batch=6, seed=3),
        optim=OptimConfig(lr=1e-3, steps=steps, warmup=3, clip=0.5, weight_decay=0.1),
        pp=PipelineConfig(**pp),  # type: ignore[arg-type]
        log=LogConfig(dir=str(run_dir / "run")),
    )


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], list[float]]:
    """Return the one-process losses of a config; runs that only differ in their cut share them."""
    run_dir = tmp_path_factory.mktemp("oracle")
    known: dict[tuple[str, int], list[float]] = {}

    def losses(config: Config) -> list[float]:
        key = (config.model.name, config.pp.micro)
        if key not in known:
            known[key] = oracle_losses(dataclasses.replace(config, log=LogConfig(dir=str(run_dir / "run"))))
        return known[key]

    return losses


def assert_same_training(
    configs: list[Config], world_size: int, tmp_path: Path, oracle: Callable[[Config], list[float]]
) -> None:
    by_rank = on_ranks(world_size, losses_of_rank, tmp_path / "store", configs)
    assert all(losses == by_rank[0] for losses in by_rank), "the ranks do not agree on the loss"
    for config, losses in zip(configs, by_rank[0], strict=True):
        assert losses == pytest.approx(oracle(config), rel=RELATIVE), config.pp
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(("stages", "replicas"), TOPOLOGIES)
def test_every_cut_is_the_same_training(
    stages: int, replicas: int, tiny_model: TinyModel, tmp_path: Path, oracle: Callable[[Config], list[float]]
) -> None:
    models = [tiny_model("gpt2"), tiny_model("gpt2", **DROPOUT)]
    configs = [
        make_config(model, tmp_path, stages=stages, schedule=schedule, micro=micro)
        for model, schedule, micro in product(models, SCHEDULES, (1, 2))
    ]
    assert_same_training(configs, stages * replicas, tmp_path, oracle)


def test_other_families_ties_and_wires(
    tiny_model: TinyModel, tmp_path: Path, oracle: Callable[[Config], list[float]]
) -> None:
    models = [tiny_model("llama"), tiny_model("llama", tie_word_embeddings=True), tiny_model("qwen2")]
    configs = [
        make_config(model, tmp_path, stages=2, schedule=schedule, forward="none:dtype=fp32")
        for model, schedule in product(models, ["1f1b:lead=2", "interleaved:chunks=3"])
    ]
    assert_same_training(configs, 4, tmp_path, oracle)
