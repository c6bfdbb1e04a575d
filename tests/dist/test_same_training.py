"""Law: however a run is cut into stages, replicas and micro-batches, it is the same training as one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from lib.ranks import on_ranks
from lib.training import DROPOUT, losses_of_rank, oracle_losses

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig

STEPS = 10
RELATIVE = 1e-5
"""Sums in another order differ by some 1e-7 in fp32, which ten steps of AdamW let grow."""
SCHEDULES = ["gpipe", "1f1b", "interleaved:chunks=2"]
TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
TinyModel = Callable[..., Path]


def make_config(model: Path, run_dir: Path, *, steps: int = STEPS, **pp: object) -> Config:
    """Return a run of 6 sequences per step: in micro-batches of 2 they are three, uneven for two replicas."""
    return Config(
        model=ModelConfig(name=str(model)),
        data=DataConfig(sources="demo", sequence=32, batch=6, seed=3),
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


def test_the_loss_is_the_mean_over_the_targets_of_the_global_batch(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model("gpt2"), tmp_path, steps=5, stages=2)
    losses = on_ranks(4, losses_of_rank, tmp_path / "store", [config], True)[0]
    assert losses[0] == pytest.approx(oracle_losses(config, masked=True), rel=RELATIVE)
    assert losses[0] != pytest.approx(oracle_losses(config), rel=10 * RELATIVE), "nothing was masked"


def test_bf16_is_the_same_training_up_to_its_rounding(tiny_model: TinyModel, tmp_path: Path) -> None:
    alone = make_config(tiny_model("llama"), tmp_path)
    alone = dataclasses.replace(alone, model=ModelConfig(alone.model.name, dtype="bf16"))
    piped = dataclasses.replace(alone, pp=PipelineConfig(stages=2))
    one = on_ranks(1, losses_of_rank, tmp_path / "one", [alone])[0]
    two = on_ranks(2, losses_of_rank, tmp_path / "two", [piped])[0]
    four = on_ranks(4, losses_of_rank, tmp_path / "four", [piped])[0]
    # two stages do the same sums in the same order, bit for bit; replicas sum in another, which may round otherwise
    assert two == one
    assert four[0] == pytest.approx(one[0], rel=2.0**-8)
    exact = oracle_losses(dataclasses.replace(alone, log=LogConfig(dir=str(tmp_path / "oracle" / "run"))))
    assert one[0] == pytest.approx(exact, rel=2.0**-8)


def test_other_families_ties_and_wires(
    tiny_model: TinyModel, tmp_path: Path, oracle: Callable[[Config], list[float]]
) -> None:
    models = [tiny_model("llama"), tiny_model("llama", tie_word_embeddings=True), tiny_model("qwen2")]
    configs = [
        make_config(model, tmp_path, stages=2, schedule=schedule, forward="none:dtype=fp32")
        for model, schedule in product(models, ["1f1b:lead=2", "interleaved:chunks=3"])
    ]
    assert_same_training(configs, 4, tmp_path, oracle)
