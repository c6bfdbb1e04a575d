"""Law: a resumed run equals the uninterrupted run: bit for bit at the same size, up to rounding at another size."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pytest
import torch
from lib.models import DROPOUT
from lib.ranks import on_ranks
from lib.replica_runs import make_replica_config
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
from lib.training import RELATIVE, schedule_of
from safetensors.torch import load_file, save_file

from acsgd.config.options import Config
from acsgd.dp import MODES
from acsgd.io.checkpoint.inspect import inspect
from acsgd.io.files.checksum import file_checksum
from acsgd.optim import OPTIMIZERS
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import MANIFEST, Manifest, _with_checksum

HAS_8BIT = importlib.util.find_spec("bitsandbytes") is not None
ROUNDED = 2.0**-8
"""A sum in another order may change the rounding of a bf16 weight, by half of 2**-8; of fp16, 2**-11."""


def weights_of(config: Config) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint."""
    shards = ShardDirectory(checkpoint_of(config))
    assert not list(shards.corrupt_files())
    return {
        key: tensor
        for layer in shards.manifest.layers
        for file in shards.files_of(layer).values()
        for key, tensor in shards.read(file).items()
        if "/" not in key
    }


Uninterrupted = tuple[dict[str, Config], dict[str, Trained]]
"""Runs of one process by name, and the batches that each trained on."""


NAMES = ("dropout", "fp16")
"""Runs of which `make test` resumes all; `make soak` resumes the others, too."""


@pytest.fixture(scope="module")
def uninterrupted(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, selected: Callable[[str], set[Any]]
) -> Uninterrupted:
    """Return finished runs of one process, those that the selected tests resume."""
    runs = tmp_path_factory.mktemp("uninterrupted")
    configs = {
        "dropout": make_config(tiny_model("gpt2", **DROPOUT, n_layer=4), runs / "dropout", "fp32", "none"),
        "recompute": make_config(tiny_model("gpt2", **DROPOUT, n_layer=4), runs / "recompute", "fp32", "layers"),
        "bf16": make_config(tiny_model("llama", num_hidden_layers=4), runs / "bf16", "bf16", "none", "pack"),
        "fp16": make_config(tiny_model("gpt2", **DROPOUT, n_layer=4), runs / "fp16", "fp16", "layers", "single"),
    }
    wanted = set(NAMES).union(*selected("names"))
    configs = {name: config for name, config in configs.items() if name in wanted}
    trained = on_ranks(1, train_ranks, runs / "store", list(configs.values()))[0]
    return configs, dict(zip(configs, trained, strict=True))


@pytest.mark.parametrize("names", [NAMES, pytest.param(("recompute", "bf16"), marks=pytest.mark.soak)])
def test_a_run_resumed_at_the_same_size_is_bit_identical(
    names: tuple[str, ...], uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    configs = {name: uninterrupted[0][name] for name in names}
    resumed = {name: stopped_half_way(config, tmp_path) for name, config in configs.items()}
    on_ranks(1, train_ranks, tmp_path / "store", list(resumed.values()))
    for name, config in configs.items():
        assert losses_of(resumed[name]) == losses_of(config), name
        one, other = (Manifest.read(checkpoint_of(each)) for each in (config, resumed[name]))
        assert one.layers == other.layers, f"{name}: weights, moments or step counts differ"
        assert one.tables == other.tables, f"{name}: weights, moments or step counts differ"
        assert one.run == other.run, name


@pytest.mark.parametrize(
    ("stages", "replicas", "names"),
    # pairwise: each dtype, recompute, and each kind of rows, with several stages and with several replicas
    [
        (1, 2, ("dropout", "fp16")),
        (2, 1, ("recompute", "bf16")),
        (2, 2, ("bf16", "fp16")),
        (4, 1, ("dropout", "bf16", "fp16")),
    ],
)
def test_a_run_resumed_at_another_size_is_equal_up_to_rounding(
    stages: int, replicas: int, names: tuple[str, ...], uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    configs, all_trained = uninterrupted
    schedule = "interleaved" if stages == 2 else "1f1b"
    resumed = [stopped_half_way(configs[name], tmp_path, stages=stages, schedule=schedule) for name in names]
    by_rank = on_ranks(stages * replicas, train_ranks, tmp_path / "store", resumed)
    for number, (name, half) in enumerate(zip(names, resumed, strict=True)):
        relative = RELATIVE if half.model.dtype == "fp32" else ROUNDED
        assert losses_of(half) == pytest.approx(losses_of(configs[name]), rel=relative), name
        pipelines = [by_rank[replica * stages][number] for replica in range(replicas)]
        together = [
            (step, [sample for trained in pipelines for sample in trained[at][1]])
            for at, (step, _) in enumerate(pipelines[0])
        ]
        assert together == all_trained[name][HALF:], f"{name}: the samples differ"


class Run(NamedTuple):
    """A run on some stages x 2 replicas."""

    mode: str
    optimizer: str = "adamw"
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    tied: str = "rows"
    stages: int = 2
    options: Mapping[str, Any] = MappingProxyType({})
    """Of the section "model"."""
    masters: Literal["fp32", "none"] = "fp32"


RUNS = [
    Run("central_ps", "lion", "bf16", stages=1, options={"recompute": "layers"}),
    Run("local", "adafactor", stages=1),
    Run("powersgd:rank=1", "schedule_free_adamw", stages=1),
    Run("diloco:inner=4,fragments=2,delay=1,moment_correction=true", "adamw", "bf16", stages=1),
    Run("cocktail:random=0.5,topk=0.2,exact_steps=3", stages=1),
]
"""Modes that keep no state, weights of their own, an outer optimizer, and what was not sent."""
OTHER_RUNS = [
    Run("allreduce:bucket_mb=0.01", "sgd", "fp16"),
    Run("sharded_ps", "muon", tied="dense"),
    Run("powersgd:rank=1", dtype="bf16", masters="none"),
    Run("allreduce", "schedule_free_adamw", "bf16"),
    Run("powersgd:rank=1", "adamw8bit", "bf16", stages=1),
    Run("diloco:inner=4,fragments=2,delay=1,moment_correction=true", "adamw", "bf16"),
    Run("sparseloco:inner=3,chunk=256,moment_correction=true", dtype="bf16", tied="dense"),
    Run("cocktail_grad:topk=0.1,exact_steps=1", dtype="bf16", stages=1),
    Run("quantized:exact_steps=2", stages=1),
    Run("allreduce", options={"dropout_mask": "sample", "recompute": "layers"}),
    Run("powersgd:rank=2,exact_steps=3", "adafactor", "bf16", tied="dense"),
    Run("local"),
    Run("diloco:inner=3,moment_correction=true", "muon", tied="dense"),
    Run("sparseloco:inner=2", "lion"),
]
"""With RUNS, each mode, and each optimizer with modes that reduce gradients and with modes with local weights, if it
can."""


def config_of(run: Run, model: Path, directory: Path) -> Config:
    """Return the config of a run of the table."""
    config = make_replica_config(model, directory / "run", run.mode, run.dtype, stages=run.stages, tied=run.tied)
    lr = {"sgd": 0.1, "adafactor": 0.01, "lion": 1e-4}.get(run.optimizer, 1e-3)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **run.options),
        optim=dataclasses.replace(
            config.optim, name=run.optimizer, lr=lr, masters=run.masters, schedule=schedule_of(run.optimizer)
        ),
    )


def train_on_2_replicas(store: Path, configs: list[Config]) -> None:
    """Train runs, those with the same number of stages in the same processes."""
    for stages in {config.pp.stages for config in configs}:
        ours = [config for config in configs if config.pp.stages == stages]
        on_ranks(2 * stages, train_ranks, store.with_name(f"{store.name}-{stages}"), ours)


@pytest.mark.parametrize("table", [RUNS, pytest.param(OTHER_RUNS, marks=pytest.mark.soak)], ids=["few", "others"])
def test_a_resumed_run_equals_an_uninterrupted_one_in_each_mode_and_with_each_optimizer(
    table: list[Run], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """All that replicas keep is saved: losses, weights, moments and the state of modes are equal bit for bit."""
    model = tiny_model("gpt2", **DROPOUT, n_layer=1)
    runs = [run for run in table if HAS_8BIT or run.optimizer != "adamw8bit"]
    configs = [config_of(run, model, tmp_path / f"whole-{number}") for number, run in enumerate(runs)]
    train_on_2_replicas(tmp_path / "store", configs)
    resumed = [stopped_half_way(config, tmp_path / f"half-{number}") for number, config in enumerate(configs)]
    train_on_2_replicas(tmp_path / "store-resumed", resumed)
    for run, config, half in zip(runs, configs, resumed, strict=True):
        assert losses_of(half) == losses_of(config), run
        one, other = (Manifest.read(checkpoint_of(each)) for each in (config, half))
        assert (one.layers, one.tables, one.replicas) == (other.layers, other.tables, other.replicas), run
        assert one.run == other.run, run
        assert inspect(checkpoint_of(config))[0].errors == [], run


def test_the_table_has_every_mode_and_every_optimizer() -> None:
    assert {run.mode.partition(":")[0] for run in (*RUNS, *OTHER_RUNS)} == {*MODES}
    assert {run.optimizer for run in (*RUNS, *OTHER_RUNS)} == {*OPTIMIZERS}


def test_a_run_resumes_from_a_checkpoint_whose_table_is_stored_with_its_layer(
    uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    """As in version 5 of the format, on two stages of which the last one holds the table."""
    whole = uninterrupted[0]["dropout"]
    half = stopped_half_way(whole, tmp_path, stages=2)
    write_as_version_5(checkpoint_of(half, HALF))
    on_ranks(2, train_ranks, tmp_path / "store", [half])
    assert losses_of(half) == pytest.approx(losses_of(whole), rel=RELATIVE)
    assert weights_of(half).keys() == weights_of(whole).keys()


def write_as_version_5(checkpoint: Path) -> None:
    """Move tables to the files of their layers, and write the manifest as version 5 of the format."""
    fields = json.loads((checkpoint / MANIFEST).read_text())
    model = Manifest.read(checkpoint).model
    for key, table in fields.pop("tables").items():
        entry = fields["layers"][model.first_holder(key).name]
        path, moved = checkpoint / entry["file"], checkpoint / table["file"]
        save_file(load_file(path) | load_file(moved), path)
        moved.unlink()
        entry |= {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
    for layer in fields["model"]["layers"]:
        del layer["lookups"]
    del fields["checksum"]
    (checkpoint / MANIFEST).write_bytes(_with_checksum(fields | {"version": 5}))


def test_the_loss_of_the_uninterrupted_runs_falls(uninterrupted: Uninterrupted) -> None:
    for name, config in uninterrupted[0].items():
        losses = losses_of(config)
        assert sum(losses[-3:]) < sum(losses[:3]), name
        assert all(tensor.isfinite().all() for tensor in weights_of(config).values()), name
