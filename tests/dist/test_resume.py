"""Law: a resumed run equals the uninterrupted run: bit for bit at the same size, up to rounding at another size."""

from __future__ import annotations

import dataclasses
import json
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
from lib.training import RELATIVE
from safetensors.torch import load_file, save_file

from acsgd.config.options import Config
from acsgd.io.files.checksum import file_checksum
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import MANIFEST, Manifest, _with_checksum

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


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """Return finished runs of one process."""
    runs = tmp_path_factory.mktemp("uninterrupted")
    configs = {
        "dropout": make_config(tiny_model("gpt2", **DROPOUT, n_layer=4), runs / "dropout", "fp32", "none"),
        "recompute": make_config(tiny_model("gpt2", **DROPOUT, n_layer=4), runs / "recompute", "fp32", "layers"),
        "bf16": make_config(tiny_model("llama", num_hidden_layers=4), runs / "bf16", "bf16", "none", "pack"),
        "fp16": make_config(tiny_model("gpt2", **DROPOUT, n_layer=4), runs / "fp16", "fp16", "layers", "single"),
    }
    trained = on_ranks(1, train_ranks, runs / "store", list(configs.values()))[0]
    return configs, dict(zip(configs, trained, strict=True))


def test_a_run_resumed_at_the_same_size_is_bit_identical(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    configs, _ = uninterrupted
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
        (1, 2, ["dropout", "fp16"]),
        (2, 1, ["recompute", "bf16"]),
        (2, 2, ["bf16", "fp16"]),
        (4, 1, ["dropout", "bf16", "fp16"]),
    ],
)
def test_a_run_resumed_at_another_size_is_equal_up_to_rounding(
    stages: int, replicas: int, names: list[str], uninterrupted: Uninterrupted, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """And the run of many ranks, resumed at the same size, is bit-identical."""
    configs, all_trained = uninterrupted
    schedule = "interleaved" if stages == 2 else "1f1b"
    resumed = [stopped_half_way(configs[name], tmp_path, stages=stages, schedule=schedule) for name in names]
    many = make_config(tiny_model("gpt2", **DROPOUT, n_layer=4), tmp_path / "many" / "run", "fp32", "none")
    many = dataclasses.replace(many, pp=dataclasses.replace(many.pp, stages=stages))
    by_rank = on_ranks(stages * replicas, train_ranks, tmp_path / "store", [*resumed, many])
    for number, (name, half) in enumerate(zip(names, resumed, strict=True)):
        relative = RELATIVE if half.model.dtype == "fp32" else ROUNDED
        assert losses_of(half) == pytest.approx(losses_of(configs[name]), rel=relative), name
        pipelines = [by_rank[replica * stages][number] for replica in range(replicas)]
        together = [
            (step, [sample for trained in pipelines for sample in trained[at][1]])
            for at, (step, _) in enumerate(pipelines[0])
        ]
        assert together == all_trained[name][HALF:], f"{name}: the samples differ"
    half = stopped_half_way(many, tmp_path)
    on_ranks(stages * replicas, train_ranks, tmp_path / "half", [half])
    assert losses_of(half) == losses_of(many)
    ends = [Manifest.read(checkpoint_of(config)) for config in (half, many)]
    assert (ends[0].layers, ends[0].tables) == (ends[1].layers, ends[1].tables)


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
