"""Law: the number of stages, replicas and micro-batches does not change the training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lib.cache import with_shared_cache
from lib.models import DROPOUT, blocks_of
from lib.ranks import on_ranks
from lib.training import RELATIVE, TOPOLOGIES, assert_same_training, losses_of_rank, make_config, oracle_losses
from transformers import AutoConfig

from acsgd.config.options import Config, LogConfig, ModelConfig, PipelineConfig, ReplicaConfig
from acsgd.tasks import find_task

SCHEDULES = ["gpipe", "1f1b", "interleaved:chunks=2", "1f1b:lead=2", "interleaved:chunks=3"]
MODELS = [
    ("gpt2", {}),
    ("gpt2", DROPOUT),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
]
TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], list[float]]:
    """Return a function that gives the one-process losses of a config, computed once per model.

    Only the dropout masks depend on the micro-batch size; without dropout, the whole batch is one micro-batch.
    """
    run_dir = tmp_path_factory.mktemp("oracle")
    known: dict[tuple[str, str, int], list[float]] = {}

    def losses(config: Config) -> list[float]:
        has_dropout = AutoConfig.from_pretrained(config.model.name).to_dict().get("resid_pdrop", 0.0) > 0
        key = (
            config.model.name,
            find_task(config.model.task).layout(config.data),
            config.pp.micro if has_dropout else config.data.batch,
        )
        if key not in known:
            pipeline = dataclasses.replace(config.pp, micro=key[-1], forward="none")
            alone = dataclasses.replace(config, pp=pipeline, log=LogConfig(dir=str(run_dir / "run")))
            known[key] = oracle_losses(alone)
        return known[key]

    return losses


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stages_and_replicas_do_not_change_the_training(
    world_size: int, tiny_model: TinyModel, tmp_path: Path, oracle: Callable[[Config], list[float]]
) -> None:
    """A Latin square: every pair of topology and model, of topology and schedule, and of model and schedule.

    Besides, each topology with padded rows, whose micro-batches are cut to the longest row; the oracle's are not.
    """
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "tell " * (1 + n % 5) + str(n)}) for n in range(60)))
    configs = []
    for row, (stages, replicas) in enumerate(TOPOLOGIES):
        for column, (family, options) in enumerate(MODELS):
            schedule = SCHEDULES[(row + column) % len(SCHEDULES)]
            if stages == 4:
                schedule = schedule.replace("chunks=3", "chunks=2")  # there are 8 layers
            if stages * replicas == world_size:
                model, micro = tiny_model(family, **options, **blocks_of(family, 6)), 1 + (row + column) % 3
                forward = "none" if micro == 1 else "none:dtype=fp32"
                configs.append(
                    make_config(model, tmp_path, stages=stages, schedule=schedule, micro=micro, forward=forward)
                )
        if stages * replicas == world_size:
            schedule = ("1f1b", "interleaved:chunks=2")[row % 2] if stages < 4 else "interleaved:chunks=2"
            model = tiny_model("gpt2", **blocks_of("gpt2", 6))
            configs.append(padded_rows(make_config(model, tmp_path, stages=stages, schedule=schedule, micro=1), texts))
    assert_same_training(configs, world_size, tmp_path, oracle)


def padded_rows(config: Config, texts: Path) -> Config:
    """Return a run on texts, one per row."""
    return with_shared_cache(
        dataclasses.replace(config, data=dataclasses.replace(config.data, sources=str(texts), rows="single"))
    )


def test_the_loss_is_the_mean_over_the_targets_of_the_global_batch(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model("gpt2", n_layer=2), tmp_path, steps=3, stages=2)
    losses = on_ranks(4, losses_of_rank, tmp_path / "store", [config], True)[0]
    assert losses[0] == pytest.approx(oracle_losses(config, masked=True), rel=RELATIVE)
    assert losses[0] != pytest.approx(oracle_losses(config), rel=10 * RELATIVE), "nothing was masked"


def test_any_split_of_the_micro_batches_is_the_same_training(tiny_model: TinyModel, tmp_path: Path) -> None:
    """With dropout, masked labels, tied weights on two ranks, and replicas without any micro-batch."""
    speeds = [(1.0, 1.0), (0.0, 1.0), (5.0, 1.0), (1.0, 0.0)]
    base = make_config(tiny_model("gpt2", n_layer=6, **DROPOUT), tmp_path, stages=2, micro=1, forward="none:dtype=fp32")
    modes = ("powersgd:rank=1", "powersgd:rank=1", "allreduce", "sharded_ps", "central_ps")
    configs = [dataclasses.replace(base, dp=ReplicaConfig(mode)) for mode in modes]
    configs += [dataclasses.replace(base, pp=dataclasses.replace(base.pp, schedule="interleaved:chunks=2"))]
    uneven = dict.fromkeys(range(1, len(configs)), speeds)
    even, *losses = on_ranks(4, losses_of_rank, tmp_path / "store", configs, True, uneven)[0]
    exact = oracle_losses(base, masked=True)
    for config, found, expected in zip(configs[1:], losses, [even, *[exact] * 4], strict=True):
        assert found == pytest.approx(expected, rel=RELATIVE), (config.dp, config.pp)


def test_bf16_is_the_same_training_up_to_its_rounding(tiny_model: TinyModel, tmp_path: Path) -> None:
    alone = make_config(tiny_model("llama", num_hidden_layers=4), tmp_path, steps=5)
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
