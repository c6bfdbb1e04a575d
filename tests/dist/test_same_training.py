"""Law: the number of stages, replicas and micro-batches does not change the training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lib.cache import with_shared_cache
from lib.models import blocks_of, dropout_of
from lib.optimizers import optimizer_of_torch
from lib.ranks import on_ranks
from lib.training import RELATIVE, TOPOLOGIES, losses_of_rank, make_config, oracle_losses

from acsgd.config.options import Config, LogConfig, ModelConfig, PipelineConfig, ReplicaConfig

TinyModel = Callable[..., Path]
LEVELS = 5
"""Number of levels of each factor."""
MODELS: Sequence[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("gpt2", {}),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
]
WITH_DROPOUT = 1
"""Index of the model that has dropout."""
SCHEDULES = ["gpipe", "1f1b", "interleaved:chunks=2", "1f1b:lead=2", "interleaved:chunks=3"]
ROWS = ["whole", "masked", "padded", "unevenly dealt", "masked and unevenly dealt"]
"""Whether labels are ignored, rows are shorter than others, and micro-batches are dealt by speeds that change."""
OPTIMIZERS = [
    {},
    {"name": "sgd", "lr": 0.1},
    {"name": "adafactor", "lr": 0.05, "schedule": "wsd"},
    {"name": "muon"},
    {"clip": float("inf"), "schedule": "cosine"},
]
FEATURES: Sequence[dict[str, Any]] = [
    {},
    {"model.dropout_mask": "sample"},
    {"model.recompute": "layers", "run.connections": 3},
    {"pp.tied": "dense", "dp.mode": "sharded_ps:bucket_mb=0.01"},
    {"pp.forward": "none:dtype=fp32", "dp.mode": "central_ps"},
]
HOSTS = (2, 0, 3, 1)
"""Order of the hosts, of which each has one rank, in most cases of four ranks."""
SPEEDS = {1: [], 2: [(1.0, 1.0), (0.0, 1.0), (5.0, 1.0), (1.0, 0.0)]}
"""Of the replicas, by step: some get no micro-batch."""


class Case(NamedTuple):
    """A configuration of the table, by the level of each factor."""

    topology: int
    model: int
    schedule: int
    rows: int
    optimizer: int
    feature: int


CASES = [
    Case(first, *((second + first * times) % LEVELS for times in range(LEVELS)))
    for first in range(LEVELS)
    for second in range(LEVELS)
]
"""An orthogonal array (Rao 1947): each pair of levels of any two factors is in one case."""
FEW = [
    CASES[LEVELS * topology + second]
    for topology, of_topology in enumerate([(0,), (2,), (1, 4), (1,), (3,)])
    for second in of_topology
]
"""Cases that have each level of what depends on the topology: masked labels, uneven dealing and modes with replicas;
dropout, tied weights and interleaved schedules with stages. `make soak` runs the others."""


class Table:
    """The configurations and their losses in one process, in plain PyTorch."""

    def __init__(self, tiny_model: TinyModel, directory: Path) -> None:
        self._tiny_model, self._directory = tiny_model, directory
        self._texts = directory / "texts.jsonl"
        self._texts.write_text("\n".join(json.dumps({"text": "tell " * (1 + n % 5) + str(n)}) for n in range(60)))

    def config(self, case: Case) -> Config:
        """Return the configuration of a case."""
        feature, (family, options) = FEATURES[case.feature], MODELS[case.model]
        if self._has_dropout(case):
            options = options | dropout_of(family)
        if feature.get("pp.tied") == "dense" and family == "llama":
            options = options | {"tie_word_embeddings": True}
        stages, _ = TOPOLOGIES[case.topology]
        schedule = SCHEDULES[case.schedule]
        if stages == 4:
            schedule = schedule.replace("chunks=3", "chunks=2")  # there are 8 layers, else 6
        micro = 1 + (case.topology + case.schedule) % 3
        model = self._tiny_model(family, **options, **blocks_of(family, 6 if stages == 4 else 4))
        hosts = HOSTS if ranks_of(case) == len(HOSTS) and not case.optimizer % 2 else None
        config = make_config(model, self._directory, stages=stages, schedule=schedule, micro=micro, hosts=hosts)
        if ROWS[case.rows] == "padded":
            config = dataclasses.replace(
                config, data=dataclasses.replace(config.data, sources=str(self._texts), rows="single")
            )
        optim = dataclasses.replace(config.optim, **OPTIMIZERS[case.optimizer])
        return with_shared_cache(_with(dataclasses.replace(config, optim=optim), feature))

    def _has_dropout(self, case: Case) -> bool:
        """Whether the model has dropout: its masks have the length of rows, to which the oracle does not cut them."""
        wants = case.model == WITH_DROPOUT or "model.dropout_mask" in FEATURES[case.feature]
        return wants and ROWS[case.rows] != "padded"

    def oracle(self, case: Case) -> list[float]:
        """Train in one process; without dropout, in micro-batches of the whole batch."""
        config, (family, _) = self.config(case), MODELS[case.model]
        micro = config.data.batch
        if self._has_dropout(case):  # with masks per sample, the oracle runs one sequence at a time
            micro = 1 if config.model.dropout_mask == "sample" else config.pp.micro
        log = LogConfig(dir=str(self._directory / "oracle"))
        alone = dataclasses.replace(config, pp=PipelineConfig(micro=micro), log=log)
        make = optimizer_of_torch(config.optim.name, family)
        return oracle_losses(alone, masked="masked" in ROWS[case.rows], make=make)


def _with(config: Config, options: dict[str, Any]) -> Config:
    """Return a config with other options, named as "pp.tied"."""
    for name, value in options.items():
        section, _, option = name.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{option: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def losses_of_cases(
    rank: int, world_size: int, store: Path, configs: Sequence[Config], rows: Sequence[str]
) -> list[list[float]]:
    """Train each config on this rank; return the losses."""
    losses = []
    for number, (config, of_rows) in enumerate(zip(configs, rows, strict=True)):
        speeds = {0: SPEEDS[world_size // config.pp.stages]} if "unevenly" in of_rows else {}
        path = store.with_name(f"{store.name}-case-{number}")
        losses += losses_of_rank(rank, world_size, path, [config], "masked" in of_rows, speeds)
    return losses


def ranks_of(case: Case) -> int:
    """Return the number of ranks of a case."""
    stages, replicas = TOPOLOGIES[case.topology]
    return stages * replicas


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["few", "others"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stages_and_replicas_do_not_change_the_training(
    world_size: int, others: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    table = Table(tiny_model, tmp_path)
    cases = [case for case in CASES if ranks_of(case) == world_size and (case in FEW) != others]
    configs = [table.config(case) for case in cases]
    rows = [ROWS[case.rows] for case in cases]
    by_rank = on_ranks(world_size, losses_of_cases, tmp_path / f"store-{world_size}", configs, rows)
    assert all(losses == by_rank[0] for losses in by_rank), "ranks return different losses"
    for case, losses in zip(cases, by_rank[0], strict=True):
        assert losses == pytest.approx(table.oracle(case), rel=RELATIVE), (case, table.config(case))


def test_each_pair_of_levels_is_in_one_case() -> None:
    for first in range(len(Case._fields)):
        for second in range(first):
            assert len({(case[first], case[second]) for case in CASES}) == LEVELS**2 == len(CASES)
    for field in ("topology", "schedule", "rows", "feature"):
        assert len({getattr(case, field) for case in FEW}) == LEVELS
    assert WITH_DROPOUT in {case.model for case in FEW}


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_lossy_gradients_do_not_depend_on_how_micro_batches_are_dealt(
    stages: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """With dropout, masked labels, tied weights on two ranks, and replicas without any micro-batch."""
    model = tiny_model("gpt2", n_layer=3 * stages, **dropout_of("gpt2"))
    config = make_config(model, tmp_path, stages=stages, micro=1, forward="none:dtype=fp32")
    config = dataclasses.replace(config, dp=ReplicaConfig("powersgd:rank=1"))
    even, uneven = on_ranks(2 * stages, losses_of_rank, tmp_path / "store", [config] * 2, True, {1: SPEEDS[2]})[0]
    assert uneven == pytest.approx(even, rel=RELATIVE)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_bf16_is_the_same_training_up_to_its_rounding(ranks: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    alone = make_config(tiny_model("llama", num_hidden_layers=4), tmp_path, steps=5)
    alone = dataclasses.replace(alone, model=ModelConfig(alone.model.name, dtype="bf16"))
    piped = dataclasses.replace(alone, pp=PipelineConfig(stages=2))
    one = on_ranks(1, losses_of_rank, tmp_path / "one", [alone])[0]
    # two stages do the same sums in the same order, bit for bit; replicas sum in another, which may round otherwise
    if ranks == 2:
        assert on_ranks(2, losses_of_rank, tmp_path / "two", [piped])[0] == one
    else:
        four = on_ranks(4, losses_of_rank, tmp_path / "four", [piped])[0]
        assert four[0] == pytest.approx(one[0], rel=2.0**-8)
    exact = oracle_losses(dataclasses.replace(alone, log=LogConfig(dir=str(tmp_path / "oracle" / "run"))))
    assert one[0] == pytest.approx(exact, rel=2.0**-8)
